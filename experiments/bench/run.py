"""One run against one server: warm up, send the load, stop in good order, gather what the lab noted."""

import asyncio
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from experiments.bench.client import LOST, WARM_UP_TOKENS, Api, ApiError, Bodies
from experiments.bench.load import Planned
from experiments.bench.outcome import Outcome, merge
from experiments.bench.progress import BenchProgress
from experiments.bench.sender import Sender, SendResult
from experiments.framework.requests import LabRecords
from experiments.traces.trace import Request

WARM_UP_AT_ONCE = 4
CLIENT_NICE = -10


@dataclass(frozen=True)
class Plan:
    """`first`: requests of the load's own that come before it, not measured; `warm_up`: short ones before those."""

    load: Sequence[Planned]
    first: Sequence[Request]
    bodies: Bodies
    concurrency: int | None
    warm_up: int


@dataclass(frozen=True)
class Result:
    """`rows`: lines of requests.jsonl. `why`: what stopped the run (interrupted, gone); empty at its proper end.
    `unrecorded`: answered requests without a record of the lab; `damaged`: lines of its records that could not be read.
    """

    rows: list[dict[str, Any]]
    duration_s: float
    under_way: int
    not_sent: int
    why: str
    unrecorded: int
    damaged: int = 0


async def run(api: Api, plan: Plan, progress: BenchProgress, records: LabRecords | None) -> Result:
    """Raises ApiError when the server answers none of the first requests."""
    await _warm_up(api, plan, progress)

    async def send(planned: Planned, outcome: Outcome) -> None:
        await api.answer(plan.bodies.body(planned.request), outcome)

    async def still_there(outcome: Outcome) -> bool:
        return outcome.reason not in LOST or await api.is_there()

    sender = Sender(plan.load, send, still_there, progress, plan.concurrency)
    progress.begin()
    with _stopping(sender):
        sent = await sender.run()
    return _gathered(sent, progress, records)


async def _warm_up(api: Api, plan: Plan, progress: BenchProgress) -> None:
    """Short requests one after the other, then the load's own. The first steps of a model are slow."""
    progress.step("warming up", brief=not plan.first)
    for number in range(plan.warm_up):
        await _must(api, plan.bodies.warm_up(number), WARM_UP_TOKENS)
    free = asyncio.Semaphore(WARM_UP_AT_ONCE)

    async def one(request: Request) -> None:
        async with free:
            await _must(api, plan.bodies.body(request), request.input_tokens)

    await asyncio.gather(*map(one, plan.first))


async def _must(api: Api, body: bytes, tokens: int) -> None:
    outcome = Outcome(-1, tokens)
    await api.answer(body, outcome)
    if not outcome.success:
        raise ApiError(f"{api.url} does not answer a first request: {outcome.reason}: {outcome.message}")


@contextmanager
def _stopping(sender: Sender) -> Iterator[None]:
    """The first Ctrl-C keeps what is done; the second is as elsewhere."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        sender.stop("interrupted")
        release()

    def release() -> None:
        for number in caught:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler)

    for number in caught:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        release()


def _gathered(sent: SendResult, progress: BenchProgress, records: LabRecords | None) -> Result:
    rows = [outcome.row(sent.begin_ns) for outcome in sent.outcomes]
    noted = {outcome.request_id: outcome.record for outcome in sent.outcomes if outcome.record is not None}
    unrecorded = 0
    if records is not None:
        wanted = [outcome.request_id for outcome in sent.outcomes if outcome.success]
        written: dict[str, dict[str, Any]] = {}
        with suppress(KeyboardInterrupt):
            patience = {"patience_s": 2.0} if sent.why else {}
            written = records.gather(
                wanted,
                lambda missing: progress.step(f"waiting for the lab's records of {missing} requests"),
                **patience,
            )
        unrecorded = len(wanted) - len(written)
        noted |= written
    for row in rows:
        if (record := noted.get(row["request_id"])) is not None:
            merge(row, record)
    return Result(
        rows,
        max(0, sent.end_ns - sent.begin_ns) / 1e9,
        sent.under_way,
        sent.not_sent,
        sent.why,
        unrecorded,
        0 if records is None else records.damaged,
    )


def claim_resources() -> None:
    """As many sockets as this user may have, each request that is under way taking one; and, where that is allowed, a
    place before the workers on a CPU that both share: a client that waits for it would measure its own waiting.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(CLIENT_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
