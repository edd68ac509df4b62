"""Namespaces of other processes: entering one for a moment, and netlink sockets that stay in one.

Owns the setns call. A socket belongs to the namespace it was made in, so a netlink handle opened
here keeps working after the thread has gone back.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
CLONE_NEWPID = 0x20000000
CLONE_NEWUSER = 0x10000000

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> int:
    """Call a libc function; a negative result raises OSError with errno and the function's name."""
    result: int = getattr(_libc, name)(*args)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def setns(fd: int, kind: int) -> None:
    """Move the calling thread into the namespace behind `fd`."""
    call("setns", fd, kind)


@contextmanager
def network_namespace_of(pid: int) -> Iterator[None]:
    """The calling thread is in `pid`'s network namespace inside the block, and back afterwards."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(target, CLONE_NEWNET)
        finally:
            os.close(target)
        try:
            yield
        finally:
            setns(own, CLONE_NEWNET)
    finally:
        os.close(own)


@contextmanager
def netlink_in(pid: int) -> Iterator[Any]:
    """A pyroute2 IPRoute whose socket lives in `pid`'s network namespace.

    pyroute2's own NetNS forks a process per socket; entering the namespace for the open costs 1 ms in all.
    """
    from pyroute2 import IPRoute  # 0.1 s of import that commands like `ps` and `exec` need not pay

    with network_namespace_of(pid):
        handle = IPRoute()
    try:
        yield handle
    finally:
        handle.close()
