"""Runs `mgk` in forked processes with faults. Forking saves the imports, which take longer than a small run.

Reads one request per line of standard input and writes one reply per line, in JSON.
"""

import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard

import mgk.cli
import mgk.training.evaluate
from mgk.cli import commands
from tests.faults.injection import Injection


def run(request: dict[str, Any]) -> None:
    """Run a command of `mgk` in this process, and exit."""
    os.chdir(request["cwd"])
    injection = Injection(Path(request["cwd"]) / "out", request["kind"], request["point"])
    if request["kind"] == "EFBIG":
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["point"], request["point"]))
    elif request["kind"] != "none":
        injection.install()
    sys.argv = ["mgk", *request["arguments"]]
    try:
        mgk.cli.run_app(lambda: commands.app, "mgk", request["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    if request["kind"] == "count":
        Path("operations.json").write_text(json.dumps(injection.operations))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        # A pipe: a limit of the file size must not apply to the output.
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.close(reader)
            os.close(writer)
            run(json.loads(line))
        os.close(writer)
        with open(reader, encoding="utf-8", errors="replace") as output:
            log = output.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([status, log]), flush=True)
    # The end of the interpreter takes seconds after the imports.
    os._exit(0)


if __name__ == "__main__":
    main()
