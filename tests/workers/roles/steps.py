"""Workers at exactly one moment, and what goes wrong in them: helpers of the tests of hand-overs.

An engine computes one step for each that a test allows, is slow, fails, or has no room.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.workers.serving import SlowWan, eventually, prompt_of
from workers.engine import BlockPool, OutOfBlocks, Sequence
from workers.models import LoadedModel

PROMPT = prompt_of(100)


def lab_of(tiny: LoadedModel, directory: Path, mode: str, **layout: Any) -> SlowWan:
    return SlowWan(tiny, directory, None, serving={"handoff": mode, **layout.pop("serving", {})}, **layout)


def only(worker: Any) -> Any:
    """The one request that is on a worker."""
    (active,) = worker.active.values()
    return active


async def until(condition: Callable[[], bool], what: str) -> None:
    await eventually(condition, 20, what)


class Steps:
    """The permits of one worker's engine. Only its compute thread waits for them, never the event loop."""

    def __init__(self, worker: Any) -> None:
        self._engine = worker.runner._engine
        self._compute = self._engine.compute
        self._permits = threading.Semaphore(0)
        self._free = False
        self.done = 0
        self._engine.compute = self._gated

    def _gated(self, batch: Any) -> Any:
        if not self._free:
            self._permits.acquire()
        self.done += 1
        return self._compute(batch)

    def allow(self, count: int) -> None:
        """So many more steps, the one in flight included."""
        self._permits.release(count)

    def free(self) -> None:
        """From now on as fast as it can."""
        self._free = True
        self._permits.release(1000)


@contextmanager
def steps(*workers: Any) -> Iterator[list[Steps]]:
    """Gates for some workers, open again at the end, so that their engines can stop."""
    gates = [Steps(worker) for worker in workers]
    try:
        yield gates
    finally:
        for gate in gates:
            gate.free()


async def both_decode(lab: SlowWan, relay: Steps, main: Steps) -> None:
    """From a request whose KV stands before a paused WAN to a main decode that begins its own steps, far behind."""
    relay.allow(20)
    await until(lambda: bool(lab.rld0.active) and len(only(lab.rld0).answer) == 21, "the relay decodes")
    lab.wan.resume()
    await until(lambda: bool(lab.md0.active) and only(lab.md0).following.rounds == [21], "a round begins")
    relay.allow(2)
    await until(lambda: only(lab.md0).following.waiting == 2, "a small gap")
    main.allow(1)
    await until(lambda: only(lab.md0).following.rounds == [21, 2], "the last round")
    relay.allow(40)
    await until(lambda: len(only(lab.md0).following.relayed.ids) == 63, "main decode is far behind")
    main.allow(1)
    await until(lambda: only(lab.md0).overlapping, "both decode")


def slow(worker: Any, seconds: float) -> None:
    """Every step of a worker's engine takes so much longer, without the CPU."""
    compute = worker.runner._engine.compute

    def late(batch: Any) -> Any:
        time.sleep(seconds)
        return compute(batch)

    worker.runner._engine.compute = late


def without_room_once(pool: BlockPool) -> None:
    allocate = pool.allocate

    def none(count: int) -> list[int]:
        pool.allocate = allocate  # type: ignore[method-assign]
        raise OutOfBlocks(f"a test has no room for {count} blocks")

    pool.allocate = none  # type: ignore[method-assign]


def fail_at_next_step(worker: Any, sequence: Any) -> None:
    engine = worker.runner._engine
    prepare = engine.prepare

    def broken(chunk: Any) -> Any:
        if chunk.sequence is sequence:
            raise ZeroDivisionError("a test's fault")
        return prepare(chunk)

    engine.prepare = broken


def kv_of(worker: Any, sequence: Sequence) -> np.ndarray:
    """KV of a sequence's computed tokens: `[computed, layers, 2, kv_heads, head_dim]`."""
    blocks = worker.pool.storage[sequence.blocks].flatten(0, 1)
    return blocks[: sequence.computed].numpy().copy()


def keep_kv(worker: Any) -> list[tuple[list[int], np.ndarray]]:
    """(tokens, KV) of every sequence, taken just before the worker gives its blocks back."""
    kept = []
    release = worker.release

    def keep_then_release(active: Any) -> None:
        kept.append((list(active.sequence.tokens), kv_of(worker, active.sequence)))
        release(active)

    worker.release = keep_then_release
    return kept


def assert_same_kv(relayed: np.ndarray, recomputed: np.ndarray, prompt_len: int) -> None:
    assert np.array_equal(recomputed[:prompt_len], relayed[:prompt_len]), "the prompt's KV came over the wire"
    count = len(relayed) - prompt_len
    assert count > 0, "the relay made no token of which main decode could recompute the KV"
    ours, theirs = relayed[prompt_len:], recomputed[prompt_len : prompt_len + count]
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(relayed).max()
