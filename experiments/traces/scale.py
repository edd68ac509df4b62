"""A trace as a scaled lab gets it, and scales that spoil it; `testbed.model.scale` has the arithmetic. Pure."""

from dataclasses import replace

from experiments.traces.stats import HIGH, hits
from experiments.traces.trace import Request, Trace, blocks_of
from testbed.model.scale import Deployment, Groups, Lab, Scale, ScaleError

__all__ = ["Deployment", "Groups", "Lab", "Scale", "ScaleError", "check_trace", "scaled_trace", "share_moved"]

MOST_SHARE_MOVED = 0.01  # of requests that change sides of the 95 % threshold


def scaled_trace(trace: Trace, lab: Lab) -> Trace:
    """The requests as the lab gets them: prompts, blocks, outputs and arrival times divided.

    Blocks keep their ids when they are divided as prompts are; otherwise each of the lab's larger blocks takes the id
    of the last of the trace's that it covers, which names everything before it.
    """
    requests = tuple(_scaled(request, trace.block_tokens, lab) for request in trace.requests)
    return replace(trace, requests=requests, block_tokens=lab.block_tokens)


def _scaled(request: Request, block_tokens: int, lab: Lab) -> Request:
    tokens = lab.prompt_tokens(request.input_tokens)
    ids = []
    for index in range(blocks_of(tokens, lab.block_tokens)):
        last_token = min((index + 1) * lab.block_tokens, tokens) * lab.prompt_scale
        covered = min(blocks_of(last_token, block_tokens), len(request.blocks))
        if covered:
            ids.append(request.blocks[covered - 1])
    return replace(
        request,
        time_ns=lab.arrival_ns(request.time_ns),
        input_tokens=tokens,
        output_tokens=lab.output_tokens(request.output_tokens),
        blocks=tuple(ids),
    )


def share_moved(trace: Trace, lab: Lab) -> float:
    """By how much the scale moves the share of requests above 95 % hit (as a share of requests, signed)."""
    return _share_above(scaled_trace(trace, lab)) - _share_above(trace)


def check_trace(trace: Trace, lab: Lab) -> None:
    """Raises ScaleError when the scale moves the trace's share of high hits by more than one point."""
    moved = share_moved(trace, lab)
    if abs(moved) > MOST_SHARE_MOVED:
        raise ScaleError(
            f"a prompt_scale of {lab.prompt_scale} with blocks of {lab.block_tokens} tokens moves the share of "
            f"requests above 95 % hit by {100 * moved:+.1f} points; divide the blocks by as much as the prompts, or "
            "scale less"
        )


def _share_above(trace: Trace) -> float:
    return sum(hit.rate > HIGH for hit in hits(trace)) / len(trace.requests)
