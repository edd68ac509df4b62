"""A worker's announcements to others: facts that they must agree on, and what its cache holds, so that nobody asks.

Gateways hear of every cache, and prefill of those that it sends KV to: they choose routes and deltas by it.
"""

from workers.environment import WorkerEnvironment
from workers.models import LoadedModel
from workers.wire.connection import Local
from workers.wire.control import ControlLink
from workers.wire.frames import PROTOCOL_VERSION
from workers.wire.handshake import Facts
from workers.wire.messages import CacheNotice
from workers.wire.peers import KV_FLOWS, Peers

NAMES_PER_NOTICE = 100_000  # 1.8 MB: within the limit of a control message


def local_facts(environment: WorkerEnvironment, loaded: LoadedModel) -> Local:
    """A worker as it introduces itself."""
    facts = Facts(
        name=environment.host,
        role=environment.role,
        protocol=PROTOCOL_VERSION,
        model=loaded.config.name,
        fingerprint=loaded.fingerprint,
        block_size=environment.serving.block_size,
        kv_shape=list(loaded.config.kv_shape),
        kv_dtype=loaded.spec.dtype,
    )
    return Local(facts, environment.secret)


class CacheNotices:
    """Everything inserted and evicted, in order, to each connected peer that listens; all of it to a new one first."""

    def __init__(self, peers: Peers, role: str) -> None:
        self._peers = peers
        self._listeners = [
            peer.name for peer in peers.known.values() if peer.role == "gateway" or (peer.role, role) in KV_FLOWS
        ]
        self._introduced: dict[str, ControlLink] = {}

    def introduce(self, names: list[bytes]) -> None:
        """Tell those whose connection is new what the cache holds."""
        for peer in self._listeners:
            link = self._peers.link(peer)
            if link is None or self._introduced.get(peer) is link:
                continue
            self._introduced[peer] = link
            for start in range(0, max(1, len(names)), NAMES_PER_NOTICE):
                part = names[start : start + NAMES_PER_NOTICE]
                self._peers.post_if_up(peer, CacheNotice(inserted=part, reset=start == 0))

    def changed(self, inserted: list[bytes], evicted: list[bytes]) -> None:
        """Tell all that listen of a change of the cache."""
        notice = CacheNotice(inserted=inserted, evicted=evicted)
        for peer, link in self._introduced.items():
            if self._peers.link(peer) is link:
                self._peers.post_if_up(peer, notice)
