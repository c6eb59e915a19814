"""Stop requests by SIGTERM, SIGINT and SIGHUP.

Python runs signal handlers only between bytecode instructions. A backward pass on a CPU is a single instruction and may
take minutes. A separate thread therefore prints the reply and ends the process at the second signal.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mgk.training.process_group import is_distributed

# Seconds allowed for an orderly exit after the second signal.
GRACE = 2.0
# Seconds after the first signal in which another one counts as the same request: Ctrl-C reaches torchrun and its
# processes, and torchrun forwards it to them.
SAME_REQUEST = 1.0
STOPPING = "Stopping after this step and saving. Press Ctrl-C again to quit now."
EVALUATING = "The training is finished: stopping after its evaluation. Press Ctrl-C again to quit now."
# Set by a process that starts training runs: a run stops at the end of its standard input, a pipe from that process.
STOP_AT_END_OF_INPUT = "MGK_STOP_AT_END_OF_INPUT"
# Exit status of `mgk train` after SIGTERM.
TERMINATED = 128 + signal.SIGTERM
# SIGHUP is sent when a terminal closes. Windows does not have it.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")


def stop_with_parent() -> None:
    """Send SIGTERM to this process when the process that started it has ended, if STOP_AT_END_OF_INPUT is set.

    A byte on standard input ends the watch: the parent has sent a signal itself.
    """

    def watch() -> None:
        if not os.read(0, 1):
            if os.name == "nt":
                # On Windows, os.kill ends the process without calling the handler.
                signal.raise_signal(signal.SIGTERM)
            else:
                os.kill(os.getpid(), signal.SIGTERM)

    if os.environ.pop(STOP_AT_END_OF_INPUT, ""):
        threading.Thread(target=watch, daemon=True).start()


class SignalListener:
    """Thread that prints a message at the first signal and exits at the second one.

    The process exits with os._exit unless `close` is called within GRACE seconds. Must be created in the main thread.

    Args:
        numbers: Signals to listen to.
        message: Reply to the first signal; empty for none.
        on_first: Function to call at the first signal, in the thread.
    """

    def __init__(
        self, numbers: Collection[int], message: str = STOPPING, on_first: Callable[[], None] | None = None
    ) -> None:
        self._numbers, self._message, self._on_first = frozenset(numbers), message, on_first
        self._closed = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        if not self._closed.is_set():
            self._closed.set()
            signal.set_wakeup_fd(self._previous_fd)
            self._writer.close()

    def _listen(self) -> None:
        first = None
        with self._reader:
            while received := self._reader.recv(1):
                if received[0] not in self._numbers:
                    continue
                if first is None:
                    first = time.monotonic()
                    if self._message:
                        print(self._message, file=sys.stderr, flush=True)
                    if self._on_first is not None:
                        self._on_first()
                elif time.monotonic() > first + SAME_REQUEST and not self._closed.wait(GRACE):
                    os._exit(128 + received[0])


@contextmanager
def deferred_stop(message: str = EVALUATING) -> Iterator[None]:
    """Defer stop signals: the block is completed after the first one, which is answered with a message.

    A second signal ends the process.
    """
    request = StopRequest()
    request.install(message)
    try:
        yield
    finally:
        request.restore()


class StopRequest:
    """The signal that stops a run after its current step."""

    def __init__(self) -> None:
        self._number: int | None = None  # the signal that this process received
        self._time = 0.0
        self._previous_handlers: dict[int, Any] = {}
        self._listener: SignalListener | None = None

    def install(self, message: str = STOPPING, on_first: Callable[[], None] | None = None) -> None:
        """Install the handlers and the listener, which prints `message` and calls `on_first` at the first signal."""
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)
            # Under nohup, SIGHUP stays ignored.
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._handle)
        self._listener = SignalListener(self._previous_handlers, message, on_first)

    def _handle(self, number: int, frame: Any) -> None:
        if self._number is None:
            self._number, self._time = number, time.monotonic()
        elif time.monotonic() > self._time + SAME_REQUEST:
            raise KeyboardInterrupt

    def number(self, device: torch.device) -> int | None:
        """Return the signal that any process of the run received; all processes must call this together."""
        if not is_distributed():
            return self._number
        number = torch.tensor(self._number or 0, device=device)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return int(number) or None

    def close_listener(self) -> None:
        """Stop the listener; the handlers stay installed."""
        if self._listener is not None:
            self._listener.close()

    def restore(self) -> None:
        """Stop the listener and restore the previous handlers."""
        self.close_listener()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
