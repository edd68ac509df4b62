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
from collections.abc import Callable
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from workers.engine.blocks import BlockPool, OutOfBlocks
from workers.engine.engine import Batch, Chunk, Engine, Part
from workers.engine.job import EngineFailed, Job, SequenceFailed, Stopped
from workers.engine.memory import SequenceMemory
from workers.engine.pacing import PaceCounts, Pacer, Profile, work_of
from workers.engine.sampling import Sampled, Sampling
from workers.engine.schedule import schedule, schedule_paced
from workers.engine.sequence import Generated, Sequence
from workers.engine.speculation import Drafter, Speculation
from workers.engine.urgency import Urgency
from workers.models import LoadedModel

if TYPE_CHECKING:
    from workers.cache import BlockCache

log = logging.getLogger(__name__)

Outcome = List[Sampled] | Exception
"""What a step has brought one sequence: choices, or why there are none."""

_IDLE_S = 0.1
_LOOK_AGAIN_S = 2.0  # for room, if nothing has said that there is some


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
        self._jobs: dict[Sequence, Job] = {}
        self._flying: list[Job] = []
        self._landed: asyncio.Future[None] | None = None
        self._doomed: list[Sequence] = []
        self._wake = asyncio.Event()
        self.on_room: Callable[[], None] = lambda: None
        """Told after blocks have come back, when nobody who computes here waits for any."""
        self.short_of_blocks = False
        """Some sequence waits for room: whoever comes now comes after it."""
        self._freed = False
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
        """A sequence with blocks for `tokens`, now; `id` is unique among those not yet freed.

        Of a cache it adopts the longest beginning it can, at most all but the last token; `computed` says so. KV may
        be written from outside into the blocks behind exactly `cached_blocks` adopted ones, and `computed` set
        accordingly. Raises OutOfBlocks, MissingBlocks, ContextTooLong or ValueError, with nothing allocated.
        """
        sequence = self._unique(id, tokens, prompt_len, sampling)
        self._memory.open(sequence, cached_blocks)
        self._sequences[id] = sequence
        return sequence

    def new_prompt(self, id: str, tokens: List[int], sampling: Sampling) -> Sequence:
        """A sequence whose prompt is computed here. It gets blocks, and what the cache has, when its turn comes.

        Until then it waits, for room and for whoever computes a longer beginning of the same prompt. Raises OutOfBlocks
        when the whole pool is too small, ContextTooLong or ValueError.
        """
        sequence = self._unique(id, tokens, len(tokens), sampling)
        self._memory.expect(sequence)
        self._sequences[id] = sequence
        return sequence

    def _unique(self, id: str, tokens: List[int], prompt_len: int, sampling: Sampling) -> Sequence:
        if id in self._sequences:
            raise ValueError(f'sequence "{id}" exists already; free it first or take another id')
        return Sequence(id, list(tokens), prompt_len, sampling)

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

    def forget(self, sequence: Sequence, length: int) -> None:
        """Take back the tokens from position `length` on, which were guessed. The sequence is not being computed."""
        self._check_idle(sequence)
        self._memory.forget(sequence, length)

    async def prefill(self, sequence: Sequence, on_step: Callable[[], None] | None = None) -> Generated:
        """Computes the KV of `tokens[computed:]` and samples the next token, which joins `tokens`.

        `on_step` is called when `computed` has moved on, by a step or by what the cache had: what lies before it is
        final. Once the prompt is
        computed its full blocks are in the cache.

        If the known tokens already end the answer, nothing is sampled and the last of them is returned with
        its finish reason. Raises Stopped when freed meanwhile, OutOfBlocks when there is nobody to wait for,
        SequenceFailed or EngineFailed.
        """
        job = self._begin(sequence, once=True, on_step=on_step)
        try:
            async for token in job:
                return token
        finally:
            job.stop()
        raise Stopped(f'sequence "{sequence.id}" was freed before its next token')

    async def extend(self, sequence: Sequence, ids: List[int]) -> Generated:
        """Appends known answer tokens, then the same as `prefill`: one forward pass, one sample."""
        self._check_idle(sequence)
        self._engine.append(sequence, ids)
        return await self.prefill(sequence)

    def decode(self, sequence: Sequence) -> Job:
        """Continues from the last token until the answer is finished, or until the job is stopped; it begins at once.

        Decoding does not wait for a slow consumer, and goes on until the job is stopped when nobody takes its tokens.
        When memory runs out the youngest wait for the older ones (`memory.py`), with neither blocks nor `computed` KV
        until they go on. The job raises OutOfBlocks when there is nobody to wait for; the sequence is intact and may go
        on later. It raises SequenceFailed or EngineFailed.
        """
        if sequence.finish_reason is None:
            return self._begin(sequence, once=False)
        over = Job(sequence, False, self._stop)
        over.close()
        return over

    async def landed(self, sequence: Sequence) -> None:
        """Returns when no step in flight computes the sequence."""
        while self._is_flying(sequence):
            assert self._landed is not None
            await asyncio.shield(self._landed)

    def free(self, sequence: Sequence) -> None:
        """Ends the sequence and releases its blocks, after the step in flight if need be. Idempotent."""
        if self._sequences.get(sequence.id) is not sequence:
            return
        del self._sequences[sequence.id]
        job = self._jobs.pop(sequence, None)
        if job is not None:
            job.close()
        if self._is_flying(sequence):
            self._doomed.append(sequence)
        else:
            self._release(sequence)

    def _begin(self, sequence: Sequence, once: bool, on_step: Callable[[], None] | None = None) -> Job:
        self._check_idle(sequence)
        if sequence.pending < 1:
            raise ValueError(f'sequence "{sequence.id}" has no pending token; there are no logits to sample from')
        drafter = Drafter(self._speculation) if self._speculation is not None and not once else None
        job = self._jobs[sequence] = Job(sequence, once, self._stop, on_step, drafter)
        self._wake.set()
        return job

    def _check_idle(self, sequence: Sequence) -> None:
        if self._failure is not None:
            raise Stopped(f"the engine has failed: {self._failure!r}") from self._failure
        if self._closing:
            raise Stopped("the engine is closed")
        if self._sequences.get(sequence.id) is not sequence:
            raise ValueError(f'sequence "{sequence.id}" is not known here; it was freed')
        if sequence in self._jobs or self._is_flying(sequence):
            raise ValueError(f'sequence "{sequence.id}" is being computed; stop it first')

    def _stop(self, job: Job) -> None:
        """Ends one job. If a step is computing it, that ends it: its token is still to be delivered."""
        self._drop(job)
        if job not in self._flying:
            job.close()

    def _drop(self, job: Job) -> None:
        if self._jobs.get(job.sequence) is job:
            del self._jobs[job.sequence]

    def _finish(self, job: Job, error: Exception | None = None) -> None:
        self._drop(job)
        job.close(error)

    def _fail(self, job: Job, error: Exception) -> None:
        """One job fails, of which nothing stays; whoever shares a step with it is not concerned."""
        job.sequence.spoilt = True
        if _for_want_of_memory(error):
            error = EngineFailed(f"no memory to compute in: {error}")
        if not isinstance(error, EngineFailed):
            log.error('sequence "%s" cannot be computed', job.sequence.id, exc_info=error)
            failure = SequenceFailed(f"the request cannot be computed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self._finish(job, error)

    def _is_flying(self, sequence: Sequence) -> bool:
        return any(job.sequence is sequence for job in self._flying)

    def _release(self, sequence: Sequence) -> None:
        self._memory.close(sequence)
        self.look_for_room()

    def look_for_room(self) -> None:
        """Someone may wait for blocks, and there may be some."""
        self._freed = True
        self._wake.set()

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
        computing = list(self._jobs)
        age = {sequence: number for number, sequence in enumerate(computing)}
        wanted = sorted(self._scheduled(computing), key=lambda chunk: age[chunk.sequence])
        # a prompt may be read by transfers while it is computed: it keeps what it has
        answering = [one for one, job in self._jobs.items() if not job.once or one.computed >= one.prompt_len]
        fitted = self._memory.fit(wanted, computing, answering)
        self._freed |= self.short_of_blocks
        self.short_of_blocks = bool(fitted.waiting)
        if self._freed and not self.short_of_blocks and not self._closing:
            self._freed = False
            try:
                self.on_room()
            except Exception:  # a fault of who wants to come in is none of those that are here
                log.exception("nobody was told of room for KV")
        for sequence, error in fitted.refused:
            if isinstance(error, OutOfBlocks):
                self._finish(self._jobs[sequence], error)
            else:
                self._fail(self._jobs[sequence], error)
        for sequence in fitted.opened:
            self._tell(self._jobs[sequence])
        fitted.ready = [chunk for chunk in fitted.ready if chunk.sequence in self._jobs]
        if fitted.ready:
            await self._step(fitted.ready if self._speculation is None else self._with_drafts(fitted.ready))
        elif fitted.refused or fitted.opened:
            return  # others may fit now
        elif fitted.waiting or fitted.behind:
            await self._woken(_LOOK_AGAIN_S)
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
            job = self._jobs[chunk.sequence]
            try:
                chunk = self._with_draft(chunk, job.drafter, left, context_length)
            except Exception as error:
                self._fail(job, error)
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
        loop = asyncio.get_running_loop()
        jobs: list[Job] = []
        parts: list[Part] = []
        for chunk in chunks:
            job = self._jobs[chunk.sequence]
            try:
                parts.append(self._engine.prepare(chunk))
                jobs.append(job)
            except Exception as error:
                self._fail(job, error)
        if not parts:
            return
        self._flying, self._landed = jobs, loop.create_future()
        work = work_of([part.chunk for part in parts])
        due_ns = self._pacer.begin(work, min(job.since_ns for job in jobs)) if self._pacer else None
        try:
            outcomes, computed_ns = await self._computed(Batch(parts), due_ns)
            if self._pacer is not None:
                self._pacer.end(computed_ns, time.monotonic_ns())
            for job, part, outcome in zip(jobs, parts, outcomes, strict=True):
                self._land(job, part, outcome)
        finally:
            self._flying = []
            self._landed.set_result(None)
            for job in jobs:
                if self._jobs.get(job.sequence) is not job:  # stopped meanwhile
                    job.close()
            for sequence in self._doomed:
                self._release(sequence)
            self._doomed.clear()

    def _tell(self, job: Job) -> None:
        """That a sequence has got its blocks, the first of which may hold what the cache had."""
        try:
            if job.on_step is not None:
                job.on_step()
        except Exception as error:
            self._fail(job, error)

    def _land(self, job: Job, part: Part, outcome: Outcome) -> None:
        """What a step has brought one job."""
        sequence = job.sequence
        try:
            if isinstance(outcome, Exception):
                raise outcome
            gained = self._engine.commit(part, outcome)
            if part.segment.start < sequence.prompt_len <= sequence.computed:
                self._memory.keep(sequence)  # now: the next step may begin with one who waits for it
            if job.on_step is not None and self._jobs.get(sequence) is job:
                job.on_step()
            if part.chunk.draft:
                job.note_draft(len(part.chunk.draft), len(gained) - 1)
        except Exception as error:
            self._fail(job, error)
            return
        for generated in gained:
            job.deliver(generated)
        if gained and (job.once or gained[-1].finish_reason is not None):
            self._finish(job)

    async def _computed(self, batch: Batch, due_ns: int | None) -> tuple[list[Outcome], int]:
        """What became of each part, and when that was known. If the step as a whole fails, each part is computed alone:
        only those fail that fail by themselves. If none can be computed, it may be the engine that computes nothing.
        """
        run = asyncio.get_running_loop().run_in_executor
        outcomes: list[Outcome] = []
        try:
            sampled, computed_ns = await run(self._thread, self._compute, batch, due_ns)
            outcomes += batch.split(sampled)
        except Exception as whole:
            for part in batch.parts:
                try:
                    if len(batch.parts) == 1:
                        raise whole
                    outcomes.append(await run(self._thread, self._engine.compute, Batch([part])))
                except Exception as error:
                    outcomes.append(error)
            computed_ns = time.monotonic_ns()
        failures = [failure for outcome in outcomes if (failure := _failure(outcome)) is not None]
        if len(failures) == len(outcomes) and not await self._computes_at_all():
            log.error("the engine computes nothing", exc_info=failures[0])
            outcomes = [EngineFailed(f"the engine computes nothing: {failures[0]!r}") for _ in outcomes]
        return outcomes, computed_ns

    async def _computes_at_all(self) -> bool:
        """Whether one token can be computed in a block of its own."""
        if not self.pool.free_count:
            return True  # there is nothing to try it with
        (block,) = self.pool.allocate(1)
        probe = Sequence("probe", [0], 1, blocks=[block])
        try:
            batch = Batch([self._engine.prepare(Chunk(probe, 1))])
            sampled = await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.compute, batch)
            return _failure(sampled) is None
        except Exception:
            return False
        finally:
            self.pool.release([block])

    def _compute(self, batch: Batch, due_ns: int | None) -> tuple[list[Sampled], int]:
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


def _failure(outcome: Outcome) -> Exception | None:
    """Why nothing was chosen, if that is so."""
    if isinstance(outcome, Exception):
        return outcome
    return next((sampled for sampled in outcome if isinstance(sampled, Exception)), None)


def _for_want_of_memory(error: Exception) -> bool:
    """Another machine may have it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _threads_from_environment() -> int:
    given = os.environ.get("PDDBED_THREADS", "1")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f'PDDBED_THREADS is "{given}"; it must be a whole number of CPU threads, at least 1')
    return int(given)
