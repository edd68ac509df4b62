"""The compute thread: runs the model on batches, and finds out which parts of a failing batch fail by themselves.

Owns the thread, its number of CPU threads and its priority. Knows no jobs, and changes no sequence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor

import torch

from workers.engine.engine import Batch, Chunk, Engine
from workers.engine.job import EngineFailed
from workers.engine.sampling import Sampled
from workers.engine.sequence import Sequence
from workers.linux import RealTimePriority

log = logging.getLogger(__name__)

Outcome = List[Sampled] | Exception
"""Choices that a step has brought one sequence, or why there are none."""


class ComputeThread:
    """One thread that computes one batch at a time. `threads`: CPU threads of a batch, default $PDDBED_THREADS or 1."""

    def __init__(self, engine: Engine, threads: int | None = None) -> None:
        self._engine = engine
        self._threads = threads or _threads_from_environment()
        self._priority = RealTimePriority()
        self._hurry = threading.Event()
        """Nobody waits for a step's time to pass any more."""

    def start(self) -> None:
        """Start the thread."""
        self._thread = ThreadPoolExecutor(1, "engine", initializer=lambda: torch.set_num_threads(self._threads))

    def hurry(self) -> None:
        """Return results as soon as they are there from now on, whenever they are due."""
        self._hurry.set()

    def close(self) -> None:
        """End the thread, which computes nothing now."""
        self._thread.shutdown()

    async def outcomes(self, batch: Batch, due_ns: int | None) -> tuple[list[Outcome], int]:
        """The outcome of each part, not before `due_ns`, and when that was known.

        If the batch as a whole fails, each part is computed alone: only those fail that fail by themselves. If none can
        be computed, it may be the engine that computes nothing.
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
        pool = self._engine.pool
        if not pool.free_count:
            return True  # there is nothing to try it with
        (block,) = pool.allocate(1)
        probe = Sequence("probe", [0], 1, blocks=[block])
        try:
            batch = Batch([self._engine.prepare(Chunk(probe, 1))])
            sampled = await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.compute, batch)
            return _failure(sampled) is None
        except Exception:
            return False
        finally:
            pool.release([block])

    def _compute(self, batch: Batch, due_ns: int | None) -> tuple[list[Sampled], int]:
        """On the thread: the choices, and when they were known; returns when the step is due."""
        if due_ns is None:
            return self._engine.compute(batch), 0
        self._priority.end()
        sampled = self._engine.compute(batch)
        computed_ns = time.monotonic_ns()
        self._priority.begin()  # until the next step: its result is still to be handed over
        if due_ns > computed_ns:
            self._hurry.wait((due_ns - computed_ns) / 1e9)
        return sampled, computed_ns


def _failure(outcome: Outcome) -> Exception | None:
    """The reason why nothing was chosen, if that is so."""
    if isinstance(outcome, Exception):
        return outcome
    return next((sampled for sampled in outcome if isinstance(sampled, Exception)), None)


def _threads_from_environment() -> int:
    given = os.environ.get("PDDBED_THREADS", "1")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f'PDDBED_THREADS is "{given}"; it must be a whole number of CPU threads, at least 1')
    return int(given)
