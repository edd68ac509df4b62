"""A trace as every reader makes it: requests in the order of time, each prompt a chain of block ids. Pure values."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path


class TraceError(Exception):
    """A trace cannot be used: the file, the line where there is one, and what is wrong."""

    def __init__(self, where: Path | str, line: int | None, reason: str) -> None:
        place = f"{where}:{line}" if line is not None else f"{where}"
        super().__init__(f"{place}: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Equal block ids mean equal tokens *and* an equal prefix before them (chained ids).

    `blocks` names the prompt's full blocks, and one more where the last block in part has an id as well. It is a tuple,
    or a range where nobody else has the ids.
    """

    time_ns: int  # since the trace began
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    session: int | None = None
    turn: int | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in the order of time. `format` is the reader's name, `origin` where it came from, for people.

    `notes`: what was changed when it was read, in sentences.
    """

    requests: tuple[Request, ...]
    block_tokens: int
    format: str
    origin: str
    notes: tuple[str, ...] = ()

    @cached_property
    def sha256(self) -> str:
        """Hash of what the requests are, whatever file they came from: the same for a trace and its conversion."""
        digest = hashlib.sha256(f"{self.block_tokens}\n".encode())
        for r in self.requests:
            row = (r.time_ns, r.input_tokens, r.output_tokens, r.session, r.turn, *r.blocks)
            digest.update(repr(row).encode())
        return digest.hexdigest()


def blocks_of(tokens: int, block_tokens: int) -> int:
    """Number of blocks that a prompt takes, the last one perhaps in part."""
    return -(-tokens // block_tokens)


def in_order(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Sorted by time; requests of one moment keep their order."""
    return tuple(sorted(requests, key=lambda request: request.time_ns))


def out_of_order(requests: Sequence[Request]) -> tuple[str, ...]:
    """Note that requests are out of the order of time in their file; nothing for sessions with times of their own."""
    if any(request.session is not None for request in requests):
        return ()
    count = sum(after.time_ns < before.time_ns for before, after in pairwise(requests))
    return (f"Out of the order of time in the file, and sorted: {count} of {len(requests)} requests.",) if count else ()
