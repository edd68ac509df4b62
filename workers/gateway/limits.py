"""Limits of the API: what a client may hold open, send and leave unread. From PDDBED_API; docs/api.md has the table."""

from typing import Annotated

from msgspec import Meta, Struct

S = 10**9
Nanoseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Bytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class ApiLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one gateway's API. Durations are in ns, as everywhere in a lab's environment."""

    names: tuple[str, ...] = ()
    """Names, beside this machine's own, under which clients on this machine may reach the API, or pages come from."""
    connections: Annotated[int, Meta(ge=1, le=60_000)] = 1000
    """Open at once; one more closes the one that has been idle for longest. Fewer where the process may open fewer."""
    keep_alive_ns: Nanoseconds = 75 * S
    """Idle time between two requests of a connection."""
    head_ns: Nanoseconds = 20 * S
    """From a connection's start, or the first byte of its next request, to the end of that request's headers."""
    head_bytes: Bytes = 32 << 10
    """Request line and headers."""
    body_ns: Nanoseconds = 60 * S
    """From the end of the headers to the last byte of the body."""
    body_bytes: Bytes = 16 << 20
    bodies_bytes: Bytes = 256 << 20
    """Of all bodies that are being read; those of at most 64 KiB do not count."""
    unread_ns: Nanoseconds = 120 * S
    """How long a client may take nothing of its answer."""
    answer_bytes: Bytes = 64 << 20
    """JSON of an answer that is not streamed."""
    answers_bytes: Bytes = 256 << 20
    """JSON of all answers that are not streamed and not complete."""
