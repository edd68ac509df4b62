"""The hand-over of a request from relay decode to main decode, as decisions. Pure: no clocks, no sockets, no sequences.

one-shot   the relay stops when asked and sends all token ids at once; main decode recomputes them in one extend.
catch-up   the relay goes on and sends each id as it makes it; main decode extends what has come, round after round,
           until the gap is small; then the relay is told to stop, and main decode goes on behind its last token.
overlap    as catch-up, but main decode goes on while the relay still decodes; the gateway takes whichever token comes
           first, and tells the relay to stop when main decode has overtaken it. If it never would, main decode does.
kv         as one-shot, but the KV of the relay's tokens crosses instead of being recomputed. For comparison.
auto       one-shot or catch-up, chosen for each request by the relay when it is asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

MODES = ("auto", "one-shot", "catch-up", "overlap", "kv")

BUSY_SEQUENCES = 4  # more than so many in the relay's batch slow each other down noticeably
LOW_MEMORY = 0.1  # share of the relay's KV memory below which new requests may soon be refused
SMALL_GAP = 2  # ids; as many come while main decode computes one step
MAX_ROUNDS = 8  # before the relay is told to stop: if the gap is not small by then, waiting will not make it smaller
PACE_TOKENS = 16  # tokens of each side to measure its pace by
PATIENCE_RTTS = 10  # main decode that will not have overtaken the relay by then is not faster in any useful sense


@dataclass(frozen=True, slots=True)
class RelayLoad:
    """A relay when it is asked for a request: `running` in its batch, `waiting` for their KV, the request not counted.

    `free_share` (0..1): KV memory that is free or could be. `begun`: the request's own KV has arrived.
    """

    running: int
    waiting: int
    free_share: float
    begun: bool = True


def choose_mode(asked: str, load: RelayLoad) -> tuple[str, str]:
    """The mode of one request, and why. A relay that others need is freed at once: one-shot; else it can be held."""
    if asked != "auto":
        return asked, "configured"
    if not load.begun:
        return "one-shot", "main decode was ready before the relay"
    if load.waiting:
        return "one-shot", f"{load.waiting} more on their way to the relay"
    if load.running >= BUSY_SEQUENCES:
        return "one-shot", f"the relay decodes {load.running} others"
    if load.free_share < LOW_MEMORY:
        return "one-shot", f"{load.free_share:.0%} of the relay's KV memory is free"
    return "catch-up", f"the relay has room: it decodes {load.running} others, none on their way"


def close_enough(rounds: Sequence[int], waiting: int) -> bool:
    """True if main decode has caught up, after rounds of so many ids each, with `waiting` ids come meanwhile.

    It goes on catching up while the relay is being told, so this need not be exact.
    """
    return bool(rounds) and (waiting <= SMALL_GAP or len(rounds) >= MAX_ROUNDS)


def overtakes(relay_itl_ns: float, main_itl_ns: float, rtt_ns: float) -> bool:
    """True if main decode, starting one round trip behind at the gateway, gets ahead of the relay before long.

    It gains `relay_itl - main_itl` with each token, so it needs rtt / (relay_itl - main_itl) tokens.
    """
    gain_ns = relay_itl_ns - main_itl_ns
    if gain_ns <= 0:
        return False
    return rtt_ns / gain_ns * main_itl_ns <= PATIENCE_RTTS * rtt_ns


@dataclass(slots=True)
class Pace:
    """The speed at which someone makes tokens, by when they were seen."""

    first_ns: int | None = None
    last_ns: int = 0
    tokens: int = 0

    def note(self, now_ns: int, tokens: int = 1) -> None:
        """So many more are there."""
        if self.first_ns is None:
            self.first_ns = now_ns  # when those before were made is not known
        else:
            self.tokens += tokens
        self.last_ns = now_ns

    @property
    def itl_ns(self) -> float | None:
        """Mean time between tokens; None before there are enough to tell."""
        if self.first_ns is None or self.tokens < PACE_TOKENS:
            return None
        return (self.last_ns - self.first_ns) / self.tokens


class IdConflict(Exception):
    """Ids that do not continue those before them."""

    name = "handover_conflict"


@dataclass(slots=True)
class RelayedIds:
    """The answer's ids as main decode hears of them, in order. `start`: position of the first."""

    start: int
    ids: list[int] = field(default_factory=list)
    stopped_ns: int | None = None
    finish_reason: str | None = None
    tail: int = 0

    @property
    def over(self) -> bool:
        """No more will come."""
        return self.stopped_ns is not None

    def offer(self, position: int, ids: Sequence[int]) -> None:
        """Take ids at consecutive positions; those known already are skipped. Raises IdConflict, taking none."""
        known = self.start + len(self.ids) - position
        if known < 0 or position < self.start:
            raise IdConflict(f"ids from position {position} on, but {self.start + len(self.ids)} is next")
        if self.ids[position - self.start :][: len(ids)] != list(ids[:known]):
            raise IdConflict(f"other ids from position {position} on than were heard before")
        self.ids += ids[known:]

    def stop(self, stopped_ns: int, finish_reason: str | None, tail: int) -> None:
        """No more will come. Said again, with less: the relay was lost, or gives up sending KV."""
        self.stopped_ns = self.stopped_ns or stopped_ns
        self.finish_reason = self.finish_reason or finish_reason
        self.tail = tail
