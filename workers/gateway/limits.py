"""Limits of the API: what a client may hold open, send and leave unread. From PDDBED_API; docs/api.md has the table."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

S = 10**9


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Settings of one gateway's API. Durations are in ns, as everywhere in a lab's environment."""

    names: tuple[str, ...] = ()
    """Names, beside this machine's own, under which clients on this machine may reach the API, or pages come from."""
    connections: int = 1000
    """Open at once; one more closes the one that has been idle for longest. Fewer where the process may open fewer."""
    keep_alive_ns: int = 75 * S
    """Idle time between two requests of a connection."""
    head_ns: int = 20 * S
    """From a connection's start, or the first byte of its next request, to the end of that request's headers."""
    head_bytes: int = 32 << 10
    """Request line and headers."""
    body_ns: int = 60 * S
    """From the end of the headers to the last byte of the body."""
    body_bytes: int = 16 << 20
    bodies_bytes: int = 256 << 20
    """Of all bodies that are being read; those of at most 64 KiB do not count."""
    unread_ns: int = 120 * S
    """How long a client may take nothing of its answer."""
    answer_bytes: int = 64 << 20
    """JSON of an answer that is not streamed."""
    answers_bytes: int = 256 << 20
    """JSON of all answers that are not streamed and not complete."""


def api_limits(variables: Mapping[str, Any]) -> ApiLimits:
    """From the JSON object PDDBED_API. Raises ValueError, with a sentence for each mistake in it."""
    known = {field.name: field for field in fields(ApiLimits)}
    problems, values = [], dict[str, Any]()
    for name, value in variables.items():
        least = 0 if name.endswith("_ns") else 1
        if name not in known:
            problems.append(f"PDDBED_API has {name!r}; it knows {', '.join(known)}")
        elif name == "names":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                problems.append(f"PDDBED_API.names is {value!r}; it must be a list of host names")
            else:
                values[name] = tuple(value)
        elif not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 1 << 62:
            problems.append(f"PDDBED_API.{name} is {json.dumps(value)[:60]}; it must be a whole number from {least}")
        else:
            values[name] = value
    if problems:
        raise ValueError("\n".join(problems))
    return ApiLimits(**values)
