"""The gateway process: uvicorn on the inherited socket in front of a dispatcher."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from workers.environment import WorkerEnvironment
from workers.gateway.admission import Admission, Limits
from workers.gateway.app import build_app
from workers.gateway.dispatcher import Dispatcher
from workers.models import LoadedModel
from workers.policy import NoRoute
from workers.wire.counters import Counters

log = logging.getLogger(__name__)

# A gateway that cannot reach its workers for so long says so instead of staying silent: their start, and ten round
# trips of the longest path for theirs and its own handshakes.
CONNECT_S, CONNECT_ROUND_TRIPS = 60.0, 10


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield  # signals belong to the worker process, which may hold several roles in tests


class Gateway:
    """A dispatcher and the HTTP server in front of it."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        serving = environment.serving
        self.dispatcher = Dispatcher(environment, loaded)
        self.admission = Admission(Limits(serving.max_running, serving.max_waiting))
        self._drain_s = serving.drain_ns / 1e9
        self._server = _Server(
            uvicorn.Config(
                build_app(self.dispatcher, self.admission),
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=2,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def counters(self) -> Counters:
        return self.dispatcher.peers.local.counters

    async def start(self, listener: socket.socket) -> None:
        """Connect to the workers, then serve HTTP on `listener`. Raises NoRoute when no pipeline is complete."""
        await self.dispatcher.start()
        await self._until_routable()
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Refuse new requests, let those under way end (at most `serving.drain`), close every connection."""
        self.admission.drain()
        if self._serving is not None:
            try:
                async with asyncio.timeout(self._drain_s):
                    await self.admission.idle()
            except TimeoutError:
                log.warning("%d requests were not finished within %.0f s", self.admission.running, self._drain_s)
                self.admission.abandon()
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        await self.dispatcher.close()

    async def _until_routable(self) -> None:
        rtt_s = max((peer.path.rtt_s for peer in self.dispatcher.peers.known.values()), default=0.0)
        end = asyncio.get_running_loop().time() + CONNECT_S + CONNECT_ROUND_TRIPS * rtt_s
        while True:
            try:
                self.dispatcher.route_now()
                return
            except NoRoute:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(0.02)
