"""Namespaces of other processes: entering one for a moment, and netlink sockets that stay in one.

A socket belongs to the namespace it was made in, so a netlink handle opened
here keeps working after the thread has gone back.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workers.linux import CLONE_NEWNET, setns


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
