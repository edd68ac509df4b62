"""What `ttft` sends: a seed's trace, made as small as the lab is. The same for every variant. Pure."""

from dataclasses import dataclass

from experiments.traces.prompts import PromptMaker
from experiments.traces.sessions import generate_sessions
from experiments.traces.trace import Request, Trace
from experiments.ttft.fit import Fit, lab_answer
from experiments.ttft.shape import Shape

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
