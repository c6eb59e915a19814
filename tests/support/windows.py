"""Simulate the standard library of Windows for the code of this repository.

`install` replaces the import statement in the modules of mgk and experiments; other packages are not affected.
"""

import builtins
import errno
import os
import signal
from types import ModuleType
from typing import Any

PACKAGES = ("mgk", "experiments")
MISSING_MODULES = "fcntl resource pwd grp termios tty pty syslog posix readline crypt curses".split()
MISSING = {
    "os": """fork forkpty killpg getpgid getpgrp setpgid setsid getsid getuid geteuid getgid getegid getgroups setuid
        setgid chown fchown lchown fchmod mkfifo mknod chroot statvfs fstatvfs uname sysconf confstr pathconf getloadavg
        nice getpriority sched_getaffinity sched_setaffinity wait wait3 wait4 waitid WIFEXITED WIFSIGNALED WTERMSIG
        WEXITSTATUS pread pwrite posix_fadvise posix_fallocate posix_spawn register_at_fork ctermid ttyname openpty sync
        fdatasync memfd_create pipe2 sendfile O_NOFOLLOW O_CLOEXEC O_DIRECTORY O_NONBLOCK O_SYNC getxattr setxattr
        lockf""",
    "signal": """SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGSTOP SIGCONT SIGXFSZ SIGPIPE SIGQUIT SIGTSTP
        pthread_kill pthread_sigmask sigwait sigpending setitimer getitimer alarm pause siginterrupt""",
}


class Windows(ModuleType):
    """A module without the names that Windows lacks, and with other functions."""

    def __init__(self, module: ModuleType, functions: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self._module, self._missing = module, frozenset(MISSING[module.__name__].split())
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return getattr(self._module, name)


def _kill(process: int, number: int) -> None:
    raise AssertionError(f"os.kill({process}, {number}) ends a process on Windows, whatever the signal")


def _open(path: Any, *arguments: Any, **options: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, *arguments, **options)


def _fsync(descriptor: int) -> None:
    import fcntl

    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(descriptor)


def install() -> None:
    """Simulate Windows in the modules of PACKAGES that are imported from now on."""
    modules = {
        "os": Windows(os, {"name": "nt", "kill": _kill, "open": _open, "fsync": _fsync}),
        "signal": Windows(signal, {}),
    }
    import_module = builtins.__import__

    def import_on_windows(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        importer = str((globals or {}).get("__name__", ""))
        if level == 0 and importer.partition(".")[0] in PACKAGES:
            if name in MISSING_MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in modules:
                return modules[name]
        return import_module(name, globals, locals, fromlist, level)

    builtins.__import__ = import_on_windows
