"""Executables with the names of SLURM's commands that run jobs as processes of this machine."""

import os
from pathlib import Path

SCRIPTS = {
    "sbatch": """
[ -e "$FAKE/refuse" ] && { echo "sbatch: error: invalid partition specified" >&2; exit 1; }
script=${@: -1}
id=$(($(ls "$FAKE/jobs" | wc -l) + 1))
job=$FAKE/jobs/$id
mkdir "$job"
cp "$script" "$job/script"
sed -n "s/^#SBATCH --job-name=//p" "$script" > "$job/name"
eval "log=$(sed -n "s/^#SBATCH --output=//p" "$script")"
export SLURM_JOB_ID=$id
setsid bash -c '
  while true; do bash "$1/script" & echo $! > "$1/pid"; wait $!; [ -e "$1/requeue" ] || break; rm "$1/requeue"; done
  touch "$1/ended"' - "$job" >> "$log" 2>&1 < /dev/null &
echo "Submitted batch job $id"
""",
    "srun": """
while [[ $1 == --* ]]; do shift; done
exec "$@"
""",
    "squeue": """
[ -e "$FAKE/down" ] && exit 1
for job in "$FAKE"/jobs/*; do
  [ -e "$job/name" ] && [ ! -e "$job/ended" ] && echo "$(basename "$job")|RUNNING|$(cat "$job/name")"
done
exit 0
""",
    "scancel": """
echo "$@" >> "$FAKE/cancelled"
for id in "$@"; do touch "$FAKE/jobs/$id/ended"; pkill -KILL -P "$(cat "$FAKE/jobs/$id/pid")"; done
exit 0
""",
    "scontrol": """
touch "$FAKE/jobs/$2/requeue"
""",
}


class FakeSlurm:
    """Directory of the executables and of their jobs."""

    def __init__(self, directory: Path, monkeypatch) -> None:
        self.directory = directory
        (directory / "jobs").mkdir(parents=True)
        for name, text in SCRIPTS.items():
            path = directory / name
            path.write_text(f"#!/bin/bash\n{text}")
            path.chmod(0o755)
        monkeypatch.setenv("FAKE", str(directory))
        monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")

    @property
    def scripts(self) -> list[str]:
        """The submitted batch scripts."""
        jobs = sorted((self.directory / "jobs").iterdir(), key=lambda job: int(job.name))
        return [(job / "script").read_text() for job in jobs]

    @property
    def cancelled(self) -> list[str]:
        file = self.directory / "cancelled"
        return file.read_text().split() if file.exists() else []
