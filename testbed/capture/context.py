"""The context of a capture: the lab's hosts, and the traffic that passes where it was captured.

A capture carries it as the comment of its file (JSON), so that an audit can read the file when the lab is gone.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Self

from testbed.lab.messages import HostStatus

LABEL = "pddbed-capture"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class LabHost:
    """One host as the topology has it; `role` is None for a host without a worker."""

    name: str
    datacenter: str
    address: str
    port: int
    role: str | None = None


@dataclass(frozen=True, slots=True)
class Passage:
    """Traffic from `source` to `target` (datacenters; "" for any) that passes the point of capture.

    `before_ns` and `after_ns` are the propagation delays from the sender to that point and from there to the
    receiver: they place a worker's reading of its counters among the packets.
    """

    source: str
    target: str
    direction: str  # such as "main > remote"
    before_ns: int
    after_ns: int


@dataclass(frozen=True, slots=True)
class Context:
    """The place and time of a capture. `host` is None on a WAN link; `begun_ns` is Unix time."""

    lab: str
    started: float  # the lab's, Unix seconds: tells labs of one name apart
    point: str
    host: str | None
    hosts: tuple[LabHost, ...]
    passages: tuple[Passage, ...] | None  # None: not known
    interfaces: tuple[tuple[str, str], ...] = ()  # directions of (leaving, arriving) packets, per interface of the file
    begun_ns: int = 0

    def passage(self, sender: LabHost, receiver: LabHost) -> Passage | None:
        """The passage of packets from one host to another; None: they do not pass here."""
        if self.host is not None and self.host not in (sender.name, receiver.name):
            return None
        if self.passages is None:
            return Passage("", "", f"{sender.datacenter} > {receiver.datacenter}", 0, 0)
        leaving = self.host is None or sender.name == self.host
        for passage in self.passages:
            if (passage.source, passage.target) != (sender.datacenter, receiver.datacenter):
                continue
            if self.host is None or leaving == (passage.direction == f"from {self.host}"):
                return passage
        return None

    def to_comment(self) -> str:
        """The comment of a capture file."""
        return json.dumps({LABEL: FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_comment(cls, comment: str | None) -> Self | None:
        """The context that `to_comment` wrote; None for anything else."""
        try:
            fields = json.loads(comment or "")
            if fields.pop(LABEL) != FORMAT:
                return None
            fields["hosts"] = hosts_of(fields["hosts"])
            if fields["passages"] is not None:
                fields["passages"] = tuple(Passage(**passage) for passage in fields["passages"])
            fields["interfaces"] = tuple((leaving, arriving) for leaving, arriving in fields["interfaces"])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def hosts_of(hosts: Iterable[HostStatus]) -> tuple[LabHost, ...]:
    """The hosts in `status`'s answer (further keys are ignored)."""
    return tuple(LabHost(r["name"], r["datacenter"], r["address"], r["port"], r["role"]) for r in hosts)
