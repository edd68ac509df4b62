"""All of a worker's connections: who dials whom, which are up, and what is lost when one goes.

Owns connections and their upkeep; requests belong to the role (`Handler`). Roles are ranked in the direction that a
request travels, and the lower rank dials: one control connection for each pair, plus the warm KV pool from prefill to
both kinds of decode, and from relay to main decode if generated KV is to cross as well (`tails`).
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from workers.wire import connection as wire_connection
from workers.wire.connection import Connection, Local
from workers.wire.control import ControlLink
from workers.wire.deadlines import LOOK_S, SAME_DATACENTER, SHORT_LIFE_S, Path
from workers.wire.frames import WireError
from workers.wire.kv_encoding import KvEncoding
from workers.wire.kv_pool import KvPool, PeerUnreachable
from workers.wire.kv_receive import Receiver, receive_transfers
from workers.wire.kv_tail import TailReceiver, receive_tails
from workers.wire.messages import Message, Status
from workers.wire.stream import await_handshakes

log = logging.getLogger(__name__)

RANK = {"gateway": 0, "prefill": 1, "relay-decode": 2, "main-decode": 3}
KV_FLOWS = frozenset({("prefill", "relay-decode"), ("prefill", "main-decode")})
TAIL_FLOW = ("relay-decode", "main-decode")  # KV of generated tokens, in one mode of hand-over


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker, where it listens and what lies between."""

    name: str
    role: str
    datacenter: str
    address: str
    port: int
    path: Path = SAME_DATACENTER


class Handler(Protocol):
    """A role's reactions to what arrives. Called on the event loop; must not block."""

    def on_message(self, peer: str, message: Message) -> None:
        """A control message, in the order in which the peer posted it."""
        ...

    def on_lost(self, peer: str, reason: str) -> None:
        """The control connection to a peer has ended; messages to and from it may be lost."""
        ...

    def on_change(self) -> None:
        """Some connection came up or went down: `Peers.connected` may differ."""
        ...

    def status_for(self, peer: str) -> Status | None:
        """The answer to a peer's ping."""
        ...


class Peers:
    """The connections of one worker."""

    def __init__(
        self,
        local: Local,
        peers: Iterable[Peer],
        handler: Handler,
        receiver: Receiver | None,
        kv_connections: int,
        *,
        tails: bool = False,
        warm_kv: bool = False,
    ) -> None:
        self.local = local
        self._role = local.facts.role
        self._handler = handler
        self._receiver = receiver
        self.tail_receiver: TailReceiver | None = None
        self.kv_encodings: Mapping[str, KvEncoding] = {}
        """By name, how else than as it is in the pool KV may arrive."""
        self.known: Mapping[str, Peer] = {peer.name: peer for peer in peers if peer.role in RANK}
        self._links: dict[str, ControlLink] = {}
        self._errors: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._moved: dict[str, tuple[int, int]] = dict.fromkeys(self.known, (0, 0))
        self._handshake_s = 0.0  # as the listener's kernel knows it
        self._moved_on: dict[Connection, tuple[int, int]] = {}
        """Counts of each open connection so far."""
        self.pools = {
            peer.name: KvPool(
                peer.name, kv_connections, peer.path, partial(self._dial, peer, "kv"), handler.on_change, warm=warm_kv
            )
            for peer in self.known.values()
            if (self._role, peer.role) in KV_FLOWS or (tails and (self._role, peer.role) == TAIL_FLOW)
        }

    # -- use ---------------------------------------------------------------------------------------------------

    def post(self, peer: str, message: Message) -> None:
        """Queue a control message. Raises PeerUnreachable when the peer is not connected."""
        link = self._links.get(peer)
        if link is None:
            raise PeerUnreachable(f"{peer} is not connected: {self._errors.get(peer, 'it has not been seen yet')}")
        link.post(message)

    def post_if_up(self, peer: str, message: Message) -> None:
        """Queue a message that only matters while the peer is there."""
        with contextlib.suppress(WireError):
            self.post(peer, message)

    def link(self, peer: str) -> ControlLink | None:
        return self._links.get(peer)

    def moved(self, peer: str) -> int:
        """A number that grows as long as bytes move that say that the peer is there, on any of its connections."""
        return self._count_moved(peer)[0]

    def bulk_moved(self, peer: str) -> int:
        """As `moved`, of bytes only that belong to something which takes a slow link a while: never of pings."""
        return self._count_moved(peer)[1]

    def _count_moved(self, peer: str) -> tuple[int, int]:
        there, bulk = self._moved.get(peer, (0, 0))
        for connection, (there_before, bulk_before) in list(self._moved_on.items()):
            if connection.peer != peer:
                continue
            self._moved_on[connection] = there_now, bulk_now = connection.moved()
            there, bulk = there + there_now - there_before, bulk + bulk_now - bulk_before
            if connection.close_reason is not None:
                del self._moved_on[connection]
        self._moved[peer] = there, bulk
        return there, bulk

    def connected(self) -> list[str]:
        """Peers whose control connection, and whole KV pool where there is one, are up."""
        return sorted(
            name for name in self._links if name not in self.pools or self.pools[name].up == self.pools[name].size
        )

    def dials(self, peer: Peer) -> bool:
        """True if this worker opens the connection to `peer` (it waits to be dialled otherwise)."""
        return RANK[self._role] < RANK[peer.role]

    async def wait_connected(self, names: Iterable[str], deadline_s: float) -> None:
        """Return when all of `names` are connected. Raises PeerUnreachable naming those that are not."""
        waited_for = set(names)
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while missing := sorted(waited_for - set(self.connected())):
            if loop.time() >= end:
                why = "; ".join(f"{name}: {self._errors.get(name, 'it did not connect')}" for name in missing)
                raise PeerUnreachable(f"not connected within {deadline_s:.0f} s: {why}")
            await asyncio.sleep(0.02)

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self, listener: socket.socket | None) -> None:
        """Accept on `listener` (None: nobody dials this worker) and dial whom this role dials."""
        if listener is not None:
            listener.setblocking(False)
            self._listener = listener
            self._await_handshakes()
            self._spawn(self._accept_all(listener))
        for peer in self.known.values():
            if self.dials(peer):
                self._spawn(self._keep_link(peer))
        for pool in self.pools.values():
            pool.start()
        self._spawn(self._follow_links())

    async def close(self) -> None:
        """Close every connection and the listening socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self.pools.values():
            await pool.close()
        if self._listener is not None:
            self._listener.close()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("connection task failed", exc_info=task.exception())

    async def _follow_links(self) -> None:
        """Have the kernel's own deadlines follow the links; all others ask for themselves."""
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in list(self._moved_on):
                try:
                    connection.follow()
                except OSError as error:  # it ends in this very moment; whoever uses it hears of it
                    log.info("%s: the deadlines of a connection stay as they are: %s", connection.peer, error)
            try:
                self._await_handshakes()
            except OSError as error:
                log.info("the listener's deadlines stay as they are: %s", error)

    def _await_handshakes(self) -> None:
        connect_s = max((peer.path.connect_s for peer in self.known.values()), default=0.0)
        if self._listener is not None and connect_s != self._handshake_s:
            self._handshake_s = connect_s
            await_handshakes(self._listener, connect_s)

    # -- dialling ----------------------------------------------------------------------------------------------

    async def _dial(self, peer: Peer, channel: str) -> Connection:
        connection = await wire_connection.dial(peer.address, peer.port, peer.name, channel, self.local, peer.path)
        self._moved_on[connection] = 0, 0
        return connection

    async def _keep_link(self, peer: Peer) -> None:
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            await asyncio.sleep(peer.path.retry_s(failures))
            failures += 1
            try:
                connection = await self._dial(peer, "control")
                since = clock()
                await self._run_link(connection, peer, pings=True)
            except WireError as error:
                if self._errors.get(peer.name) != str(error):
                    log.warning("%s", error)
                self._errors[peer.name] = str(error)
                continue
            except Exception as error:  # a bug costs this connection, not every later one
                log.exception("the connection to %s failed", peer.name)
                self._errors[peer.name] = f"{type(error).__name__}: {error}"
                continue
            if clock() - since > SHORT_LIFE_S:
                failures = 0

    # -- accepting ---------------------------------------------------------------------------------------------

    async def _accept_all(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or the dialer is gone again
                log.warning("accept failed: %s", error)
                await asyncio.sleep(0.1)
                continue
            self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        def path_of(name: str) -> Path | None:
            peer = self.known.get(name)
            return None if peer is None else peer.path

        try:
            connection = await wire_connection.accept(sock, self.local, path_of, self._path_from(sock))
        except WireError as error:
            log.warning("refused a connection: %s", error)
            return
        peer = self.known[connection.peer]
        self._moved_on[connection] = 0, 0
        try:
            if connection.channel == "control":
                await self._run_link(connection, peer, pings=False)
            elif self._receiver is not None and (peer.role, self._role) in KV_FLOWS:
                await receive_transfers(connection, self._receiver, self.kv_encodings)
            elif self.tail_receiver is not None and (peer.role, self._role) == TAIL_FLOW:
                await receive_tails(connection, self.tail_receiver)
        except WireError as error:
            log.info("KV connection of %s ended: %s", connection.peer, error)
        finally:
            connection.close("not served")

    def _path_from(self, sock: socket.socket) -> Path:
        """The longest path to a peer of that address, of which there may be several; as within a datacenter if none."""
        try:
            address = sock.getpeername()[0]
        except OSError:  # gone again
            address = ""
        paths = [peer.path for peer in self.known.values() if peer.address == address]
        return max(paths, key=lambda path: path.connect_s, default=SAME_DATACENTER).of_channel("control")

    async def _run_link(self, connection: Connection, peer: Peer, *, pings: bool) -> None:
        handler = self._handler
        link = ControlLink(connection, peer.path, handler.on_message, handler.status_for, self.moved, pings=pings)
        older = self._links.pop(peer.name, None)
        if older is not None:  # the peer restarted and dialled again before its old connection was seen to end
            older.close("replaced by a newer connection of the same peer")
            self._handler.on_lost(peer.name, "it reconnected")
        self._links[peer.name] = link
        log.info("connected to %s", peer.name)
        self._handler.on_change()
        reason = "this worker is stopping"
        try:
            reason = await link.run()
        finally:
            if self._links.get(peer.name) is link:
                del self._links[peer.name]
                self._errors[peer.name] = reason
                log.warning("lost %s: %s", peer.name, reason)
                try:
                    self._handler.on_lost(peer.name, reason)
                    self._handler.on_change()
                except Exception:  # a bug in a handler costs this link, not every later one to the peer
                    log.exception("the loss of %s was not dealt with", peer.name)
