"""Signals that are answered as they come. Python calls its handlers between two of its own instructions, and a backward
pass on a CPU is one of them, which may take minutes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection

# Seconds that an orderly end has, after the second signal.
GRACE = 2.0
# Seconds after the first in which another is the same wish: Ctrl-C reaches a launcher and its processes, and the
# launcher then asks them too.
SAME = 1.0
STOPPING = "stopping after this step, and saving; once more ends it now"


class SignalListener:
    """While it is open: at the first of these signals it tells what will happen, and at the second the process ends,
    unless Python's own handlers come to close this first. To be made in the main thread."""

    def __init__(self, numbers: Collection[int], told: str = STOPPING) -> None:
        self._numbers, self._told = frozenset(numbers), told
        self._closed = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            signal.set_wakeup_fd(self._before)
            self._writer.close()

    def _listen(self) -> None:
        first = None
        with self._reader:
            while found := self._reader.recv(1):
                if found[0] not in self._numbers:
                    continue
                if first is None:
                    first = time.monotonic()
                    if self._told:
                        print(self._told, file=sys.stderr, flush=True)
                elif time.monotonic() > first + SAME and not self._closed.wait(GRACE):
                    os._exit(128 + found[0])
