"""What a worker tells others of its cache, so that they know what it holds without asking.

Gateways hear of every cache, and prefill of those that it sends KV to: they choose routes and deltas by it.
"""

from workers.wire.control import ControlLink
from workers.wire.messages import CacheNotice
from workers.wire.peers import KV_FLOWS, Peers

NAMES_PER_NOTICE = 100_000  # 1.8 MB: within the limit of a control message


class Notices:
    """Everything inserted and evicted, in order, to each connected peer that listens; all of it to a new one first."""

    def __init__(self, peers: Peers, role: str) -> None:
        self._peers = peers
        self._listeners = [
            peer.name for peer in peers.known.values() if peer.role == "gateway" or (peer.role, role) in KV_FLOWS
        ]
        self._introduced: dict[str, ControlLink] = {}

    def introduce(self, names: list[bytes]) -> None:
        """Connections may have changed: tell those that are new what the cache holds."""
        for peer in self._listeners:
            link = self._peers.link(peer)
            if link is None or self._introduced.get(peer) is link:
                continue
            self._introduced[peer] = link
            for start in range(0, max(1, len(names)), NAMES_PER_NOTICE):
                part = names[start : start + NAMES_PER_NOTICE]
                self._peers.post_if_up(peer, CacheNotice(inserted=part, reset=start == 0))

    def changed(self, inserted: list[bytes], evicted: list[bytes]) -> None:
        """The cache has changed."""
        notice = CacheNotice(inserted=inserted, evicted=evicted)
        for peer, link in self._introduced.items():
            if self._peers.link(peer) is link:
                self._peers.post_if_up(peer, notice)
