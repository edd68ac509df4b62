"""`prfaas`: who prefills is decided by what the decode worker lacks of the prompt, not by its length."""

import pytest

from workers.policy import BUSY_TOKENS, NoRoute, WorkerView, route_around, route_for

ALL = frozenset({"p0", "p1", "rld0", "md0", "md1"})


def views(**matched: int) -> list[WorkerView]:
    roles = {"p0": "prefill", "p1": "prefill", "rld0": "relay-decode", "md0": "main-decode", "md1": "main-decode"}
    return [WorkerView(name, role, 0, ALL, matched.get(name, 0)) for name, role in roles.items()]


@pytest.mark.parametrize(
    ("tokens", "cached", "pipeline"),
    [(512, 0, "md"), (513, 0, "p-md"), (5000, 4488, "md"), (5000, 4487, "p-md"), (1, 0, "md")],
)
def test_more_uncached_tokens_than_the_threshold_go_to_prefill(tokens: int, cached: int, pipeline: str) -> None:
    route = route_for("prfaas", 0.95, tokens, views(md1=cached), 512)
    assert route.pipeline == pipeline
    assert route.hit_rate == cached / tokens
    assert f"{tokens - cached} uncached tokens are " in route.reason
    if pipeline == "md":
        assert route.workers == (("md1" if cached else "md0"),)
    else:
        assert (route.prefill, route.relay, route.main) == ("p0", None, "md1" if cached else "md0")


def test_a_threshold_of_nothing_is_the_naive_baseline_and_a_large_one_keeps_all_at_home() -> None:
    assert route_for("prfaas", 0.95, 100, views(), 0).pipeline == "p-md"
    assert route_for("prfaas", 0.95, 10**6, views(), 10**9).pipeline == "md"


def test_a_cache_counts_only_where_the_request_would_go() -> None:
    busy = [
        WorkerView(v.name, v.role, 4 if v.name == "md1" else 0, v.connected, v.matched) for v in views(md1=BUSY_TOKENS)
    ]
    route = route_for("prfaas", 0.95, 600, busy, 512)
    assert (route.pipeline, route.main) == ("p-md", "md0"), "md1 has 256 tokens of it, and too much to do"


def test_without_prefill_a_long_prompt_stays_and_without_main_decode_another_serves_alone() -> None:
    no_prefill = [view for view in views() if view.role != "prefill"]
    with pytest.raises(NoRoute):
        route_for("prfaas", 0.95, 5000, no_prefill, 512)
    assert route_around("prfaas", 0.95, 5000, no_prefill, 512).workers == ("md0",)
    no_main = [view for view in views() if view.role != "main-decode"]
    assert route_around("prfaas", 0.95, 100, no_main, 512).pipeline in ("rld", "p")
