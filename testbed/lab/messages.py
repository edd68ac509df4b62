"""Requests to a running lab and its replies, on the control socket: a struct each, JSON on the wire.

A request names its reply's type (`Request[VerifyReply]`), so that a caller has it typed. The rows that people see as
JSON (`status --json`, `wan show --json`) are typed dictionaries in the order in which they are written.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Generic, NotRequired, TypedDict, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from testbed.links.base import LinkCounters
from testbed.model.direction import Direction

R = TypeVar("R")
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Number = int | float
"""A number as it was written: 1 stays 1."""
Values = dict[str, Any]
"""Values of an impairment or change, as the topology file or `Impairment.to_dict` spells it; read by its own reader."""


class Nothing(Struct, frozen=True):
    """The reply to a request that was done, of which there is nothing to tell."""


class Failure(Struct, frozen=True):
    """The reply to a request that failed: one sentence."""

    error: str


# -- rows ----------------------------------------------------------------------------------------------------------


class HostSettings(TypedDict, total=False):
    """A host's kernel settings; empty where the host is gone."""

    mtu: int
    gso_max_bytes: int
    tcp_receive_buffer_max_bytes: int
    tcp_send_buffer_max_bytes: int
    tcp_slow_start_after_idle: bool
    wan_congestion_control: list[str]


class HostStatus(TypedDict):
    """A host and its process."""

    name: str
    datacenter: str
    role: str | None
    command: str | None
    address: str
    port: int
    profile: str
    pace: Values | None  # the worker's own words
    settings: HostSettings
    pid: int | None
    state: str
    exit_status: int | None
    restarts: NotRequired[int]


class LinkState(TypedDict):
    """A WAN link; `applied` and `counters` are empty, and `problem` says why, where it is broken."""

    name: str
    between: list[str]
    driver: str
    mtu: int
    file: dict[Direction, Values]
    asked: dict[Direction, Values]
    applied: dict[Direction, Values]
    counters: dict[Direction, LinkCounters]
    punctuality: Mapping[str, Any] | None
    problem: str | None
    measured_rtt_ns: NotRequired[Number | None]


class Move(TypedDict):
    """An event of a timeline that plays."""

    event: int
    kind: str
    targets: list[list[str]]


class NextMove(TypedDict):
    """The event of a timeline that comes next, in ns since it began."""

    at_ns: int
    event: int
    kind: str
    targets: list[list[str]]


Waiting = TypedDict(
    "Waiting",
    {
        "event": int,
        "kind": str,
        "targets": list[list[str]],
        "for": str,
        "fraction": Number | None,
        "request": str,
    },
)


class TimelineState(TypedDict):
    """The timeline that plays, or that played last."""

    source: str
    state: str
    elapsed_ns: int | None
    length_ns: int | None
    began_monotonic_ns: int | None
    events: int
    playing: list[Move]
    next: NextMove | None
    waiting: list[Waiting]
    applied: int
    superseded: int
    latest_ns: int
    errors: list[str]


class LinkChange(TypedDict):
    """A change of a link's direction, by "hand" or by a "timeline"; `time` is in seconds of the epoch."""

    number: int
    time: Number
    link: str
    direction: Direction
    by: str
    asked: Values


class Figure(TypedDict):
    """A measured figure beside what was asked."""

    figure: str
    unit: str
    asked: Number | None
    measured: Number | None
    low: Number | None
    high: Number | None
    note: str
    reported: bool
    judged: bool
    ok: bool
    verdict: str


class LinkFigures(TypedDict):
    name: str
    ok: bool
    directions: dict[Direction, list[Figure]]
    times: dict[Direction, list[Number]]
    between: list[str]


class PathFigures(TypedDict):
    name: str
    figures: list[Figure]
    ok: bool


class FabricFigures(TypedDict):
    datacenter: str
    between: list[str]
    figures: list[Figure]


class VerificationResult(TypedDict):
    """A verification of every link, path and fabric."""

    time: Number
    links: list[LinkFigures]
    paths: list[PathFigures]
    fabrics: list[FabricFigures]
    ok: bool
    quick: bool
    not_measured: list[str]
    faithful: bool
    reasons: list[str]


class Trouble(TypedDict):
    """Something that went wrong without ending the lab; `claim`: figures may have suffered."""

    what: str
    times: int
    first: NotRequired[Number]
    claim: bool
    last: NotRequired[Number]
    error: str


class MeasuredRtt(TypedDict):
    name: str
    asked_rtt_ms: Number
    rtt_ms: Number


class LabStatus(TypedDict):
    """Everything that `pddbed status` tells."""

    name: str
    file: str | None
    driver: str
    api: str | None
    model: str | None
    workers: bool
    started: Number
    hosts: list[HostStatus]
    lost: dict[str, str]
    build_seconds: Number
    verified: VerificationResult | None
    applied: dict[str, dict[Direction, Values]]
    measured: list[MeasuredRtt]
    unfaithful: list[str]
    troubles: list[Trouble]
    uptime_s: Number
    links: list[LinkState]


class CapturePoint(Struct, frozen=True):
    """One socket to be opened in the network namespace of `pid`."""

    pid: int
    ifname: str
    name: str
    """The interface's name in the file."""
    description: str
    leaving: str
    """Direction of packets that leave through the interface."""
    arriving: str | None
    """None: such packets are not recorded."""


# -- replies -------------------------------------------------------------------------------------------------------


class Entry(Struct, frozen=True):
    """The kinds of a host's namespaces, whose descriptors come beside the reply, and its processes' variables."""

    namespaces: tuple[str, ...]
    environment: dict[str, str]


class Endpoint(Struct, frozen=True):
    pid: int
    """In the lab's own PID namespace."""
    address: str


class Endpoints(Struct, frozen=True):
    endpoints: list[Endpoint]


class Links(Struct, frozen=True):
    links: list[LinkState]


class LinksAndTimeline(Struct, frozen=True):
    links: list[LinkState]
    congestion: TimelineState | None


class Playing(Struct, frozen=True):
    congestion: TimelineState | None


class Played(Struct, frozen=True):
    congestion: TimelineState


class LinkSet(Struct, frozen=True):
    link: LinkState


class Reasons(Struct, frozen=True):
    reasons: list[str]


class Changes(Struct, frozen=True):
    """Number of changes so far, by whom, and the later ones."""

    counts: dict[str, int]
    changes: list[LinkChange]


class ByteCounts(Struct, frozen=True):
    """Hosts that noted their counters, those that did not in time, and whether nothing was on its way."""

    counted: list[str]
    silent: list[str]
    level: bool


class CapturePoints(Struct, frozen=True):
    points: list[CapturePoint]
    context: str


# -- requests ------------------------------------------------------------------------------------------------------


class Request(Struct, Generic[R], tag_field="op", frozen=True, forbid_unknown_fields=True):
    """A request that is answered by an R, or a Failure."""


class Status(Request[LabStatus], tag="status", frozen=True): ...


class Enter(Request[Entry], tag="enter", frozen=True):
    host: Name


class FindEndpoints(Request[Endpoints], tag="endpoints", frozen=True):
    link: Name


class Down(Request[Nothing], tag="down", frozen=True): ...


class Verify(Request[VerificationResult], tag="verify", frozen=True):
    quick: bool
    anew: bool = False
    """First forget what made the lab unfaithful so far."""


class Faithful(Request[Reasons], tag="faithful", frozen=True): ...


class WanShow(Request[LinksAndTimeline], tag="wan-show", frozen=True): ...


class WanPlay(Request[Played], tag="wan-play", frozen=True):
    timeline: Values
    """Timeline as `Timeline.to_dict` makes it."""


class WanPlaying(Request[Playing], tag="wan-playing", frozen=True): ...


class WanStop(Request[Played], tag="wan-stop", frozen=True): ...


class WanSet(Request[LinkSet], tag="wan-set", frozen=True):
    link: Name
    direction: Direction | None
    """None: both."""
    values: Values
    """Values as the topology file spells them."""


class WanReset(Request[Links], tag="wan-reset", frozen=True):
    link: Name | None = None
    """None: every link."""


class WanChanges(Request[Changes], tag="wan-changes", frozen=True):
    since: Annotated[int, Meta(ge=0)]


class Capture(Request[CapturePoints], tag="capture", frozen=True):
    name: Name
    at: str | None = None


class CountBytes(Request[ByteCounts], tag="count-bytes", frozen=True): ...


AnyRequest = (
    Status
    | Enter
    | FindEndpoints
    | Down
    | Verify
    | Faithful
    | WanShow
    | WanPlay
    | WanPlaying
    | WanStop
    | WanSet
    | WanReset
    | WanChanges
    | Capture
    | CountBytes
)


def encode(message: object) -> bytes:
    """JSON as Python writes it: a figure may be infinite."""
    return json.dumps(msgspec.to_builtins(message)).encode()


def reply_type(request: Request[R]) -> type[R]:
    """The type of a request's reply."""
    (kind,) = get_args(type(request).__orig_bases__[0])  # type: ignore[attr-defined]
    return kind  # type: ignore[no-any-return]
