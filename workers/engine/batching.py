"""Continuous batching: one step after the other over the jobs under way, which join and leave between steps.

Owns the loop: which tokens a step computes, whose blocks there are for them, and what a step brings each job. A fault
of one job is its own. Memory, compute thread and pace are objects of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from workers.engine.blocks import OutOfBlocks
from workers.engine.compute import ComputeThread, Outcome
from workers.engine.engine import Batch, Chunk, Engine, Part
from workers.engine.job import Job, Jobs
from workers.engine.memory import SequenceMemory
from workers.engine.pacing import Pacer, work_of
from workers.engine.sequence import Sequence
from workers.engine.speculation import Drafter


def schedule(sequences: Iterable[Sequence], max_tokens: int, min_prefill: int = 16) -> list[Chunk]:
    """Every sequence with one token pending decodes; what is left of `max_tokens` goes to longer ones in
    order.

    However many decode, `min_prefill` tokens of prefill go along, so that a new request cannot starve.
    """
    decodes: list[Sequence] = []
    rest: list[Sequence] = []
    for sequence in sequences:
        (decodes if sequence.pending == 1 else rest).append(sequence)
    chunks = [Chunk(sequence, 1) for sequence in decodes]
    budget = max(max_tokens - len(decodes), min_prefill)
    for sequence in rest:
        if budget == 0:
            break
        count = min(sequence.pending, budget)
        chunks.append(Chunk(sequence, count))
        budget -= count
    return chunks


def schedule_paced(sequences: Iterable[Sequence], max_tokens: int, prompt_tokens: int) -> list[Chunk]:
    """Chunks as by `schedule` for sequences that are in their answers; of those still in their prompts the first one
    alone gets up to `prompt_tokens`. So each prompt is done when its own tokens have taken their time, first come,
    first served.
    """
    answering: list[Sequence] = []
    prompts: list[Sequence] = []
    for sequence in sequences:
        (prompts if sequence.computed < sequence.prompt_len else answering).append(sequence)
    return schedule(answering, max_tokens) + [Chunk(first, min(first.pending, prompt_tokens)) for first in prompts[:1]]


log = logging.getLogger(__name__)

_IDLE_S = 0.1
_LOOK_AGAIN_S = 2.0  # for room, if nothing has said that there is some


class Batching:
    """Steps over `jobs` of at most `max_tokens` tokens, of which a prompt has at most `prompt_step` in a paced one.

    `on_landed` is called after each step, `on_room` after blocks have come back and nobody who computes waits for any,
    `on_idle` when there has been nothing to do for a while.
    """

    def __init__(
        self,
        engine: Engine,
        compute: ComputeThread,
        memory: SequenceMemory,
        jobs: Jobs,
        pacer: Pacer | None,
        max_tokens: int,
        prompt_step: int,
        *,
        on_landed: Callable[[], None],
        on_room: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._memory = memory
        self._jobs = jobs
        self._pacer = pacer
        self._max_tokens = max_tokens
        self._prompt_step = prompt_step
        self._on_landed = on_landed
        self._on_room = on_room
        self._on_idle = on_idle
        self._wake = asyncio.Event()
        self._freed = False
        self.short_of_blocks = False
        """Some sequence waits for room: whoever comes now comes after it."""
        self.closing = False
        self.failure: Exception | None = None
        """The error that ended the loop."""

    def wake(self) -> None:
        """There may be something to compute."""
        self._wake.set()

    def look_for_room(self) -> None:
        """Someone may wait for blocks, and there may be some."""
        self._freed = True
        self._wake.set()

    def close(self) -> None:
        """End the loop after the step in flight."""
        self.closing = True
        self._wake.set()

    async def run(self) -> None:
        try:
            while not self.closing:
                await self._turn()
        except Exception as error:
            # Nobody may wait for ever on an engine that has stopped turning.
            log.exception("the engine has failed")
            self.failure = error
        for job in self._jobs:
            self._jobs.finish(job, self.failure)

    async def _turn(self) -> None:
        """One step, or a wait for work."""
        computing = [job.sequence for job in self._jobs]
        age = {sequence: number for number, sequence in enumerate(computing)}
        wanted = sorted(self._scheduled(computing), key=lambda chunk: age[chunk.sequence])
        # a prompt may be read by transfers while it is computed: it keeps what it has
        answering = [
            job.sequence for job in self._jobs if not job.once or job.sequence.computed >= job.sequence.prompt_len
        ]
        fitted = self._memory.fit(wanted, computing, answering)
        self._freed |= self.short_of_blocks
        self.short_of_blocks = bool(fitted.waiting)
        if self._freed and not self.short_of_blocks and not self.closing:
            self._freed = False
            try:
                self._on_room()
            except Exception:  # a fault of who wants to come in is none of those that are here
                log.exception("nobody was told of room for KV")
        for sequence, error in fitted.refused:
            if isinstance(error, OutOfBlocks):
                self._jobs.finish(self._jobs[sequence], error)
            else:
                self._jobs.fail(self._jobs[sequence], error)
        for sequence in fitted.opened:
            self._tell(self._jobs[sequence])
        fitted.ready = [chunk for chunk in fitted.ready if chunk.sequence in self._jobs]
        if fitted.ready:
            await self._step(self._with_drafts(fitted.ready))
        elif fitted.refused or fitted.opened:
            return  # others may fit now
        elif fitted.waiting or fitted.behind:
            await self._woken(_LOOK_AGAIN_S)
            if self._pacer is not None:
                self._pacer.skip(time.monotonic_ns())
        elif not await self._woken(_IDLE_S):
            self._on_idle()
            await self._wake.wait()

    def _scheduled(self, sequences: list[Sequence]) -> list[Chunk]:
        if self._pacer is None:
            return schedule(sequences, self._max_tokens)
        at_most = self._pacer.profile.prompt_step_tokens(self._prompt_step)
        return schedule_paced(sequences, self._max_tokens, at_most)

    async def _woken(self, within_s: float) -> bool:
        self._wake.clear()
        try:
            async with asyncio.timeout(within_s):  # `wait_for` may swallow a cancellation that comes with the wake-up
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """The same chunks, those that decode with guesses where something is left of the step and of the memory."""
        left = self._max_tokens - sum(chunk.count for chunk in chunks)
        context_length = self._engine.loaded.config.context_length
        drafting = []
        for chunk in chunks:
            job = self._jobs[chunk.sequence]
            try:
                chunk = self._with_draft(chunk, job.drafter, left, context_length)
            except Exception as error:
                self._jobs.fail(job, error)
                continue
            left -= len(chunk.draft)
            drafting.append(chunk)
        return drafting

    def _with_draft(self, chunk: Chunk, drafter: Drafter | None, left: int, context_length: int) -> Chunk:
        sequence = chunk.sequence
        if drafter is None or sequence.pending != 1 or left <= 0:
            return chunk
        # the last token wanted is sampled, never guessed
        most = min(sequence.prompt_len + sequence.sampling.max_tokens, context_length)
        draft = drafter.propose(sequence.tokens, min(left, most - len(sequence.tokens) - 1))
        try:
            self._engine.grow(sequence, 1 + len(draft))
        except OutOfBlocks:
            return chunk  # one token a step will do
        return Chunk(sequence, 1, tuple(draft))

    async def _step(self, chunks: list[Chunk]) -> None:
        jobs: list[Job] = []
        parts: list[Part] = []
        for chunk in chunks:
            job = self._jobs[chunk.sequence]
            try:
                parts.append(self._engine.prepare(chunk))
                jobs.append(job)
            except Exception as error:
                self._jobs.fail(job, error)
        if not parts:
            return
        work = work_of([part.chunk for part in parts])
        due_ns = self._pacer.begin(work, min(job.since_ns for job in jobs)) if self._pacer else None
        try:
            with self._jobs.flight(jobs):
                outcomes, computed_ns = await self._compute.outcomes(Batch(parts), due_ns)
                if self._pacer is not None:
                    self._pacer.end(computed_ns, time.monotonic_ns())
                for job, part, outcome in zip(jobs, parts, outcomes, strict=True):
                    self._land(job, part, outcome)
        finally:
            self._on_landed()

    def _tell(self, job: Job) -> None:
        """Tell a job that its sequence has got blocks, the first of which may hold what the cache had."""
        try:
            if job.on_step is not None:
                job.on_step()
        except Exception as error:
            self._jobs.fail(job, error)

    def _land(self, job: Job, part: Part, outcome: Outcome) -> None:
        """Hand one job what a step has brought it."""
        sequence = job.sequence
        try:
            if isinstance(outcome, Exception):
                raise outcome
            gained = self._engine.commit(part, outcome)
            if part.segment.start < sequence.prompt_len <= sequence.computed:
                self._memory.keep(sequence)  # now: the next step may begin with one who waits for it
            if job.on_step is not None and self._jobs.is_under_way(job):
                job.on_step()
            if part.chunk.draft:
                job.note_draft(len(part.chunk.draft), len(gained) - 1)
        except Exception as error:
            self._jobs.fail(job, error)
            return
        for generated in gained:
            job.deliver(generated)
        if gained and (job.once or gained[-1].finish_reason is not None):
            self._jobs.finish(job)
