"""A SLURM of one node on this machine: munged, slurmctld and slurmd with files of their own, without systemd."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CONFIGURATION = Path(__file__).with_name("slurm.conf")
# Seconds in which a daemon must reply.
START_SECONDS = 30
# CPUs of the node, whatever this machine has.
CPUS = 3
# Debian installs the daemons here.
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


class ClusterError(Exception):
    """The daemons do not start; the message has their logs."""


def wait_until(condition: Callable[[], bool], message: str, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(message)
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()


class LocalCluster:
    """Start the daemons in `with`; end them afterwards.

    Args:
        directory: Directory to create for key, sockets, state and logs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.configuration = directory / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration), "PATH": SEARCH_PATH}
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "LocalCluster":
        for name in ("state", "spool", "munge"):
            (self.directory / name).mkdir(mode=0o755, parents=True)
        host = socket.gethostname().partition(".")[0]
        controller_port, daemon_port = free_ports(2)
        key, munge_socket = self.directory / "munge" / "key", self.directory / "munge" / "socket"
        stepd = shutil.which("slurmstepd", path=SEARCH_PATH) or ""
        text = CONFIGURATION.read_text(encoding="utf-8").format(
            directory=self.directory,
            host=host,
            cpus=CPUS,
            controller_port=controller_port,
            daemon_port=daemon_port,
            munge_socket=munge_socket,
        )
        if plugins := os.environ.get("SLURM_PLUGIN_DIR"):
            text += f"PluginDir={plugins}\n"
        self.configuration.write_text(text, encoding="utf-8")
        # slurmd loads a plugin for cgroups even if nothing uses it. That of version 1 needs no mounted file system.
        plugin = "disabled" if self._version() >= (23, 11) else "cgroup/v1"
        self.configuration.with_name("cgroup.conf").write_text(f"CgroupPlugin={plugin}\n", encoding="utf-8")
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._commands = {
            "munged": [
                *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}"),
                *(f"--pid-file={key}.pid", f"--seed-file={key}.seed", f"--log-file={self.directory}/munged.log"),
            ],
            "slurmctld": ["slurmctld", "-D", "-i", "-f", str(self.configuration)],
            "slurmd": ["slurmd", "-D", "-f", str(self.configuration), "-N", host, "-d", stepd],
        }
        try:
            self.start("munged")
            self._wait_until(munge_socket.exists, "munged does not start")
            self.start("slurmctld")
            self.start("slurmd")
            self._wait_until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%T"), "the node does not become idle")
            job = ["srun", "--immediate=20", "--ntasks=1", "echo", "started"]
            self._wait_until(lambda: "started" in self.run(*job), "the node runs no job")
        except BaseException as error:
            self.__exit__()
            if isinstance(error, (OSError, subprocess.SubprocessError)):
                raise ClusterError(f"{self.logs()}\n{error}") from error
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for name in reversed(list(self._daemons)):
            self.stop(name)
        # Jobs outlive slurmd.
        self._kill_jobs()

    def _version(self) -> tuple[int, ...]:
        """Return year and month of SLURM's version."""
        numbers = re.search(r"(\d+)\.(\d+)", self.run("slurmd", "-V"))
        return tuple(map(int, numbers.groups())) if numbers else (0, 0)

    def _wait_until(self, condition: Callable[[], bool], message: str) -> None:
        """Wait for the start of the daemons; raise an error if one has ended."""

        def has_ended() -> bool:
            return any(daemon.poll() is not None for daemon in self._daemons.values())

        wait_until(lambda: condition() or has_ended(), message)
        if has_ended():
            raise ChildProcessError(message)

    def start(self, name: str) -> None:
        with (self.directory / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                self._commands[name], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def kill_node(self) -> int:
        """Kill slurmd and all processes of jobs, as the failure of a node does; return the number of the latter.

        The controller notices it after SlurmdTimeout.
        """
        daemon = self._daemons.pop("slurmd")
        daemon.kill()
        daemon.wait()
        count = self._kill_jobs()
        wait_until(lambda: "down" in self.run("sinfo", "-h", "-o", "%T"), "the controller does not notice it", 60)
        return count

    def _kill_jobs(self) -> int:
        """Kill all processes of jobs and return their number."""
        killed: set[int] = set()
        deadline = time.monotonic() + START_SECONDS
        while (pids := self._job_processes()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(pids)
            time.sleep(0.05)
        return len(killed)

    def _job_processes(self) -> list[int]:
        """Return the ids of slurmstepd and its descendants, which have this cluster's file in their environment."""
        mark = f"SLURM_CONF={self.configuration}".encode()
        pids = []
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (directory / "environ").read_bytes().split(b"\0")
                is_job = any(variable.startswith(b"SLURM_JOB_ID=") for variable in variables)
                if mark in variables and (is_job or (directory / "comm").read_text().strip() == "slurmstepd"):
                    pids.append(int(directory.name))
        return pids

    def run(self, *command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """Return the output of a command of SLURM; empty if it fails."""
        env = env or self.environment
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60).stdout

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        files = sorted([*self.directory.glob("*.out"), *self.directory.glob("*.log")])
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)
