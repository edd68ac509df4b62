"""The interface of a WAN driver, and which one `auto` means. A driver owns the devices of one link."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from testbed.model.direction import Direction
from testbed.model.impairment import Impairment
from testbed.model.plan import WanPlan


class LinkCounters(TypedDict):
    """Counters of a link's direction. Packets are MTU segments, bytes are IP bytes."""

    packets: int
    bytes: int
    dropped_queue: int
    dropped_codel: NotRequired[int]  # of these
    lost: int  # as asked
    duplicated: NotRequired[int]
    corrupted: NotRequired[int]
    reordered: NotRequired[int]
    dropped_unasked: int
    dropped_line: NotRequired[int]
    dropped_write: NotRequired[int]
    dropped_malformed: NotRequired[int]
    ignored_not_ipv4: NotRequired[int]
    queued_bytes: int
    queued_bytes_max: NotRequired[int]
    in_flight_frames: NotRequired[int]
    in_flight_packets: NotRequired[int]
    dropped_tun: NotRequired[int]
    dropped_by_verify: NotRequired[int]  # of dropped_queue, while `pddbed verify` filled the queue


class LinkError(Exception):
    """A link cannot be built or changed as asked; the message names the link, the value and the next step."""


@dataclass(frozen=True, slots=True)
class WanEnd:
    """One end of a link: the border router's namespace and what its interface there must be."""

    pid: int  # any process in the router's network namespace
    ifname: str  # at most 15 characters, unique in that namespace
    address: IPv4Interface


class WanLink(ABC):
    """A built link. `build` makes both ends exist, addressed and up, with the plan's impairments applied.

    `node_pid` names a namespace that belongs to this link alone (the lab makes one per link); what a driver
    needs between the routers (netem's delay stage, the emulator's devices) lives there.
    Interfaces vanish with their namespaces; `close` ends the processes that the driver started.
    """

    driver: str

    def __init__(self, plan: WanPlan, ends: tuple[WanEnd, WanEnd], node_pid: int, run_dir: Path, seed: int = 0) -> None:
        self.plan = plan
        self.ends = ends
        self.node_pid = node_pid
        self.seed = seed  # repeats the random decisions, where the driver makes them itself
        self.run_dir = run_dir  # for this link's log, inside the lab's record

    @abstractmethod
    def build(self) -> None:
        """Create, address and raise both ends, then apply the plan. Raises LinkError."""

    @abstractmethod
    def apply(self, direction: Direction, impairment: Impairment) -> None:
        """Change one direction while it carries traffic; what is in flight arrives. Raises LinkError."""

    @abstractmethod
    def applied(self) -> Mapping[Direction, dict[str, Any]]:
        """Values that kernel or emulator really apply, read back (units in the keys), limits included."""

    @abstractmethod
    def counters(self) -> Mapping[Direction, LinkCounters]:
        """Counters of each direction so far."""

    @abstractmethod
    def close(self) -> None:
        """End what was started. Idempotent."""

    def measure(self, on: bool) -> None:  # noqa: B027
        """The lab itself begins or ceases to load the link fully. Most drivers have nothing to keep apart."""

    def forget(self) -> None:  # noqa: B027
        """Forget what made the link unfaithful so far."""

    def punctuality(self) -> Mapping[str, Any] | None:
        """Lateness and load of the driver's own process, for people; None where the kernel does it all."""
        return None
