"""From options to a result: reads or makes the load, finds the server, runs, keeps. The command is around it."""

import asyncio
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from experiments.bench import arrivals, kept
from experiments.bench.bodies import Bodies
from experiments.bench.client import Api, Served, asked
from experiments.bench.experiment import notes, reasons_of, summary_of
from experiments.bench.load import check_fits, divided, planned, with_output
from experiments.bench.load import kept as kept_of
from experiments.bench.progress import BenchProgress
from experiments.bench.run import Plan, Result, claim_resources, run
from experiments.bench.synthetic import Synthetic
from experiments.framework import machine
from experiments.framework.experiment import PartResult
from experiments.framework.lab import LinkWatch
from experiments.framework.records import LabRecords
from experiments.traces.read import read_trace
from experiments.traces.stats import hits
from experiments.traces.trace import Trace
from testbed.lab.control import ask_lab
from testbed.lab.record import LabError, Record, find_record

VERIFY_PATIENCE_S = 900.0


@dataclass(frozen=True)
class Asked:
    """The options. None: not given. `source`: a trace's file, None for a synthetic load."""

    source: Path | None = None
    model: str | None = None
    form: str | None = None
    block_tokens: int | None = None
    speedup: float | None = None
    max_input: int | None = None
    divide: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    distribution: str | None = None
    sessions: int | None = None
    prefix_share: float | None = None
    rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    in_turn: bool = False
    num: int | None = None
    seed: int = 1
    ignore_eos: bool = True
    token_ids: range = range(32, 127)
    warm_up: int = 1
    limits: Mapping[str, float] | None = None
    percentiles: tuple[float, ...] = (99.0,)

    def trace(self) -> tuple[Trace, int, Trace | None]:
        """What is asked, how many of it come first and are not measured, and what it was taken from.

        The last is None of a synthetic load. Raises TraceError, LoadError.
        """
        if self.source is None:
            recipe = Synthetic(
                num=self.num or 100,
                input_tokens=self.input_len or 512,
                output_tokens=self.output_len or 64,
                prefix_share=self.prefix_share or 0.0,
                distribution=self.distribution,
                sessions=self.sessions or 16,
                block_tokens=self.block_tokens or 16,
                seed=self.seed,
            )
            return recipe.trace(), recipe.warm_up, None
        trace = read_trace(self.source, self.form or "auto", self.block_tokens)
        if self.divide is not None:
            trace = divided(trace, self.divide)
        source = with_output(trace, self.output_len)
        return kept_of(source, self.max_input, self.num), 0, source

    def due_ns(self, trace: Trace, first: int) -> list[int] | list[None]:
        """When each request behind the first ones is due."""
        requests = trace.requests[first:]
        if self.rate is None and self.source is not None:
            return arrivals.of_trace(requests, self.speedup or 1.0)
        if self.rate is None or math.isinf(self.rate):
            return [None] * len(requests)
        return arrivals.at_rate(len(requests), self.rate, self.burstiness or 1.0, self.seed)

    @property
    def request_rate(self) -> float | str:
        """As the summary has it."""
        if self.rate is not None and not math.isinf(self.rate):
            return self.rate
        return "trace" if self.rate is None and self.source is not None else "inf"

    def words(self, trace: Trace) -> str:
        """For a report's title."""
        pace = f"{self.request_rate:g}/s" if isinstance(self.request_rate, float) else ""
        cap = f"{self.concurrency} at once" if self.concurrency else ""
        return ", ".join(filter(None, (trace.origin, pace, cap)))


@dataclass(frozen=True)
class Done:
    """`reasons`: why the run is not faithful. `why`: what stopped it, if anything did."""

    summary: dict[str, Any]
    reasons: list[str]
    notes: list[str]
    why: str
    url: str


class Session:
    """One server and what is asked of it. `record`: of the lab that the server belongs to."""

    def __init__(self, url: str, options: Asked, record: Record | None = None, key: str | None = None) -> None:
        self.url = url
        self._options = options
        self._record = record
        self._key = key

    @classmethod
    def of_lab(cls, name: str | None, options: Asked) -> Self:
        """A running lab's gateway. Raises LabError."""
        record = find_record(name)
        url: str | None = record.state().get("api")
        if url is None:
            raise LabError(f'lab "{record.name}" has no API: it runs without workers, or without a gateway')
        return cls(url, options, record)

    @classmethod
    def of_server(cls, url: str, options: Asked) -> Self:
        """Any server; OPENAI_API_KEY is sent where it is set, as clients of OpenAI's do."""
        return cls(url, options, key=os.environ.get("OPENAI_API_KEY"))

    def run(self, out: Path | None, *, verify: bool, command: str, quiet: bool) -> Done:
        """Raises TraceError, LoadError, ApiError, ExperimentError, LabError: before anything is sent, in most cases."""
        if out is not None:
            kept.refuse_used(out)
        claim_resources()
        with BenchProgress(quiet) as progress:
            synthetic = self._options.source is None
            progress.step("making the load" if synthetic else "reading the trace", brief=synthetic)
            trace, first, source = self._options.trace()
            expected_hit = _expected_hit(trace, first)
            labs = [self._lab(verify, progress)] if out is not None and self._record is not None else []
            topology = self._topology() if labs else ""
            started = time.time()
            watch = LinkWatch(self._record, out / "links.jsonl", "bench") if labs and out and self._record else None
            served, result = asyncio.run(self._send(trace, first, source, progress, watch))
            parameters = self._parameters(trace, first, served)
            facts = {
                "duration_s": result.duration_s,
                "expected_hit": expected_hit,
                "under_way": result.under_way,
                "not_sent": result.not_sent,
                "why": result.why,
                "unrecorded": result.unrecorded,
            }
            part = PartResult(result.rows, facts)
            reasons = reasons_of(parameters, part)
            part = PartResult(result.rows, facts, reasons)
            summary = summary_of(parameters, part)
            if out is not None:
                if labs and verify:
                    progress.step("verifying the links")
                    with suppress(LabError):  # a lab that went away meanwhile: the report says that nobody verified it
                        labs[0]["verified_after"] = self._verified()
                progress.step("writing the report")
                kept.keep(out, self._options.words(trace), command, parameters, part, labs, topology, started)
                reasons = kept.reasons(out)
        return Done(summary, reasons, notes(summary), result.why, self.url)

    async def _send(
        self, trace: Trace, first: int, source: Trace | None, progress: BenchProgress, watch: LinkWatch | None
    ) -> tuple[Served, Result]:
        options = self._options
        async with Api(self.url, self._key, direct=self._record is not None) as api:
            served = await api.served(options.model)
            if served.context is not None:
                check_fits(trace, served.context, source, options.divide or 1)
            fields = asked(served.model, options.ignore_eos)
            bodies = Bodies(trace, options.token_ids, options.seed, fields)
            due = options.due_ns(trace, first)
            load = planned(trace.requests[first:], due, options.in_turn)
            progress.expect(len(load), (due[-1] or 0) / 1e9)
            records = None if self._record is None else LabRecords(self._record.results / "requests.jsonl")
            plan = Plan(load, trace.requests[:first], bodies, options.concurrency, options.warm_up)
            if watch is not None:
                watch.start()
            try:
                return served, await run(api, plan, progress, records)
            finally:
                if watch is not None:
                    watch.stop()

    def _parameters(self, trace: Trace, first: int, served: Served) -> dict[str, Any]:
        options = self._options
        return {
            "server": "lab" if self._record is not None else self.url,
            "model": served.model,
            "context": served.context,
            "synthetic": options.source is None,
            "trace": trace.origin,
            "trace_sha256": trace.sha256,
            "block_tokens": trace.block_tokens,
            "num_prompts": len(trace.requests) - first,
            "sent_first": first,
            "request_rate": options.request_rate,
            "burstiness": options.burstiness or 1.0,
            "speedup": options.speedup or 1.0,
            "max_concurrency": options.concurrency,
            "in_turn": options.in_turn,
            "divide": options.divide or 1,
            "max_input": options.max_input,
            "seed": options.seed,
            "ignore_eos": options.ignore_eos,
            "token_ids": [options.token_ids.start, options.token_ids.stop - 1],
            "goodput": dict(options.limits or {}),
            "percentiles": list(options.percentiles),
        }

    # -- the lab -------------------------------------------------------------------------------------------------

    def _lab(self, verify: bool, progress: BenchProgress) -> dict[str, Any]:
        """As run.json has it."""
        assert self._record is not None
        state = self._record.state()
        if verify:
            progress.step("verifying the links")
        return {
            "variant": "",
            "driver": state["driver"],
            "applied": state["applied"],
            "verified_before": self._verified() if verify else None,
            "verified_after": None,
            "versions": machine.versions(),
            "machine": machine.machine(),
            "parts": ["bench"],
        }

    def _verified(self) -> dict[str, Any]:
        assert self._record is not None
        return ask_lab(self._record, {"op": "verify", "quick": True}, VERIFY_PATIENCE_S)[0]

    def _topology(self) -> str:
        """The lab's file as it is now."""
        assert self._record is not None
        file = self._record.state().get("file")
        try:
            return Path(file).read_text() if file else ""
        except OSError as error:
            return f"# {file} could not be read any more: {error.strerror}\n"


def _expected_hit(trace: Trace, first: int) -> float:
    """The hit rate, by tokens, of a cache that begins empty and forgets nothing."""
    found = hits(trace)[first:]
    return sum(hit.cached_tokens for hit in found) / sum(hit.request.input_tokens for hit in found)
