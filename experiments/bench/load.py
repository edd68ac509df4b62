"""What a run asks for: a trace's requests that fit the model, in order, each with the time it is due. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.traces.trace import Request, Trace, blocks_of


class LoadError(Exception):
    """The load cannot be sent as it is: what does not fit, and which option makes it fit."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request and when it is due, in ns after the beginning; None: as soon as may be.

    `after`: the index of the request whose answer it waits for, whenever it is due.
    """

    index: int
    request: Request
    due_ns: int | None
    after: int | None = None


def planned(requests: Sequence[Request], due_ns: Sequence[int | None], in_turn: bool) -> list[Planned]:
    """`in_turn`: each turn of a conversation waits for the answer to the one before. Raises LoadError without any."""
    if in_turn and all(request.session is None for request in requests):
        raise LoadError("--in-turn is for conversations, and this load has none; leave it out")
    last: dict[int, int] = {}
    made = []
    for index, (request, at) in enumerate(zip(requests, due_ns, strict=True)):
        after = None
        if in_turn and request.session is not None:
            after, last[request.session] = last.get(request.session), index
        made.append(Planned(index, request, at, after))
    return made


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


def check_fits(asked: Trace, context: int, source: Trace | None, divided_by: int = 1) -> None:
    """Raises LoadError, with the count and what to do, when the model would refuse any request that is asked for.

    `source`: what the requests were taken from (None: a synthetic load), its prompts divided by `divided_by` already.
    """
    bad = refused(asked.requests, context)
    if not bad:
        return
    longest = max(bad, key=lambda r: r.input_tokens + r.output_tokens)
    what = (
        f"{len(bad)} of {len(asked.requests)} requests ({asked.origin}) do not fit the model's context of {context} "
        f"tokens (the longest: {longest.input_tokens} of prompt and {longest.output_tokens} of answer)"
    )
    if source is None:
        raise LoadError(f"{what}; shorten --input-len or --output-len")
    raise LoadError(f"{what}; {'; or '.join(_ways(source, context, divided_by)) or 'serve one with a longer context'}")


def _ways(source: Trace, context: int, divided_by: int) -> list[str]:
    """Options with which everything that is taken from the trace fits, and how much of it that is."""
    ways = []
    if kept_with := _max_input(source, context):
        ways.append("--max-input {} keeps the {} that fit".format(*kept_with))
    for by in divisors(source.block_tokens)[1:]:
        smaller = divided(source, by)
        if not refused(smaller.requests, context):
            return [*ways, f"--divide {by * divided_by} makes prompts and blocks shorter by that, and all fit"]
    if source.block_tokens > 1 and (kept_with := _max_input(smaller, context)):
        ways.append("--divide {} --max-input {} keeps {}".format(source.block_tokens * divided_by, *kept_with))
    if not ways or any(r.output_tokens > context // 4 for r in source.requests):
        ways.append("--output-len N gives every answer N tokens, and leaves more for the prompts")
    return ways


def _max_input(trace: Trace, context: int) -> tuple[int, int] | None:
    """The longest prompt up to which every request fits, and how many there are."""
    bad = refused(trace.requests, context)
    most = min(r.input_tokens for r in bad) - 1 if bad else max(r.input_tokens for r in trace.requests)
    staying = [r.input_tokens for r in trace.requests if r.input_tokens <= most]
    return (max(staying), len(staying)) if staying else None
