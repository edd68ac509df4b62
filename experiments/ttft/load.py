"""Load of `ttft`: a seed's trace, as small as the lab and the same for every variant, and the client that sends it.

The client is open-loop: each request at its moment, whatever became of those before. Answers are not streamed: the
gateway notes when each token was there, and a record says so more cheaply than events would on a machine whose CPU the
lab needs.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from experiments.traces.generate import generate_sessions
from experiments.traces.prompts import PromptMaker
from experiments.traces.trace import Request, Trace
from experiments.ttft.fit import ANSWER_DIVISOR, REQUESTS, Fit, lab_answer

JUDGED = ("pdd", "cdc-pd", "idc-pd")
BESIDE = ("pdd-chunked", "cdc-pd-chunked", "pdd-end-on-rld")
WARM_UP_S, TAIL_S = 22.0, 12.0


@dataclass(frozen=True, slots=True)
class Shape:
    """`requests` a published policy, spread over the seeds. Divisors and compression: of the topology's `scale:`."""

    requests: int
    sessions: int
    prompt_divisor: int
    output_divisor: int
    time_compression: float

    def each(self, name: str, seeds: int) -> int:
        """Requests of one seed: half as many of variants that stand beside the published policies."""
        return math.ceil(self.requests / (2 if name in BESIDE else 1) / seeds)

    def seconds(self, fit: Fit, requests: int) -> float:
        """Seconds that one part takes, about."""
        return requests / fit.rate_per_s / self.time_compression + WARM_UP_S * self.sessions / 64 + TAIL_S


FULL = Shape(REQUESTS, 64, 256, ANSWER_DIVISOR, 14)
QUICK = Shape(40, 12, 256, 16, 16)

VOCABULARY = range(256)  # of `tiny`, its special tokens left out


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as the lab gets it; `due_ns` counts from the first one's possible moment."""

    request: Request
    prompt: list[int]
    answer_tokens: int
    due_ns: int


@dataclass(frozen=True)
class Workload:
    """`warm_up` fills the caches; `measured` follows. `trace` is the deployment's."""

    trace: Trace
    warm_up: list[Sent]
    measured: list[Sent]


def workload(fit: Fit, shape: Shape, seed: int, requests: int) -> Workload:
    """A block of the trace is as many tokens as the scale says; equal blocks are equal tokens."""
    recipe = fit.recipe(seed, requests, shape.sessions)
    trace, warm_up = generate_sessions(recipe), recipe.warm_up
    maker = PromptMaker(trace, VOCABULARY, trace.block_tokens // shape.prompt_divisor, seed)
    sent = [
        Sent(
            request,
            maker.prompt(request),
            lab_answer(request.output_tokens, shape.output_divisor),
            round(request.time_ns / shape.time_compression),
        )
        for request in trace.requests
    ]
    return Workload(trace, sent[:warm_up], sent[warm_up:])


TIMEOUT_S = 600.0
LEAD_NS = 200_000_000


@dataclass(frozen=True, slots=True)
class Answered:
    """The gateway's name for the request, or why there is none; `late_ns`: sent so long after it was due."""

    name: str | None
    error: str
    late_ns: int


class Load:
    """Sends to one gateway."""

    def __init__(self, api: str, model: str) -> None:
        self._api = api
        self._model = model

    def replay(self, sent: Sequence[Sent], on_done: Callable[[int], None]) -> list[Answered]:
        """Each at its `due_ns`; returns when all are answered, in order."""
        return asyncio.run(self._replay(sent, on_done))

    def fill(self, sent: Sequence[Sent], at_once: int, answer_tokens: int) -> list[Answered]:
        """So many at once, each with an answer of that length, whatever they ask for."""
        return asyncio.run(self._fill(sent, at_once, answer_tokens))

    async def _replay(self, sent: Sequence[Sent], on_done: Callable[[int], None]) -> list[Answered]:
        begin_ns, done = time.monotonic_ns() + LEAD_NS, 0

        async def one(http: httpx.AsyncClient, what: Sent) -> Answered:
            nonlocal done
            due_ns = begin_ns + what.due_ns
            await asyncio.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            late_ns = max(0, time.monotonic_ns() - due_ns)
            answered = await self._post(http, what.prompt, what.answer_tokens, late_ns)
            done += 1
            on_done(done)
            return answered

        async with self._client() as http:
            return await asyncio.gather(*(one(http, what) for what in sent))

    async def _fill(self, sent: Sequence[Sent], at_once: int, answer_tokens: int) -> list[Answered]:
        turns = asyncio.Semaphore(at_once)

        async def one(http: httpx.AsyncClient, what: Sent) -> Answered:
            async with turns:
                return await self._post(http, what.prompt, answer_tokens, 0)

        async with self._client() as http:
            return await asyncio.gather(*(one(http, what) for what in sent))

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx.AsyncClient(base_url=self._api, timeout=TIMEOUT_S, limits=limits)

    async def _post(self, http: httpx.AsyncClient, prompt: list[int], tokens: int, late_ns: int) -> Answered:
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        try:
            answer = await http.post("/v1/completions", json={**body, "ignore_eos": True})
        except httpx.HTTPError as error:
            return Answered(None, f"{type(error).__name__}: {error}", late_ns)
        if answer.status_code != 200:
            return Answered(None, f"HTTP {answer.status_code}: {answer.text[:200]}", late_ns)
        return Answered(answer.json()["pdd"]["record"]["request_id"], "", late_ns)
