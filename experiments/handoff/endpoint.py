"""One end of `handoff`, inside a host: p0 sends KV or token ids; md0 receives KV, and recomputes the KV of ids it gets.

As `experiments.transport.endpoint`, with the workers' own engine on md0 and the ids on the control connection.
"""

import asyncio
import random
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from experiments.handoff.fit import TOKENS
from experiments.transport.endpoint import Endpoint, main, say
from experiments.transport.memory import Shape
from workers.environment import WorkerEnvironment
from workers.wire.messages import TokenIds

if TYPE_CHECKING:
    from workers.engine import EngineRunner

CONTEXT = 64  # tokens before those that are recomputed, their KV being there
ONLY_IDS = "ids-only"  # requests of this name are timed and not recomputed
_COPIES = 30


@dataclass(frozen=True, slots=True)
class Pace:
    """A profile: recomputing takes so long, as a normal distribution cut at its published maximum.

    The same draws in every part: what differs between parts is what the network and this machine add.
    """

    mean_ms: float
    std_ms: float
    max_ms: float

    def draw_ms(self, index: int) -> float:
        return min(self.max_ms, random.Random(f"recompute {index}").gauss(self.mean_ms, self.std_ms))


class HandoffEndpoint(Endpoint):
    """Adds orders `prepare`, `ids` and `copies`."""

    def __init__(self, environment: WorkerEnvironment, shape: Shape, connection_bps: int | None) -> None:
        super().__init__(environment, shape, connection_bps)
        self._runner: EngineRunner | None = None
        self._pace: Pace | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()
        self.local_name = environment.host

    async def handle(self, order: dict[str, Any]) -> None:
        if order["op"] == "prepare":
            await self._prepare(order["model"], order["pace"])
        elif order["op"] == "ids":
            await self._send_ids(order)
        elif order["op"] == "both":
            await asyncio.gather(self.transfers(order["transfers"]), self._send_ids(order["ids"]))
            say("over")
        elif order["op"] == "copies":
            say("copied", **host_copies(self._shape))
        else:
            await super().handle(order)

    # -- p0 ------------------------------------------------------------------------------------------------------

    async def _send_ids(self, order: dict[str, Any]) -> None:
        """100 ids at each of `starts_ns` after now: in one message, as a one-shot hand-over has them."""
        begin_ns = time.monotonic_ns() + int(order.get("lead_ns", 0))
        ids = list(range(32, 32 + TOKENS))
        for index, start_ns in enumerate(order["starts_ns"]):
            while (left_ns := begin_ns + start_ns - time.monotonic_ns()) > 0:
                await asyncio.sleep(left_ns / 1e9)
            say("sent", index=index, sent_ns=time.monotonic_ns())
            self.peers.post(self.target, TokenIds(request=f"{order['name']}-{index}", position=CONTEXT, ids=ids))
        say("all-sent", count=len(order["starts_ns"]))

    # -- md0 -----------------------------------------------------------------------------------------------------

    async def _prepare(self, model: str, pace: dict[str, float] | None) -> None:
        """Load the model; recompute a few times, since the first steps are slow."""
        from workers.engine import BlockPool, EngineRunner
        from workers.models import ModelSpec, load_model

        self._pace = None if pace is None else Pace(**pace)
        if self._runner is not None:
            await self._runner.close()
        loaded = load_model(ModelSpec(model))
        pool = BlockPool(loaded.config, 4 * (CONTEXT + TOKENS) // 16, 16)
        self._runner = EngineRunner(loaded, pool)
        self._runner.start()
        for number in range(3):
            await self._extend(f"warm-up {number}", list(range(32, 32 + TOKENS)))
        say("prepared", model=model)

    def on_message(self, peer: str, message: object) -> None:
        if isinstance(message, TokenIds):
            received_ns = time.monotonic_ns()
            name, _, index = message.request.rpartition("-")
            if name.startswith(ONLY_IDS):
                say("arrived", index=int(index), received_ns=received_ns)
                return
            task = asyncio.create_task(self._recompute(int(index), message, received_ns))
            self._tasks.add(task)
            task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            say("failed", error=f"recomputing on {self.local_name} failed: {task.exception()}")

    async def _recompute(self, index: int, message: TokenIds, received_ns: int) -> None:
        async with self._one:  # on a machine too slow for the spacing the next one waits, and is not slowed down
            await self._recompute_alone(index, message, received_ns)

    async def _recompute_alone(self, index: int, message: TokenIds, received_ns: int) -> None:
        start_ns = time.monotonic_ns()
        await self._extend(message.request, message.ids)
        computed_ns = end_ns = time.monotonic_ns()
        if self._pace is not None:
            end_ns = start_ns + round(self._pace.draw_ms(index) * 1e6)
            while (left_ns := end_ns - time.monotonic_ns()) > 0:
                await asyncio.sleep(left_ns / 1e9)
        done_ns = time.monotonic_ns()
        say(
            "recomputed",
            index=index,
            received_ns=received_ns,
            start_ns=start_ns,
            computed_ns=computed_ns,
            late_ns=done_ns - end_ns if self._pace is not None else 0,
            done_ns=done_ns,
        )

    async def _extend(self, name: str, ids: list[int]) -> None:
        """The engine's own step: KV of `ids` behind a context whose KV is there, and the next token."""
        from workers.engine import Sampling

        assert self._runner is not None
        tokens = [33] * CONTEXT + ids
        sequence = self._runner.new_sequence(name, tokens, len(tokens), Sampling(max_tokens=1, ignore_eos=True))
        sequence.computed = CONTEXT
        try:
            await self._runner.prefill(sequence)
        finally:
            self._runner.free(sequence)


def host_copies(shape: Shape) -> dict[str, Any]:
    """A hand-over's KV copied to the host and back by the workers' own staging, in ms.

    By the clock of a GPU, where there is one; from one place in main memory to another, where there is none.
    """
    import torch

    from workers.engine.staging import HostStage

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kv = torch.zeros((shape.tokens, shape.bytes_per_token), dtype=torch.uint8, device=device)
    stage, tokens = HostStage(kv), range(shape.tokens)
    taken = [(stage.fetch(tokens) + stage.store(tokens)) / 1e6 for _ in range(_COPIES)]
    name = torch.cuda.get_device_name() if device == "cuda" else "main memory"
    return {"median_ms": median(taken), "max_ms": max(taken), "device": name}


if __name__ == "__main__":
    sys.exit(main(HandoffEndpoint, real_time=False))
