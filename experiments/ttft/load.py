"""An open-loop client: each request at its moment, whatever became of those before. Knows HTTP, and nothing of labs.

Answers are not streamed: the gateway notes when each token was there, and a record says so more cheaply than events
would on a machine whose CPU the lab needs.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from experiments.ttft.workload import Sent

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
