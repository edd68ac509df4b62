"""The choice of a route: by `policy`, from the workers that are there and what their caches hold of a prompt."""

from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from workers.cache import CacheMirror, chain_root, common_blocks, extend_chain
from workers.environment import WorkerEnvironment
from workers.gateway.attempts import Attempt, LiveRequest
from workers.models import LoadedModel
from workers.policy import Route, WorkerView, route_around, route_for
from workers.wire.messages import CacheNotice
from workers.wire.peers import Peers


class Router:
    """Knows the workers by their connections and notices: no question, no wait."""

    def __init__(self, environment: WorkerEnvironment, loaded: LoadedModel, peers: Peers) -> None:
        self._serving = environment.serving
        self._peers = peers
        self._chain_root = chain_root(loaded.fingerprint, environment.serving.block_size)
        self._names: WeakKeyDictionary[Attempt, list[bytes]] = WeakKeyDictionary()
        self.mirrors = {name: CacheMirror() for name in peers.known}

    def noticed(self, peer: str, notice: CacheNotice) -> None:
        """A worker's cache has changed."""
        if peer in self.mirrors:
            self.mirrors[peer].apply(notice.inserted, notice.evicted, reset=notice.reset)

    def lost(self, peer: str) -> None:
        self.mirrors[peer].apply([], [], reset=True)

    def whole_route(self) -> Route:
        """The route that a request which no cache knows takes when nothing is missing. Raises NoRoute."""
        return route_for(self._serving.pipeline, self._serving.relay_threshold, 0, self._views([], (), ()))

    def route(self, prompt: list[int], live: Iterable[LiveRequest], avoid: Collection[str] = ()) -> Route:
        """The best route among the connected workers but those in `avoid`. Raises NoRoute."""
        views = self._views(prompt, live, avoid)
        serving = self._serving
        return route_around(serving.pipeline, serving.relay_threshold, len(prompt), views, serving.offload_threshold)

    def _views(self, prompt: list[int], live: Iterable[LiveRequest], avoid: Collection[str]) -> list[WorkerView]:
        size = self._serving.block_size
        hashes = extend_chain(self._chain_root, [], prompt, size)
        coming = self._coming(hashes, live := list(live))
        busy, weight = [request.unsettled for request in live], self._serving.busy_tokens
        views = []
        for peer in self._peers.known.values():
            link = self._peers.link(peer.name)
            if link is not None and peer.name not in avoid:
                connected = frozenset(link.peer_status.connected) if link.peer_status else frozenset()
                active = sum(peer.name in workers for workers in busy)
                mirror = self.mirrors[peer.name]
                matched = max(mirror.held(hashes), coming.get(peer.name, 0)) * size
                cached = len(mirror) * size
                views.append(
                    WorkerView(peer.name, peer.role, active, connected, matched, weight, cached, peer.datacenter)
                )
        return views

    def _coming(self, hashes: list[bytes], live: list[LiveRequest]) -> dict[str, int]:
        """Number of a chain's first blocks that each prefill is computing, or will have by the time that is their turn.

        What is to be known of main decode's cache is what it holds now: the pipeline is chosen by that.
        """
        coming: dict[str, int] = {}
        for attempt in (request.attempt for request in live):
            prefill = attempt.spec.prefill
            if prefill not in attempt.unsettled or self._peers.known[prefill].role != "prefill":
                continue
            if attempt not in self._names:
                names = extend_chain(self._chain_root, [], attempt.spec.prompt, self._serving.block_size)
                self._names[attempt] = names
            coming[prefill] = max(coming.get(prefill, 0), common_blocks(self._names[attempt], hashes))
        return coming
