"""Files and folders that take the place of others: whole, or not at all.

What is written stands beside its place under a temporary name, until it is on the disk. The name
says whose it is, so that a later save removes what a killed process has left.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_HOST = platform.node()
_EXCHANGE, _HERE = 2, -100  # of renameat2: swap two names; paths are as given
_CANT = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}


def temporary_name(target: str) -> str:
    """Where this process writes what will take the place of a file or folder."""
    return f"{target}.{_HOST}-{os.getpid()}.tmp"


def take_place(temporary: str, target: str) -> None:
    """Put what is written in its place; at every moment the old or the new one stands there.

    Args:
        temporary: A file or folder on the same disk.
        target: Its place, where another one may stand, which is removed.
    """
    _all_to_disk(temporary)
    if not os.path.isdir(temporary) and not os.path.isdir(target):
        os.replace(temporary, target)
    elif not os.path.lexists(target):
        os.rename(temporary, target)
    elif not exchange(temporary, target):
        old = temporary.removesuffix(".tmp") + ".old"
        os.rename(target, old)  # a process that is killed now: `found` knows the old one
        os.rename(temporary, target)
        remove(old)
    _to_disk(os.path.dirname(target))
    remove(temporary)  # the old one, if they were exchanged


@contextmanager
def replaced(target: str) -> Iterator[str]:
    """Write what takes the place of a file inside this context, under the name that it gives."""
    remove_leftovers(target)
    temporary = temporary_name(target)
    try:
        yield temporary
        take_place(temporary, target)
    finally:
        remove(temporary)


def found(target: str) -> str:
    """Where a file or folder is: the one to be replaced, if the process was killed just then."""
    if os.path.lexists(target):
        return target
    return max(_left(target, "*", "old"), key=os.path.getmtime, default=target)


def remove(path: str) -> None:
    """Remove a file or folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.remove(path)


def remove_at_once(path: str) -> None:
    """Remove a file or folder so that no part of it is left under its name at any moment."""
    gone = temporary_name(path)
    os.rename(path, gone)
    remove(gone)


def remove_leftovers(target: str) -> None:
    """Remove what killed processes of this machine have left of earlier tries to write it."""
    kinds = ("tmp", "old") if os.path.lexists(target) else ("tmp",)
    for kind in kinds:
        for name in _left(target, _HOST, kind):
            if not _is_alive(int(name.removesuffix(f".{kind}").rpartition("-")[2])):
                remove(name)


def _left(target: str, host: str, kind: str) -> list[str]:
    """What processes have left beside a file or folder."""
    host = host if host == "*" else glob.escape(host)
    names = glob.glob(f"{glob.escape(target)}.{host}-*.{kind}")
    return [n for n in names if n.removesuffix(f".{kind}").rpartition("-")[2].isdigit()]


def _all_to_disk(path: str) -> None:
    """Wait until a file, or a folder with its files, would outlive a power cut."""
    if os.path.isdir(path):
        for entry in os.scandir(path):
            _to_disk(entry.path)
    _to_disk(path)


def _to_disk(path: str) -> None:
    number = os.open(path or os.curdir, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def exchange(one: str, other: str) -> bool:
    """Let two names on a disk change places, in one step.

    Returns:
        Whether the system and the disk can do so.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANT:
        return False
    raise OSError(number, os.strerror(number), one, None, other)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
