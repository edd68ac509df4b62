"""Generated sessions look like the real ones of a coding agent, and are the same everywhere."""

import pytest

from experiments.traces.generate import SessionRecipe, generate_sessions
from experiments.traces.stats import hits
from experiments.traces.trace import blocks_of

RECIPE = SessionRecipe()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sessions_hit_nearly_all_or_nothing(seed: int) -> None:
    found = hits(generate_sessions(SessionRecipe(seed=seed)))[RECIPE.warm_up :]
    assert 0.70 <= sum(hit.rate > 0.95 for hit in found) / len(found) <= 0.80
    assert 0.15 <= sum(hit.rate < 0.05 for hit in found) / len(found) <= 0.20
    assert 0.78 <= sum(hit.rate for hit in found) / len(found) <= 0.81
    prompts = sorted(hit.request.input_tokens for hit in found)
    assert 75_000 <= prompts[len(prompts) // 2] <= 100_000
    assert prompts[-1] <= RECIPE.context_tokens


def test_a_session_does_not_overtake_itself() -> None:
    last: dict[int | None, int] = {}
    for index, request in enumerate(generate_sessions(RECIPE).requests[RECIPE.warm_up :]):
        assert index - last.get(request.session, -1000) >= RECIPE.sessions // 2
        last[request.session] = index


def test_the_trace_of_a_seed_never_changes() -> None:
    trace = generate_sessions(SessionRecipe(requests=100, sessions=8))
    assert trace.sha256[:16] == "1bba9921eb12d12e"
    assert all(len(request.blocks) == blocks_of(request.input_tokens, 256) for request in trace.requests)


def test_a_shorter_trace_is_the_beginning_of_a_longer_one() -> None:
    """So policies that get fewer requests get the same ones."""
    short, long = (generate_sessions(SessionRecipe(requests=count, sessions=8)) for count in (50, 90))
    assert long.requests[: 50 + 8] == short.requests
