"""The asyncio front of the engine: continuous batching with one compute thread.

Every method is called from one event loop, which alone touches sequences and the pool; the compute thread
(`compute.py`) runs the model and nothing else. One step (`batching.py`) is in flight at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from workers.engine.batching import Batching
from workers.engine.blocks import BlockPool
from workers.engine.compute import ComputeThread
from workers.engine.engine import Engine
from workers.engine.job import Job, Jobs, Stopped
from workers.engine.memory import SequenceMemory
from workers.engine.pacing import PaceCounts, Pacer, Profile
from workers.engine.sampling import Sampling
from workers.engine.sequence import Generated, Sequence
from workers.engine.speculation import Drafter, Speculation
from workers.models import LoadedModel

if TYPE_CHECKING:
    from workers.cache import BlockCache


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
        self._speculation = speculation
        self._pacer = Pacer(profile) if profile is not None else None
        self._engine = Engine(loaded, pool)
        self._compute = ComputeThread(self._engine, threads)
        self._memory = SequenceMemory(self._engine, pool, cache)
        self._leases = self._memory.leases
        self._sequences: dict[str, Sequence] = {}
        self._jobs = Jobs()
        self._doomed: list[Sequence] = []
        """Freed while the step in flight computes them."""
        self.on_room: Callable[[], None] = lambda: None
        """Told after blocks have come back, when nobody who computes here waits for any."""
        self._batching = Batching(
            self._engine,
            self._compute,
            self._memory,
            self._jobs,
            self._pacer,
            max_batch_tokens,
            min(max_batch_tokens, prompt_step or max_batch_tokens),
            on_landed=self._release_doomed,
            on_room=lambda: self.on_room(),
            on_idle=self._check_integrity,
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the compute thread; sequences may be made before, computed only after."""
        assert self._task is None, "the runner is started once"
        self._compute.start()
        self._task = asyncio.get_running_loop().create_task(self._batching.run(), name="engine-runner")

    async def close(self) -> None:
        """Lets the step in flight finish, ends every wait, releases every sequence. Idempotent."""
        self._batching.close()
        self._compute.hurry()
        if self._task is not None:
            await asyncio.shield(self._task)
            self._compute.close()
        for sequence in list(self._sequences.values()):
            self.free(sequence)

    @property
    def short_of_blocks(self) -> bool:
        """Whether some sequence waits for room: whoever comes now comes after it."""
        return self._batching.short_of_blocks

    def look_for_room(self) -> None:
        """Someone may wait for blocks, and there may be some."""
        self._batching.look_for_room()

    @property
    def running(self) -> int:
        """Sequences being computed now."""
        return len(self._jobs)

    @property
    def pace(self) -> PaceCounts | None:
        """Counts of paced steps so far; None without a profile."""
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
        final. Once the prompt is computed its full blocks are in the cache.

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
        over = Job(sequence, False, self._jobs.stop)
        over.close()
        return over

    async def landed(self, sequence: Sequence) -> None:
        """Returns when no step in flight computes the sequence."""
        await self._jobs.landed(sequence)

    def free(self, sequence: Sequence) -> None:
        """Ends the sequence and releases its blocks, after the step in flight if need be. Idempotent."""
        if self._sequences.get(sequence.id) is not sequence:
            return
        del self._sequences[sequence.id]
        if sequence in self._jobs:
            self._jobs.finish(self._jobs[sequence])
        if self._jobs.is_flying(sequence):
            self._doomed.append(sequence)
        else:
            self._release(sequence)

    def _begin(self, sequence: Sequence, once: bool, on_step: Callable[[], None] | None = None) -> Job:
        self._check_idle(sequence)
        if sequence.pending < 1:
            raise ValueError(f'sequence "{sequence.id}" has no pending token; there are no logits to sample from')
        drafter = Drafter(self._speculation) if self._speculation is not None and not once else None
        job = self._jobs.begin(sequence, once, on_step, drafter)
        self._batching.wake()
        return job

    def _check_idle(self, sequence: Sequence) -> None:
        if (failure := self._batching.failure) is not None:
            raise Stopped(f"the engine has failed: {failure!r}") from failure
        if self._batching.closing:
            raise Stopped("the engine is closed")
        if self._sequences.get(sequence.id) is not sequence:
            raise ValueError(f'sequence "{sequence.id}" is not known here; it was freed')
        if sequence in self._jobs or self._jobs.is_flying(sequence):
            raise ValueError(f'sequence "{sequence.id}" is being computed; stop it first')

    def _release(self, sequence: Sequence) -> None:
        self._memory.close(sequence)
        self.look_for_room()

    def _release_doomed(self) -> None:
        for sequence in self._doomed:
            self._release(sequence)
        self._doomed.clear()

    def _check_integrity(self) -> None:
        self.pool.check_integrity()
        if self.cache is not None:
            self.cache.check_integrity()
