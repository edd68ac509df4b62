"""`publish:` makes a host's port reachable from the machine: bytes passed between two namespaces.

The listening socket is opened on the machine before the lab enters its namespaces; one thread per host joins that
host's network namespace for good, accepts there and connects to the host's own address.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from workers.linux import CLONE_NEWNET, setns

CHUNK_BYTES = 256 * 1024


def publish(
    name: str,
    pid: int,
    address: str,
    sockets: Sequence[tuple[socket.socket, int]],
    trouble: Callable[[str, object], None],
) -> None:
    """Relay each listening socket to its port at `address`, from inside the namespace of `pid`; returns at once.

    `trouble` is told when that ends.
    """
    arguments = (name, pid, address, sockets, trouble)
    thread = threading.Thread(target=_run, args=arguments, name=f"publish-{name}", daemon=True)
    thread.start()


def _run(
    name: str,
    pid: int,
    address: str,
    sockets: Sequence[tuple[socket.socket, int]],
    trouble: Callable[[str, object], None],
) -> None:
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        setns(namespace, CLONE_NEWNET)  # this thread only
        os.close(namespace)
        asyncio.run(_serve(address, sockets))
    except Exception as error:
        trouble(f"the published ports of {name} are not served any more", error)


async def _serve(address: str, sockets: Sequence[tuple[socket.socket, int]]) -> None:
    servers = [await asyncio.start_server(_Relay(address, port), sock=listener) for listener, port in sockets]
    await asyncio.gather(*(server.serve_forever() for server in servers))


class _Relay:
    """Connects each accepted connection to the host, and copies both ways until both sides have closed."""

    def __init__(self, address: str, port: int) -> None:
        self._target = (address, port)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:  # nothing listens there (yet): the client sees its connection closed
            writer.close()
            return
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()
        target.write_eof()
        return
    target.close()
