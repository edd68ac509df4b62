"""The asyncio front of the engine: continuous batching with one compute thread.

Every method is called from one event loop, which alone touches sequences and the pool; the compute thread
runs the model and nothing else. One step is in flight at a time; requests join and leave between steps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from workers.engine.blocks import BlockPool, OutOfBlocks
from workers.engine.engine import Batch, Chunk, Engine
from workers.engine.memory import SequenceMemory
from workers.engine.pacing import PaceCounts, Pacer, Profile, work_of
from workers.engine.sampling import Choice, Sampling
from workers.engine.schedule import schedule, schedule_paced
from workers.engine.sequence import Generated, Sequence
from workers.engine.speculation import Drafter, Speculation
from workers.engine.urgency import Urgency
from workers.models import LoadedModel

if TYPE_CHECKING:
    from workers.cache import BlockCache

log = logging.getLogger(__name__)

_IDLE_S = 0.1
_PATIENCE_S = 2.0  # for blocks of sequences that nobody computes: their owners free them or compute them soon


class Stopped(Exception):
    """The sequence was stopped or freed before the awaited token was there."""


@dataclass(eq=False)
class _Job:
    """A sequence being computed and whoever waits for its tokens. None in the queue: no more will come."""

    sequence: Sequence
    once: bool
    on_step: Callable[[], None] | None = None
    drafter: Drafter | None = None
    since_ns: int = field(default_factory=time.monotonic_ns)
    queue: asyncio.Queue[Generated | Exception | None] = field(default_factory=asyncio.Queue)

    def note_draft(self, drafted: int, accepted: int) -> None:
        """Of the sequence's last step."""
        assert self.drafter is not None
        self.drafter.learn(drafted, accepted)
        self.sequence.drafted += drafted
        self.sequence.accepted += accepted


class EngineRunner:
    """Runs sequences side by side. `threads`: CPU threads a step uses, default $PDDBED_THREADS or 1.

    With a `cache` new sequences begin with what it has, and whatever was computed stays in it. With `speculation`
    decoding guesses ahead (see `speculation.py`), in what a step has left of `max_batch_tokens`. With a `profile` steps
    take its time (see `pacing.py`), and what they compute is the same; `prompt_step`: at most so many tokens of a
    prompt in such a step, so that blocks are done, and may leave, as early as on the hardware.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: BlockPool,
        max_batch_tokens: int = 256,
        threads: int | None = None,
        cache: BlockCache | None = None,
        speculation: Speculation | None = None,
        profile: Profile | None = None,
        prompt_step: int | None = None,
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self._speculation = speculation
        self._pacer = Pacer(profile) if profile is not None else None
        self._prompt_step = min(max_batch_tokens, prompt_step or max_batch_tokens)
        self._hurry = threading.Event()
        """Nobody waits for a step's time to pass any more."""
        self._urgency = Urgency()
        self._engine = Engine(loaded, pool)
        self._memory = SequenceMemory(self._engine, pool, cache)
        self._leases = self._memory.leases
        self._threads = threads or _threads_from_environment()
        self._sequences: dict[str, Sequence] = {}
        self._jobs: dict[str, _Job] = {}
        self._flying: list[_Job] = []
        self._landed: asyncio.Future[None] | None = None
        self._doomed: list[Sequence] = []
        self._wake = asyncio.Event()
        self._closing = False
        self._failure: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the compute thread; sequences may be made before, computed only after."""
        assert self._task is None, "the runner is started once"
        self._thread = ThreadPoolExecutor(1, "engine", initializer=lambda: torch.set_num_threads(self._threads))
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-runner")

    async def close(self) -> None:
        """Lets the step in flight finish, ends every wait, releases every sequence. Idempotent."""
        self._closing = True
        self._hurry.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.shield(self._task)
            self._thread.shutdown()
        for sequence in list(self._sequences.values()):
            self.free(sequence)

    @property
    def running(self) -> int:
        """Sequences being computed now."""
        return len(self._jobs)

    @property
    def pace(self) -> PaceCounts | None:
        """How pacing went so far; None without a profile."""
        return self._pacer.counts if self._pacer is not None else None

    def new_sequence(
        self, id: str, tokens: List[int], prompt_len: int, sampling: Sampling, cached_blocks: int | None = None
    ) -> Sequence:
        """A sequence with blocks for `tokens`; `id` is unique among those not yet freed.

        Of a cache it adopts the longest beginning it can, at most all but the last token; `computed` says so. KV may
        be written from outside into the blocks behind exactly `cached_blocks` adopted ones, and `computed` set
        accordingly. Raises OutOfBlocks, MissingBlocks, ContextTooLong or ValueError, with nothing allocated.
        """
        if id in self._sequences:
            raise ValueError(f'sequence "{id}" exists already; free it first or take another id')
        sequence = Sequence(id, list(tokens), prompt_len, sampling)
        self._memory.open(sequence, cached_blocks)
        self._sequences[id] = sequence
        return sequence

    def hashes(self, sequence: Sequence) -> List[bytes]:
        """Names of the full blocks of the tokens that the sequence was made with, and perhaps of later ones."""
        return self._leases[sequence].hashes

    def keep(self, sequence: Sequence) -> None:
        """Put the full blocks computed so far into the cache now, for others to use while this sequence goes on."""
        self._memory.keep(sequence)

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Blocks for so many tokens, whose KV is written from outside. Raises OutOfBlocks, taking none."""
        self._check_idle(sequence)
        self._engine.grow(sequence, tokens - sequence.computed)

    async def prefill(self, sequence: Sequence, on_step: Callable[[], None] | None = None) -> Generated:
        """Computes the KV of `tokens[computed:]` and samples the next token, which joins `tokens`.

        `on_step` is called after each step that moved `computed` on: what lies before it is final.

        If the known tokens already end the answer, nothing is sampled and the last of them is returned with
        its finish reason. Raises Stopped when stopped or freed meanwhile, OutOfBlocks when memory runs out.
        """
        job = self._begin(sequence, once=True)
        job.on_step = on_step
        try:
            item = await job.queue.get()
        finally:
            self._drop(job)
        if item is None:
            raise Stopped(f'sequence "{sequence.id}" was stopped before its next token')
        if isinstance(item, Exception):
            raise item
        return item

    async def extend(self, sequence: Sequence, ids: List[int]) -> Generated:
        """Appends known answer tokens, then the same as `prefill`: one forward pass, one sample."""
        self._check_idle(sequence)
        self._engine.append(sequence, ids)
        return await self.prefill(sequence)

    def decode(self, sequence: Sequence) -> AsyncIterator[Generated]:
        """Continues from the last token until the answer is finished or `stop`; decoding begins at once.

        Decoding does not wait for a slow consumer. Leaving the iterator stops it. When memory runs out the youngest
        wait for the older ones (`memory.py`), with neither blocks nor `computed` KV until they go on. Raises
        OutOfBlocks from the iterator when there is nobody to wait for; the sequence is intact and may go on later.
        """
        job = None if sequence.finish_reason is not None else self._begin(sequence, once=False)
        return self._drain(job)

    async def stop(self, sequence: Sequence) -> None:
        """Returns when no further token can appear; one of the step in flight is still delivered."""
        job = self._jobs.pop(sequence.id, None)
        while self._is_flying(sequence):
            assert self._landed is not None
            await asyncio.shield(self._landed)
        if job is not None:
            job.queue.put_nowait(None)

    def free(self, sequence: Sequence) -> None:
        """Ends the sequence and releases its blocks, after the step in flight if need be. Idempotent."""
        if self._sequences.get(sequence.id) is not sequence:
            return
        del self._sequences[sequence.id]
        job = self._jobs.pop(sequence.id, None)
        if job is not None:
            job.queue.put_nowait(None)
        if self._is_flying(sequence):
            self._doomed.append(sequence)
        else:
            self._release(sequence)

    def _begin(self, sequence: Sequence, once: bool) -> _Job:
        self._check_idle(sequence)
        if sequence.pending < 1:
            raise ValueError(f'sequence "{sequence.id}" has no pending token; there are no logits to sample from')
        drafter = Drafter(self._speculation) if self._speculation is not None and not once else None
        job = self._jobs[sequence.id] = _Job(sequence, once, drafter=drafter)
        self._wake.set()
        return job

    def _check_idle(self, sequence: Sequence) -> None:
        if self._failure is not None:
            raise Stopped(f"the engine has failed: {self._failure!r}") from self._failure
        if self._closing:
            raise Stopped("the engine is closed")
        if self._sequences.get(sequence.id) is not sequence:
            raise ValueError(f'sequence "{sequence.id}" is not known here; it was freed')
        if sequence.id in self._jobs or self._is_flying(sequence):
            raise ValueError(f'sequence "{sequence.id}" is being computed; stop it first')

    async def _drain(self, job: _Job | None) -> AsyncIterator[Generated]:
        if job is None:
            return
        try:
            while (item := await job.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        if self._jobs.get(job.sequence.id) is job:
            del self._jobs[job.sequence.id]

    def _finish(self, job: _Job, item: Exception | None) -> None:
        self._drop(job)
        job.queue.put_nowait(item)

    def _is_flying(self, sequence: Sequence) -> bool:
        return any(job.sequence is sequence for job in self._flying)

    def _release(self, sequence: Sequence) -> None:
        self._memory.close(sequence)
        self._wake.set()  # someone may wait for blocks

    async def _run(self) -> None:
        try:
            while not self._closing:
                await self._turn()
        except Exception as error:
            # Nobody may wait for ever on an engine that has stopped turning.
            log.exception("the engine has failed")
            self._failure = error
        for job in list(self._jobs.values()):
            self._finish(job, self._failure)

    async def _turn(self) -> None:
        """One step, or a wait for work; after a while with nothing to do it checks the pool's books."""
        sequences = [job.sequence for job in self._jobs.values()]
        age = {sequence: number for number, sequence in enumerate(sequences)}
        wanted = sorted(self._scheduled(sequences), key=lambda chunk: age[chunk.sequence])
        decoding = [job.sequence for job in self._jobs.values() if not job.once]
        fitted = self._memory.fit(wanted, decoding)
        for sequence, error in fitted.refused:
            self._finish(self._jobs[sequence.id], error)
        if fitted.ready:
            chunks = fitted.ready if self._speculation is None else self._with_drafts(fitted.ready)
            await self._step([self._jobs[chunk.sequence.id] for chunk in chunks], chunks)
        elif fitted.waiting:
            await self._wait_for_room(fitted.waiting)
            if self._pacer is not None:
                self._pacer.skip(time.monotonic_ns())
        elif not await self._woken(_IDLE_S):
            self.pool.check_integrity()
            if self.cache is not None:
                self.cache.check_integrity()
            await self._wake.wait()

    def _scheduled(self, sequences: list[Sequence]) -> list[Chunk]:
        if self._pacer is None:
            return schedule(sequences, self.max_batch_tokens)
        at_most = self._pacer.profile.prompt_step_tokens(self._prompt_step)
        return schedule_paced(sequences, self.max_batch_tokens, at_most)

    async def _wait_for_room(self, waiting: list[tuple[Sequence, OutOfBlocks]]) -> None:
        """Nothing can be computed until blocks come back; whoever holds them is idle and gets a moment for that."""
        if not await self._woken(_PATIENCE_S):
            for sequence, error in waiting:
                if sequence.id in self._jobs:
                    self._finish(self._jobs[sequence.id], error)

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
        left = self.max_batch_tokens - sum(chunk.count for chunk in chunks)
        context_length = self._engine.loaded.config.context_length
        drafting = []
        for chunk in chunks:
            sequence, drafter = chunk.sequence, self._jobs[chunk.sequence.id].drafter
            if drafter is not None and sequence.pending == 1 and left > 0:
                # the last token wanted is sampled, never guessed
                most = min(sequence.prompt_len + sequence.sampling.max_tokens, context_length)
                draft = drafter.propose(sequence.tokens, min(left, most - len(sequence.tokens) - 1))
                with suppress(OutOfBlocks):  # one token a step will do
                    self._engine.grow(sequence, 1 + len(draft))
                    chunk = Chunk(sequence, 1, tuple(draft))
                    left -= len(draft)
            drafting.append(chunk)
        return drafting

    async def _step(self, jobs: list[_Job], chunks: list[Chunk]) -> None:
        loop = asyncio.get_running_loop()
        batch = self._engine.prepare(chunks)
        self._flying, self._landed = jobs, loop.create_future()
        due_ns = self._pacer.begin(work_of(chunks), min(job.since_ns for job in jobs)) if self._pacer else None
        try:
            sampled, computed_ns = await loop.run_in_executor(self._thread, self._compute, batch, due_ns)
            if self._pacer is not None:
                self._pacer.end(computed_ns, time.monotonic_ns())
            for job, chunk, gained in zip(jobs, chunks, self._engine.commit(batch, sampled), strict=True):
                if job.on_step is not None and self._jobs.get(job.sequence.id) is job:
                    job.on_step()
                if chunk.draft:
                    job.note_draft(len(chunk.draft), len(gained) - 1)
                for generated in gained:
                    job.queue.put_nowait(generated)
                if gained and (job.once or gained[-1].finish_reason is not None):
                    self._finish(job, None)
        except Exception as error:
            for job in jobs:
                self._finish(job, error)
        finally:
            self._flying = []
            self._landed.set_result(None)
            for sequence in self._doomed:
                self._release(sequence)
            self._doomed.clear()

    def _compute(self, batch: Batch, due_ns: int | None) -> tuple[list[Choice], int]:
        """On the compute thread: what was chosen, and when that was known; returns when the step is due."""
        if due_ns is None:
            return self._engine.compute(batch), 0
        self._urgency.end()
        sampled = self._engine.compute(batch)
        computed_ns = time.monotonic_ns()
        self._urgency.begin()  # until the next step: its result is still to be handed over
        if due_ns > computed_ns:
            self._hurry.wait((due_ns - computed_ns) / 1e9)
        return sampled, computed_ns


def _threads_from_environment() -> int:
    given = os.environ.get("PDDBED_THREADS", "1")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f'PDDBED_THREADS is "{given}"; it must be a whole number of CPU threads, at least 1')
    return int(given)
