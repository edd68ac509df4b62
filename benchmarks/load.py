"""Requests with known answers, and a streaming client that takes nothing on trust: for the long runs of serving.

The control is one engine alone, one sequence at a time, the same weights. An answer is right when it has the control's
tokens, at consecutive positions, each exactly once.

A question has one right answer only where the model prefers one token by more than fp32 rounding: sums in another
order (a batch, an extend) move logits by some 1e-5, and in ten thousand tokens of `tiny` there is a pair of candidates
closer than that (seen: 5e-7). So an answer is asked for up to the first place where the control's two best candidates
are closer than CLEAR; how many answers that shortens is counted. What is compared is compared exactly.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from workers.engine import BlockPool, Sampling
from workers.engine import Sequence as EngineSequence
from workers.engine.engine import Chunk, Engine
from workers.models import LoadedModel

TIMEOUT_S = 600.0
CLEAR = 1e-4  # logits


@dataclass(frozen=True)
class Case:
    """A prompt and its only right answer. `leave_after`: the client hangs up after so many tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    expected: tuple[int, ...]
    leave_after: int | None = None
    shortened: bool = False


@dataclass
class Outcome:
    """Outcome of a case. `wrong`: one sentence; "" when everything was right."""

    wrong: str = ""
    ids: list[int] = field(default_factory=list)
    instances: list[str] = field(default_factory=list)
    record: dict[str, Any] | None = None


@dataclass
class Tally:
    """Counts over many cases."""

    asked: int = 0
    left: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    instances: Counter[str] = field(default_factory=Counter)
    pipelines: Counter[str] = field(default_factory=Counter)
    handed_over: int = 0
    kv_repairs: int = 0
    replays: int = 0
    kv_bytes: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def add(self, case: Case, outcome: Outcome) -> None:
        self.asked += 1
        self.left += case.leave_after is not None
        self.tokens += len(outcome.ids)
        self.instances.update(outcome.instances)
        if outcome.wrong:
            self.wrong.append(outcome.wrong)
        if outcome.record is not None:
            record = outcome.record
            self.pipelines[record["pdd_pipeline"]] += 1
            self.handed_over += record["pdd_rld_tokens"] > 0 and record["pdd_md_tokens"] > 0
            if record["ttft"] is not None:
                self.ttft_s.append(record["ttft"])


def prompt_tokens(chance: random.Random, length: int, vocab: int) -> tuple[int, ...]:
    low, high = (32, 127) if vocab < 1000 else (100, 4000)
    return tuple(chance.randrange(low, high) for _ in range(length))


def make_cases(
    loaded: LoadedModel,
    shapes: Iterable[tuple[int, int]],
    seed: int,
    *,
    leaving: float = 0.0,
    grow_from: float = 0.0,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Case]:
    """A case for each shape (prompt tokens, answer tokens). `leaving`: the share of clients that hang up.

    `grow_from`: the share of prompts that continue an earlier case's conversation, so that caches have something.
    """
    chance = random.Random(seed)
    cases: list[Case] = []
    limit = loaded.config.context_length
    for number, (length, tokens) in enumerate(shapes):
        prompt = prompt_tokens(chance, length, loaded.config.vocab)
        if cases and chance.random() < grow_from:
            earlier = chance.choice(cases[-20:])
            prompt = (*earlier.prompt, *earlier.expected, *prompt[: max(1, length // 8)])
            if len(prompt) + tokens > min(limit, 1200):
                prompt = prompt[-length:]
        case = clear_case(loaded, prompt, tokens)
        leaves = chance.randrange(case.max_tokens) if chance.random() < leaving else None
        cases.append(replace(case, leave_after=leaves))
        progress(number + 1)
    return cases


def clear_case(loaded: LoadedModel, prompt: tuple[int, ...], tokens: int) -> Case:
    """A prompt, one token longer if its answer would begin with a tie, and at most so many tokens of its answer."""
    expected = control(loaded, prompt, tokens)
    if not expected:
        expected = control(loaded, prompt := (*prompt, 33), tokens)
    assert expected, "the first token of two prompts in a row is a tie"
    return Case(prompt, len(expected), expected, shortened=len(expected) < tokens)


def control(loaded: LoadedModel, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The greedy answer, up to the first token that is not clearly the best."""
    size = 16
    blocks = -(-(len(prompt) + tokens) // size)
    engine = Engine(loaded, BlockPool(loaded.config, blocks, size, loaded.spec.dtype))
    sampling = Sampling(max_tokens=tokens, ignore_eos=True, logprobs=2)
    sequence = EngineSequence("control", list(prompt), len(prompt), sampling)
    engine.admit(sequence)
    answer: list[int] = []
    while sequence.finish_reason is None:
        (generated,) = engine.step([Chunk(sequence, sequence.pending)])
        assert generated is not None
        assert generated.top_logprobs is not None
        (_, best), (_, second) = generated.top_logprobs
        if best - second < CLEAR:
            break
        answer.append(generated.token_id)
    return tuple(answer)


async def ask(http: httpx.AsyncClient, case: Case) -> Outcome:
    """One streamed greedy answer, checked token by token as it comes."""
    outcome = Outcome()
    body = {"prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                outcome.wrong = f"status {response.status_code}: {(await response.aread()).decode()[:300]}"
                return outcome
            ended = False
            async for line in response.aiter_lines():
                if not line:
                    continue
                if ended:
                    outcome.wrong = f"an event after the end: {line[:200]}"
                elif line == "data: [DONE]":
                    ended = True
                else:
                    _take(case, outcome, json.loads(line.removeprefix("data: ")))
                if outcome.wrong:
                    return outcome
                if case.leave_after is not None and len(outcome.ids) > case.leave_after:
                    return outcome
            if not ended:
                outcome.wrong = "the stream ended without [DONE]"
    except httpx.HTTPError as error:
        outcome.wrong = f"{type(error).__name__} after {len(outcome.ids)} tokens: {error}"
        return outcome
    if not outcome.wrong and tuple(outcome.ids) != case.expected:
        outcome.wrong = f"{len(outcome.ids)} tokens of {len(case.expected)}"
    return outcome


def _take(case: Case, outcome: Outcome, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        outcome.wrong = f"after {len(outcome.ids)} tokens: {chunk['error']['message']}"
        return
    pdd = chunk["pdd"]
    position, ids = pdd["position"], pdd["token_ids"]
    have = len(outcome.ids)
    if position != len(case.prompt) + have:
        outcome.wrong = f"position {position} follows {len(case.prompt) + have - 1}: a gap or a duplicate"
    elif tuple(ids) != case.expected[have : have + len(ids)]:
        outcome.wrong = f"token {have} is {ids}, the control's is {case.expected[have : have + len(ids)]}"
    outcome.ids += ids
    outcome.instances += [pdd["instance"]] * len(ids)
    outcome.record = pdd.get("record", outcome.record)


async def run_cases(
    base_url: str,
    cases: Sequence[Case],
    at_once: int,
    done: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """All cases, so many at a time. `done` is called after each."""
    tally = Tally()
    waiting = iter(cases)
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)

    async def one_after_another(http: httpx.AsyncClient) -> None:
        for case in waiting:
            tally.add(case, await ask(http, case))
            done(tally)

    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, limits=limits) as http:
        await asyncio.gather(*(one_after_another(http) for _ in range(at_once)))
    return tally


@dataclass(frozen=True)
class Held:
    """Blocks and requests that workers hold, by the gateway's /metrics."""

    used_blocks: dict[str, int]
    cached_blocks: dict[str, int]
    requests: int

    @property
    def nothing(self) -> bool:
        """No request, and no block but those of the caches."""
        return self.requests == 0 and bool(self.used_blocks) and not any(self.used_blocks.values())


async def held(base_url: str) -> Held:
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    blocks: dict[str, dict[str, int]] = {"used": {}, "cached": {}}
    requests = -1
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name == "pddbed_requests_running":
            requests = int(float(value))
        for state, found in blocks.items():
            if name.startswith("pddbed_kv_blocks{") and f'state="{state}"' in name:
                found[name.split('"')[1]] = int(float(value))
    return Held(blocks["used"], blocks["cached"], requests)


async def wait_until_nothing_is_held(base_url: str, within_s: float) -> Held:
    """The first look that finds nothing, or the last one."""
    end = asyncio.get_running_loop().time() + within_s
    while not (now := await held(base_url)).nothing and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.2)
    return now


def add_settled(tally: Tally, records: Iterable[dict[str, Any]]) -> None:
    """Adds what is known only when the workers have let go, from requests.jsonl."""
    for record in records:
        tally.kv_repairs += record["pdd_kv_repairs"]
        tally.replays += record.get("pdd_replays") or 0
        tally.kv_bytes += record["pdd_delta_bytes"] or 0
