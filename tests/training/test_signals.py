"""Signals are handled while the process is inside a long native call."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from mgk._core.io import STOPPING as STOPPING_NOTE
from mgk._core.io import exclusive, mark_stopping
from mgk.training.signals import GRACE, SAME_REQUEST, STOPPING, SignalListener

# hashlib releases the GIL and runs no signal handlers, like a backward pass.
BUSY = """
import hashlib, signal, sys
from mgk.training.signals import SignalListener
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
listener = SignalListener([signal.SIGINT, signal.SIGTERM])
print("ready", file=sys.stderr, flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
"""


@pytest.mark.slow
def test_first_signal_prints_at_once_and_second_ends_the_process():
    with subprocess.Popen([sys.executable, "-c", BUSY], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == f"{STOPPING}\n"
            # A launcher may forward the same request: a second signal within SAME_REQUEST is ignored.
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(GRACE + SAME_REQUEST + 0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_closed_listener_and_other_signals_print_nothing(capfd):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    listener = SignalListener([signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR1)
    listener.close()
    listener.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert signal.set_wakeup_fd(-1) == -1
    assert capfd.readouterr().err == ""


def test_lock_of_a_stopping_run_says_so(tmp_path):
    """Another start waits for a run that has received a signal, however long it takes to save."""
    lock, is_called = tmp_path / ".run.lock", threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    with exclusive(lock, "a run", "wait"):
        listener = SignalListener([signal.SIGUSR1], message="", on_first=lambda: (mark_stopping(lock), is_called.set()))
        assert not lock.read_text().strip().endswith(STOPPING_NOTE)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert is_called.wait(60)
        assert lock.read_text().strip().endswith(STOPPING_NOTE)
        listener.close()
    signal.signal(signal.SIGUSR1, before)
