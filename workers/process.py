"""A worker process from its environment to its end: role, sockets, readiness, signals, exit status."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from typing import Protocol

from workers.environment import WorkerEnvironment
from workers.gateway.server import Gateway
from workers.linefile import LogLines
from workers.linux import RealTimePriority
from workers.models import LoadedModel
from workers.policy import NoRoute
from workers.roles.main_decode import MainDecodeWorker
from workers.roles.prefill import PrefillWorker
from workers.roles.relay_decode import RelayDecodeWorker
from workers.wire.frames import Counters
from workers.worker_records import ByteLog

ROLE_CLASSES = {
    "prefill": PrefillWorker,
    "relay-decode": RelayDecodeWorker,
    "main-decode": MainDecodeWorker,
}


class WorkerError(Exception):
    """The worker cannot start or go on; one sentence with the next step."""


class Running(Protocol):
    """A gateway or a worker."""

    @property
    def counters(self) -> Counters: ...

    async def start(self, listener: socket.socket) -> None: ...

    async def close(self) -> None: ...


def make(environment: WorkerEnvironment, loaded: LoadedModel) -> Running:
    """The object of the environment's role, not yet started. Raises WorkerError."""
    if environment.role == "gateway":
        return Gateway(environment, loaded)
    try:
        return ROLE_CLASSES[environment.role](environment, loaded)
    except ValueError as error:
        raise WorkerError(f"{environment.host}: {error}") from None


def open_listener(environment: WorkerEnvironment) -> socket.socket:
    """The socket this role listens on: an inherited one, else its address and port. Raises WorkerError."""
    name, inherited = "PDDBED_LISTEN_FD", environment.listen_fd
    if environment.role == "gateway":
        name, inherited = "PDDBED_API_FD", environment.api_fd
    try:
        if inherited is not None:
            return socket.socket(fileno=inherited)
        return socket.create_server((environment.address, environment.port), backlog=512)
    except OSError as error:
        where = f"{environment.address}:{environment.port}" if inherited is None else f"{name} {inherited}"
        raise WorkerError(f"{environment.host} cannot listen on {where}: {error.strerror}") from None


def tell_ready(environment: WorkerEnvironment) -> None:
    """Write `ready` to PDDBED_READY_FD and close it."""
    if environment.ready_fd is not None:
        with contextlib.suppress(OSError):  # the starter has stopped waiting
            os.write(environment.ready_fd, b"ready\n")
            os.close(environment.ready_fd)


async def serve(environment: WorkerEnvironment, loaded: LoadedModel) -> None:
    """Run the role until SIGTERM or SIGINT. Raises WorkerError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = make(environment, loaded)
    if environment.profile is not None:
        RealTimePriority().begin()
    byte_log = ByteLog(environment.records, environment.host, running.counters, environment.unwritten)
    loop.add_signal_handler(signal.SIGUSR1, byte_log.write)
    starting = asyncio.create_task(running.start(open_listener(environment)))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            tell_ready(environment)
            logging.getLogger(__name__).info("%s (%s) is serving", environment.host, environment.role)
            await stopping
    except NoRoute as error:
        raise WorkerError(f"{environment.host}: {error}; look at the logs of the workers") from None
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await running.close()
        byte_log.write()


def run(environment: WorkerEnvironment, loaded: LoadedModel) -> int:
    """Run the role in this process; returns the exit status. Errors are one sentence on stderr."""
    logging.basicConfig(
        level=logging.INFO,
        handlers=[LogLines(sys.stderr.fileno(), environment.unwritten)],
        format=f"%(asctime)s {environment.host} %(levelname)s %(message)s",
        force=True,
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(environment, loaded))
    except WorkerError as error:
        print(f"pddbed worker: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
