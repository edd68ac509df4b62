"""Pacing: a step takes as long as it would on the hardware that a profile describes. Pure; it reads no clock.

The real computation runs first, then the step is held until it is due. Steps are due on an ideal clock, which goes on
from the last due time and not from when that step really ended: what timers and rounding add to one step is not in the
next, and a step that was late does not push the later ones. Who holds a step, and where, is the runner's business.

What a step costs (`Profile.step_ns`): each prompt token its share of prefill; one pass of decode for all sequences that
are in their answers, more for each further one; and each answer token of a sequence that has several in the step (an
extend at a hand-over, guesses) so much more. Prompts are computed one after the other (`schedule_paced`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from workers.engine.engine import Chunk

Nanoseconds = Annotated[float, Meta(ge=0)]
TOLERANCE_NS, TOLERANCE_SHARE = 1_000_000, 0.01
"""A step that ends later than this, plus this share of itself, is late."""
PROMPT_STEP_NS = 250_000_000
"""A step takes about so much of a prompt at most: one in flight is not given up, and a client may leave meanwhile."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step: tokens of prompts; sequences with one answer token; those with several, and how many."""

    prompt_tokens: int = 0
    decoding: int = 0
    extending: int = 0
    extend_tokens: int = 0


def work_of(chunks: Iterable[Chunk]) -> Work:
    """The work of a step's chunks. A token's position says whether it is of the prompt; a guess is computed as an
    extended one, along with its sequence's decode.
    """
    prompt_tokens = decoding = extending = extend_tokens = 0
    for chunk in chunks:
        of_prompt = min(chunk.count, max(0, chunk.sequence.prompt_len - chunk.sequence.computed))
        answer = chunk.count - of_prompt
        prompt_tokens += of_prompt
        decoding += answer == 1
        extending += answer > 1
        extend_tokens += (answer if answer > 1 else 0) + len(chunk.draft)
    return Work(prompt_tokens, decoding, extending, extend_tokens)


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """The speed of some hardware, in the lab's own tokens and times (whatever scale it has). Times in ns.

    `decode_step_ns` is a step of one sequence, `decode_sequence_ns` what each further one adds. `extend_token_ns` is
    what each answer token adds that is computed with others of its sequence, and `extend_pass_ns` what a step takes
    besides in which nobody decodes (None: as a decode step; less, where a scale lets a decode step stand for several).
    """

    name: str
    prefill_token_ns: Nanoseconds
    decode_step_ns: Nanoseconds
    extend_token_ns: Nanoseconds
    decode_sequence_ns: Nanoseconds = 0.0
    extend_pass_ns: Nanoseconds | None = None

    def step_ns(self, work: Work) -> int:
        """Duration of a step."""
        ns = work.prompt_tokens * self.prefill_token_ns + work.extend_tokens * self.extend_token_ns
        one_pass = self.decode_step_ns if work.decoding or self.extend_pass_ns is None else self.extend_pass_ns
        answering = work.decoding + work.extending
        if answering:
            ns += one_pass + (answering - 1) * self.decode_sequence_ns
        return round(ns)

    def prompt_step_tokens(self, at_most: int) -> int:
        """Number of a prompt's tokens that a step takes."""
        if self.prefill_token_ns * at_most <= PROMPT_STEP_NS:
            return at_most
        return max(1, int(PROMPT_STEP_NS / self.prefill_token_ns))


@dataclass(frozen=True, slots=True)
class PaceCounts:
    """Counts of paced steps. `late` steps ended later than tolerated; of these, `overran` were computed too slowly.

    `lateness_ns` adds up by how much late steps were later than the one before, while there was work all the time.
    """

    steps: int = 0
    late: int = 0
    overran: int = 0
    paced_ns: int = 0
    lateness_ns: int = 0
    worst_ns: int = 0

    def row(self) -> dict[str, Any]:
        """For records and `status`."""
        return asdict(self)


class Pacer:
    """The ideal clock of one engine. Each `begin` is followed by an `end`; times are one clock's, in ns."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.counts = PaceCounts()
        self._due_ns = 0
        self._step_ns = 0
        self._before_ns = 0
        """Lateness of the step before, if this one follows at once."""
        self._late_ns = 0

    def begin(self, work: Work, since_ns: int) -> int:
        """A step begins, whose first work has been there since `since_ns`; returns when it is due.

        Ideally it began when the one before was due, or when its work came.
        """
        follows = since_ns <= self._due_ns
        self._before_ns = self._late_ns if follows else 0
        self._step_ns = self.profile.step_ns(work)
        self._due_ns = (self._due_ns if follows else since_ns) + self._step_ns
        return self._due_ns

    def end(self, computed_ns: int, now_ns: int) -> None:
        """The step that began last was computed at `computed_ns`, and its tokens are out now."""
        self._late_ns = max(0, now_ns - self._due_ns)
        late = self._late_ns > TOLERANCE_NS + TOLERANCE_SHARE * self._step_ns
        counts = self.counts
        self.counts = PaceCounts(
            counts.steps + 1,
            counts.late + late,
            counts.overran + (late and computed_ns > self._due_ns),
            counts.paced_ns + self._step_ns,
            counts.lateness_ns + (max(0, self._late_ns - self._before_ns) if late else 0),
            max(counts.worst_ns, self._late_ns),
        )

    def skip(self, now_ns: int) -> None:
        """Nothing could be computed until now, for want of memory: that is nobody's lateness."""
        self._due_ns = max(self._due_ns, now_ns)
        self._late_ns = 0
