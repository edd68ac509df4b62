"""Requests to the emulator process of a link, and its answers: a struct each, one JSON object a line.

An answer repeats its request's `id`; a request that cannot be served is answered with Failed. The first line is Start.
"""

from typing import Annotated, Any, Generic, NotRequired, TypedDict, TypeVar, get_args

from msgspec import Meta, Struct

from testbed.links.base import LinkCounters
from testbed.model.direction import Direction

R = TypeVar("R")
MAX_LINE = 1 << 20
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Side(Struct, frozen=True, forbid_unknown_fields=True):
    """One direction at the start; `impairment` as `Impairment.to_dict` makes it."""

    impairment: dict[str, Any]
    line_limit_bytes: Bytes


class Start(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line; Health is the answer."""

    id: int
    name: str
    seed: int
    forward: Side
    backward: Side


# -- answers: `id` and `ok` come first on the line -----------------------------------------------------------------

LateWindow = TypedDict(
    "LateWindow",
    {"from": int | float, "to": float, "packets": int, "late": int, "worst_ns": int, "limit": int | float},
)


class LateWindows(TypedDict):
    """Windows in which too much was late: how many, and three of them."""

    windows: int
    first: NotRequired[LateWindow]
    last: NotRequired[LateWindow]
    worst: NotRequired[LateWindow]


class LateFigures(TypedDict):
    """Lateness of packets (frames: super-packets count once)."""

    count: int
    mean_ns: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    buckets: list[list[int]]
    unfaithful: LateWindows | None


class DirectionLateness(LateFigures):
    """Since `forget`; `measuring`: of what passed while `pddbed verify` loaded the link."""

    measuring: LateFigures


class Health(TypedDict):
    """Health of the process: `busy_*` are shares of one CPU in windows of 1 s."""

    pid: int
    busy_last: int | float
    busy_max: int | float
    busy_max_measuring: int | float
    realtime: bool
    realtime_refused: str
    memory_locked: bool


class Nothing(TypedDict):
    """Done, and there is nothing to tell."""


# -- requests ------------------------------------------------------------------------------------------------------


class Request(Struct, Generic[R], tag_field="op", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that is answered with an R, beside `id` and `ok`."""

    id: int = 0


class Apply(Request[Nothing], tag="apply", frozen=True, kw_only=True):
    direction: Direction
    impairment: dict[str, Any]
    line_limit_bytes: Bytes


class Applied(Request[dict[Direction, dict[str, Any]]], tag="applied", frozen=True): ...


class Counters(Request[dict[Direction, LinkCounters]], tag="counters", frozen=True): ...


class Lateness(Request[dict[Direction, DirectionLateness]], tag="lateness", frozen=True): ...


class GetHealth(Request[Health], tag="health", frozen=True): ...


class Measure(Request[Nothing], tag="measure", frozen=True, kw_only=True):
    on: bool


class Forget(Request[Nothing], tag="forget", frozen=True): ...


AnyRequest = Apply | Applied | Counters | Lateness | GetHealth | Measure | Forget


def answer_type(request: Request[R]) -> type[R]:
    """The type of a request's answer."""
    (kind,) = get_args(type(request).__orig_bases__[0])  # type: ignore[attr-defined]
    return kind  # type: ignore[no-any-return]
