"""The command `mgk`. What it needs beyond the core is imported when it runs, and asked for in one line if missing."""

from __future__ import annotations

import signal
import sys


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    try:
        from mgk import commands
    except ImportError as error:
        needed = f"this command needs the extra 'train' ({error.name} is missing)"
        print(f"mgk: {needed}: pip install 'mgk[train]', or '.[train]' in a clone", file=sys.stderr)
        sys.exit(2)
    # As Ctrl-C does, so that what a command has started is ended with it.
    signal.signal(signal.SIGTERM, _leave)
    try:
        commands.app(standalone_mode=True)
    except (ValueError, OSError) as error:
        print(f"mgk: {error}", file=sys.stderr)
        sys.exit(2)
