"""Messages between a lab and the processes of its cross traffic: a struct or row each, one JSON object a line.

A receiver answers its order with Listening and, at the next line or the end, with Received. A sender answers with
Ready; after Begin, once it is over (or at any line), with Sent.
"""

import json
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec
from msgspec import Meta, Struct

T = TypeVar("T")
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class BeReceiver(Struct, tag_field="be", tag="receiver", frozen=True, forbid_unknown_fields=True):
    """Order to receive."""

    protocol: Literal["tcp", "udp"]
    address: str
    flows: Annotated[int, Meta(ge=1, le=64)]


class BeSender(Struct, tag_field="be", tag="sender", frozen=True, forbid_unknown_fields=True):
    """Order to send, a flow for each seed."""

    protocol: Literal["tcp", "udp"]
    address: str
    port: Port
    mtu: Annotated[int, Meta(ge=1, le=65535)]
    seeds: Annotated[list[str], Meta(min_length=1, max_length=64)]
    rate_bps: Annotated[int, Meta(ge=1)] | None
    """Rate of each flow; None: all that TCP gets."""
    duration_ns: Nanoseconds
    on_ns: Nanoseconds | None
    off_ns: Nanoseconds | None


class Listening(Struct, frozen=True):
    port: Port


class Ready(Struct, frozen=True):
    ready: bool = True


class Begin(Struct, frozen=True):
    """Order to a sender that is ready, in CLOCK_MONOTONIC."""

    start_ns: Nanoseconds


class Report(Struct, frozen=True):
    """Order to a receiver to end."""

    report: bool = True


class Sent(TypedDict):
    """A sender's report; its flows are those of its protocol."""

    bytes: int
    late_ns: int
    began_ns: int
    ended_ns: int
    flows: list[dict[str, Any]]


class Received(TypedDict):
    """A receiver's report."""

    bytes: int
    dropped_at_socket: int
    first_ns: int
    last_ns: int
    flows: list[dict[str, Any]]


Order = BeReceiver | BeSender


def line_of(message: object) -> str:
    return json.dumps(msgspec.to_builtins(message)) + "\n"


def read_line(line: str, kind: type[T]) -> T:
    """The message in a line. Raises ValueError."""
    return msgspec.convert(json.loads(line), kind)
