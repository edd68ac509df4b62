"""What a run asks for: a trace's requests that fit the model, in order, each with the time it is due. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.traces.trace import Request, Trace, blocks_of


class LoadError(Exception):
    """The load cannot be sent as it is: what does not fit, and which option makes it fit."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request and when it is due, in ns after the beginning; None: as soon as may be."""

    index: int
    request: Request
    due_ns: int | None


def divided(trace: Trace, by: int) -> Trace:
    """Prompts and blocks `by` times as short, so that hit rates stay; answers as they are. Raises LoadError."""
    if trace.block_tokens % by:
        raise LoadError(
            f"blocks of {trace.block_tokens} tokens cannot be divided by {by}; choose a divisor for --divide: "
            + ", ".join(map(str, divisors(trace.block_tokens)[1:]))
        )
    block_tokens = trace.block_tokens // by

    def smaller(request: Request) -> Request:
        tokens = max(1, request.input_tokens // by)
        return replace(request, input_tokens=tokens, blocks=request.blocks[: blocks_of(tokens, block_tokens)])

    return replace(trace, requests=tuple(map(smaller, trace.requests)), block_tokens=block_tokens)


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def with_output(trace: Trace, tokens: int | None) -> Trace:
    """Every answer of so many tokens (None: as the trace has them), and of at least one."""
    changed = (replace(r, output_tokens=max(1, r.output_tokens if tokens is None else tokens)) for r in trace.requests)
    return replace(trace, requests=tuple(changed))


def kept(trace: Trace, max_input: int | None, num: int | None) -> Trace:
    """The first `num` of those whose prompt has at most `max_input` tokens. Raises LoadError when none is left."""
    requests = [r for r in trace.requests if max_input is None or r.input_tokens <= max_input]
    if not requests:
        shortest = min(r.input_tokens for r in trace.requests)
        raise LoadError(
            f"no prompt of {trace.origin} has at most {max_input} tokens (the shortest has {shortest}); "
            "raise --max-input, or shorten prompts with --divide"
        )
    return replace(trace, requests=tuple(requests[:num]))


def refused(requests: Sequence[Request], context: int) -> list[Request]:
    """Those that a model of so much context does not take: prompt and answer have to fit together."""
    return [r for r in requests if r.input_tokens + r.output_tokens > context]


def check_fits(trace: Trace, context: int, may_divide: bool) -> None:
    """Raises LoadError, with the count and what to do, when the model would refuse any request."""
    bad = refused(trace.requests, context)
    if not bad:
        return
    longest = max(bad, key=lambda r: r.input_tokens + r.output_tokens)
    what = (
        f"{len(bad)} of {len(trace.requests)} requests ({trace.origin}) do not fit the model's context of {context} "
        f"tokens (the longest: {longest.input_tokens} of prompt and {longest.output_tokens} of answer)"
    )
    raise LoadError(f"{what}; {_advice(trace, bad, context, may_divide)}")


def _advice(trace: Trace, bad: Sequence[Request], context: int, may_divide: bool) -> str:
    if not may_divide:
        return "shorten --input-len or --output-len"
    ways = []
    most = min(r.input_tokens for r in bad) - 1
    staying = sum(r.input_tokens <= most for r in trace.requests)
    if staying:
        ways.append(f"--max-input {most} keeps {staying} of them")
    for by in divisors(trace.block_tokens)[1:]:
        if not refused(divided(trace, by).requests, context):
            ways.append(f"--divide {by} makes prompts and blocks {by} times as short, and all fit")
            break
    if any(r.output_tokens >= context // 2 for r in bad):
        ways.append("--output-len N gives every answer N tokens")
    return "; ".join(ways) or "serve a model with a longer context"
