"""The gateway process: HTTP on the inherited socket in front of a dispatcher."""

import asyncio
import logging
import socket

from workers.environment import WorkerEnvironment
from workers.gateway.admission import Admission, Limits
from workers.gateway.app import build_app
from workers.gateway.bodies import give_memory_back
from workers.gateway.dispatcher import Dispatcher
from workers.gateway.listener import Listener
from workers.models import LoadedModel
from workers.policy import NoRoute
from workers.wire.counters import Counters

log = logging.getLogger(__name__)

# A gateway that cannot reach its workers for so long says so instead of staying silent: their start, and ten round
# trips of the longest path for theirs and its own handshakes.
CONNECT_S, CONNECT_ROUND_TRIPS = 60.0, 10


class Gateway:
    """A dispatcher and the HTTP server in front of it."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel) -> None:
        serving = environment.serving
        self.dispatcher = Dispatcher(environment, loaded)
        self.admission = Admission(Limits(serving.max_running, serving.max_waiting))
        self._drain_s = serving.drain_ns / 1e9
        self._wait_for_workers = not environment.restarted
        self._listener = Listener(build_app(self.dispatcher, self.admission, environment.api), environment.api)
        self._serving = False

    @property
    def counters(self) -> Counters:
        return self.dispatcher.peers.local.counters

    async def start(self, listener: socket.socket) -> None:
        """Connect to the workers, then serve HTTP on `listener`. Raises NoRoute when no pipeline is complete.

        One that was started anew does not wait for all of them: its clients wait already, and some may be dead.
        """
        give_memory_back()
        await self.dispatcher.start()
        if self._wait_for_workers:
            await self._until_routable()
        self._listener.start(listener)
        self._serving = True

    async def close(self) -> None:
        """Refuse new requests, let those under way end (at most `serving.drain`), close every connection."""
        self.admission.drain()
        if self._serving:
            try:
                async with asyncio.timeout(self._drain_s):
                    await self.admission.idle()
            except TimeoutError:
                log.warning("%d requests were not finished within %.0f s", self.admission.running, self._drain_s)
                self.admission.abandon()
            await self._listener.close()
        await self.dispatcher.close()

    async def _until_routable(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            try:
                self.dispatcher.route_now()
                return
            except NoRoute:
                paths = [peer.path for peer in self.dispatcher.peers.known.values()]
                trip_s = max((path.rtt_s + path.queue_s for path in paths), default=0.0)
                if clock() > began + CONNECT_S + CONNECT_ROUND_TRIPS * trip_s:
                    raise
                await asyncio.sleep(0.02)
