"""Load of a run: a trace's requests that fit the model, in order, each with the time it is due; and how many of
the trace's are left out or sent otherwise than the trace has them. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from experiments.traces.trace import Request, Trace, blocks_of

# What may become of a trace's requests: a sentence around their number (and that of all)
CHANGES = {
    "too_long": "{} of the trace's {} requests are left out: their prompt is longer than --max-input.",
    "not_fitting": "{} of the trace's {} requests are left out: with their answer they do not fit the model's context.",
    "beyond_num": "{} of the trace's {} requests are left out: --num takes the ones before them.",
    "sessions_cut": "{} conversations lack a turn before their last one, so that later turns hit less.",
    "too_few": "{} requests fewer than --num asks for: the trace has no more that fit the options.",
    "empty_answers": "{} requests have an answer of no token in the trace, and ask for one.",
    "other_answers": "{} requests ask for an answer of another length than the trace's (--output-len).",
    "divided_away": "{} requests have a prompt of less than one token after --divide, and are sent with one.",
}


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


@dataclass(frozen=True)
class Load:
    """Requests of a run. The first `first` are sent before anything is measured. `source`: what the requests were taken
    from, None of a synthetic load; `changed`: how many of its requests were changed or left out, by `CHANGES`.
    """

    trace: Trace
    first: int = 0
    source: Trace | None = None
    changed: Mapping[str, int] = field(default_factory=dict)


def changes_in_words(changed: Mapping[str, int], requests: int) -> list[str]:
    """A sentence for each. `requests`: how many the trace has."""
    return [CHANGES[name].format(count, requests) for name, count in changed.items()]


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


def kept(trace: Trace, max_input: int | None, num: int | None, context: int | None = None) -> Trace:
    """The first `num` of those whose prompt has at most `max_input` tokens and fits so much `context` with its answer
    (None: whether it does or not). Raises LoadError when none is left.
    """
    requests = _up_to(trace, max_input)
    if not requests:
        shortest = min(r.input_tokens for r in trace.requests)
        raise LoadError(
            f"no prompt of {trace.origin} has at most {max_input} tokens (the shortest has {shortest}); "
            "raise --max-input, or shorten prompts with --divide"
        )
    fitting = requests if context is None else fitting_of(requests, context)
    if not fitting:
        raise LoadError(
            f"no request of {trace.origin} fits the model's context of {context} tokens with its answer; shorten "
            "prompts with --divide, answers with --output-len"
        )
    return replace(trace, requests=tuple(fitting[:num]))


def _up_to(trace: Trace, max_input: int | None) -> list[Request]:
    return [r for r in trace.requests if max_input is None or r.input_tokens <= max_input]


def left_out(
    trace: Trace, taken: Sequence[Request], max_input: int | None, num: int | None, context: int | None = None
) -> dict[str, int]:
    """Numbers of requests that `kept` did not take, by `CHANGES`."""
    requests = _up_to(trace, max_input)
    fitting = requests if context is None else fitting_of(requests, context)
    counts = {
        "too_long": len(trace.requests) - len(requests),
        "not_fitting": len(requests) - len(fitting),
        "beyond_num": len(fitting) - len(taken),
        "sessions_cut": _sessions_cut(trace, taken),
        "too_few": 0 if num is None else num - len(taken),
    }
    return {name: count for name, count in counts.items() if count}


def _sessions_cut(trace: Trace, taken: Sequence[Request]) -> int:
    """Conversations of which a turn is left out before one that is taken."""
    staying = set(map(id, taken))
    lacking: set[int] = set()
    cut: set[int] = set()
    for request in trace.requests:
        if request.session is not None:
            if id(request) not in staying:
                lacking.add(request.session)
            elif request.session in lacking:
                cut.add(request.session)
    return len(cut)


def altered(requests: Sequence[Request], divided_by: int, output_len: int | None) -> dict[str, int]:
    """Numbers of requests, as the trace has them, that are sent otherwise than divided, by `CHANGES`."""
    counts = {
        "empty_answers": sum(one.output_tokens == 0 for one in requests) if output_len is None else 0,
        "other_answers": 0 if output_len is None else sum(one.output_tokens != output_len for one in requests),
        "divided_away": sum(one.input_tokens < divided_by for one in requests),
    }
    return {name: count for name, count in counts.items() if count}


def fitting_of(requests: Sequence[Request], context: int) -> list[Request]:
    """Those that a model of so much context takes: prompt and answer have to fit together."""
    return [r for r in requests if r.input_tokens + r.output_tokens <= context]


def refused(requests: Sequence[Request], context: int) -> list[Request]:
    """Those that it does not take."""
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
    ways = [f"{option} keeps the {count} that fit" for option, count in _keeping(source, context)]
    for by in divisors(source.block_tokens)[1:]:
        smaller = divided(source, by)
        if not refused(smaller.requests, context):
            return [*ways, f"--divide {by * divided_by} makes prompts and blocks shorter by that, and all fit"]
    if source.block_tokens > 1:
        divide = f"--divide {source.block_tokens * divided_by}"
        ways += [f"{divide} {option} keeps {count}" for option, count in _keeping(smaller, context)]
    if not ways or any(r.output_tokens > context // 4 for r in source.requests):
        ways.append("--output-len N gives every answer N tokens, and leaves more for the prompts")
    return ways


def _keeping(trace: Trace, context: int) -> list[tuple[str, int]]:
    """The option that keeps all that fit, and how many these are: --max-input where it can, nothing where none fits."""
    fitting = fitting_of(trace.requests, context)
    if not fitting:
        return []
    longest = max(r.input_tokens for r in fitting)
    alone = len(_up_to(trace, longest)) == len(fitting)
    return [(f"--max-input {longest}" if alone else "--only-fitting", len(fitting))]
