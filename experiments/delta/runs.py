"""Runs of `delta`: requests whose prompts MD's cache holds 90 % of, and a real agentic trace, one after the other.

`full` is the control without a cache to speak of: prompts of the same lengths in which nothing is ever repeated. Every
packet of the WAN is captured meanwhile.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.framework.base import ExperimentError, Options, Part, PartResult, Progress
from experiments.framework.checks import check_bytes
from experiments.framework.lab import ExperimentLab
from experiments.framework.requests import Client
from experiments.traces.generate import Recipe, generate
from experiments.traces.prompts import PromptMaker
from experiments.traces.trace import Request, Trace

SCALE = 64  # tokens of the deployment for one here; also the traces' block size
CONTEXT = 4096  # of `tiny`
ANSWER_TOKENS = 4
VOCABULARY = range(32, 127)
TRACE_NAME = "agentic-coding-a.jsonl.gz"
TRACE_REQUESTS = 96
SESSION_TURNS = range(12, 61)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids; the first `warm_up` fill the caches and are not measured."""

    prompts: list[list[int]]
    warm_up: int
    trace_sha256: str


def trace_file() -> Path | None:
    """The real trace, where it is present: in $PDDBED_TRACES, or beside the project in shared/traces."""
    root = Path(__file__).resolve().parents[2]
    folders = [Path(os.environ["PDDBED_TRACES"])] if "PDDBED_TRACES" in os.environ else []
    found = (folder / TRACE_NAME for folder in [*folders, root.parent / "shared" / "traces"])
    return next((file for file in found if file.exists()), None)


def excerpt(trace: Trace) -> Trace:
    """Whole sessions of a moderate length, all of whose prompts fit the model's context, up to TRACE_REQUESTS."""
    sessions: dict[int | None, list[Request]] = {}
    for request in trace.requests:
        sessions.setdefault(request.session, []).append(request)
    most = (CONTEXT - ANSWER_TOKENS) * SCALE
    taken: list[Request] = []
    for name in sorted(sessions, key=lambda session: -1 if session is None else session):
        requests = sessions[name]
        if len(requests) in SESSION_TURNS and max(request.input_tokens for request in requests) < most:
            taken += requests
        if len(taken) >= TRACE_REQUESTS:
            break
    origin = f"{trace.origin}: sessions {', '.join(str(s) for s in dict.fromkeys(r.session for r in taken))}"
    note = (
        f"Of the trace's {len(trace.requests)} requests {len(taken)} are taken: whole sessions that fit the context, "
        f"of {SESSION_TURNS.start} to {SESSION_TURNS.stop - 1} turns."
    )
    return Trace(tuple(taken), trace.block_tokens, trace.format, origin, (*trace.notes, note))


def recipe(options: Options, seed: int) -> Recipe:
    if options.quick:
        return Recipe("ninety", 16, 4, 256 * SCALE, ANSWER_TOKENS, SCALE, 1.0, seed)
    return Recipe("ninety", 48, 8, 1024 * SCALE, ANSWER_TOKENS, SCALE, 1.0, seed)


def parts(options: Options, trace: Trace | None) -> list[Part]:
    made = []
    for seed in range(1, options.seeds + 1):
        made_of = recipe(options, seed)
        slow_s = made_of.prompt_tokens / SCALE * 0.0012 + 0.4
        for row in ("full", "delta"):
            count = made_of.requests + (made_of.warm_up if row == "delta" else 0)
            seconds = 8 + count * (slow_s if row == "full" else 0.6)
            detail = {"row": row, "recipe": {name: getattr(made_of, name) for name in Recipe.__slots__}}
            made.append(Part(f"{row}-seed{seed}", seed, seconds, detail))
    if trace is not None and not options.quick:
        for row in ("trace, full", "trace, delta"):
            seconds = 8 + len(trace.requests) * (2.0 if row.endswith("full") else 0.8)
            made.append(Part(row.replace(", ", "-"), 1, seconds, {"row": row, "trace": trace.origin}))
    return made


def workload(part: Part, trace: Trace | None) -> Workload:
    """The part's prompts."""
    detail: Any = part.detail
    warm_up = 0
    if "recipe" in detail:
        made_of = Recipe(**detail["recipe"])
        source = generate(made_of)
        warm_up = made_of.warm_up
    else:
        assert trace is not None, "a part that needs the trace is only made where it is"
        source = trace
    maker = PromptMaker(source, VOCABULARY, source.block_tokens // SCALE, part.seed)
    if not str(detail["row"]).endswith("full"):
        return Workload([maker.prompt(request) for request in source.requests], warm_up, source.sha256)
    fresh = random.Random(f"full {part.name}")
    measured = source.requests[warm_up:]
    return Workload(
        [fresh.choices(list(VOCABULARY), k=maker.length(request)) for request in measured], 0, source.sha256
    )


class DeltaSession:
    """One request at a time: the next turn of a conversation comes after the answer to the last one."""

    def __init__(self, lab: ExperimentLab, client: Client, trace: Trace | None) -> None:
        self._lab = lab
        self._client = client
        self._trace = trace
        # what main decode has cached is known in the other datacenter half a round trip later
        self._pause_s = 2 * max(wan.rtt_ns for wan in lab.plan.wans) / 1e9

    def run(self, part: Part, directory: Path, progress: Progress) -> PartResult:
        capture = directory / "wan0.pcapng"
        work = workload(part, self._trace)
        for prompt in work.prompts[: work.warm_up]:
            self._send(prompt)
        measured = work.prompts[work.warm_up :]
        records = []
        with self._lab.capturing("wan0", capture, headers_only=False):
            for index, prompt in enumerate(measured):
                record = self._send(prompt)
                records.append({**record, "part": part.name, "row": part.detail["row"], "seed": part.seed})
                progress((index + 1) / len(measured))
        check = check_bytes(capture, self._lab.record.results)
        return PartResult(records, {**check.facts(), "trace_sha256": work.trace_sha256}, check.reasons)

    def _send(self, prompt: list[int]) -> dict[str, object]:
        record = self._client.complete(prompt, ANSWER_TOKENS)
        if not record["success"]:
            raise ExperimentError(f"request {record['request_id']} failed: {record['error']}")
        time.sleep(self._pause_s)
        return record


@contextmanager
def open_session(lab: ExperimentLab, trace: Trace | None) -> Iterator[DeltaSession]:
    client = Client(lab.state["api"], str(lab.plan.model["name"]), lab.record.results / "requests.jsonl")
    try:
        yield DeltaSession(lab, client, trace)
    finally:
        client.close()
