"""How long the client waits at the switch, in each mode: bounds of one round trip and a few steps.

Every connection to main decode goes through a proxy that delays each byte by half a round trip, and every step of the
engines takes tens of milliseconds, so that a bound of two steps is far above what a busy machine adds.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.workers.proxy import Proxy
from tests.workers.roles.steps import slow
from tests.workers.serving import eventually, prompt_of, records_in, run
from workers.engine import Sampling, generate
from workers.local import InProcessCluster, Layout
from workers.models import LoadedModel

pytestmark = pytest.mark.quiet

RTT_S = 0.2
PROMPT = prompt_of(100)


async def one_hand_over(
    tiny: LoadedModel, directory: Path, mode: str, relay_step_s: float, main_step_s: float, tokens: int
) -> tuple[dict[str, Any], list[int]]:
    """The record and the ids of one answer, of which the relay makes 12 tokens or more before main decode is ready."""
    async with AsyncExitStack() as stack:
        ways = {
            (name, "md0"): await stack.enter_async_context(Proxy(one_way_s=RTT_S / 2)) for name in ("gw0", "p0", "rld0")
        }
        reroute = {way: proxy.port for way, proxy in ways.items()}
        layout = Layout(reroute=reroute, serving={"handoff": mode}, wan_rtt_ns=int(RTT_S * 1e9))
        cluster = InProcessCluster(tiny, layout, directory)
        for proxy in ways.values():
            proxy.aim(cluster.port("md0"))
        await stack.enter_async_context(cluster)
        slow(cluster.worker("rld0"), relay_step_s)
        slow(cluster.worker("md0"), main_step_s)
        ways["p0", "md0"].one_way_s += 12 * relay_step_s  # KV takes so much longer
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=cluster.base_url, timeout=60))
        body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = (await http.post("/v1/completions", json=body)).json()["pdd"]
        await eventually(lambda: not cluster.gateway.dispatcher.live, 10, "all workers have reported")
        assert answer["instances"].count("rld0") >= 10
        assert answer["instances"][-1] == "md0"
        return records_in(directory)[-1], answer["token_ids"]


def measured(
    tiny: LoadedModel, directory: Path, mode: str, relay_step_s: float, main_step_s: float, tokens: int = 60
) -> dict[str, Any]:
    """The record of an answer that is the control's."""
    record, ids = run(one_hand_over(tiny, directory, mode, relay_step_s, main_step_s, tokens))
    assert ids == generate(tiny, PROMPT, Sampling(max_tokens=tokens, ignore_eos=True))
    assert record["pdd_handoff_mode"] == mode
    return record


def test_one_shot_pauses_for_a_round_trip_and_the_extend(tiny: LoadedModel, tmp_path: Path) -> None:
    record = measured(tiny, tmp_path, "one-shot", 0.03, 0.03)
    (extend,) = [span for span in record["pdd_spans"] if span["name"] == "extend"]
    expected = 1e3 * RTT_S + (extend["end_ns"] - extend["start_ns"]) / 1e6
    assert 1e3 * RTT_S < record["pdd_handoff_pause_ms"] < expected + 40, "and what is left of the relay's step"


def test_catch_up_pauses_for_at_most_a_round_trip_and_two_steps(tiny: LoadedModel, tmp_path: Path) -> None:
    bound_ms = 1e3 * (RTT_S + 2 * 0.04)
    record = measured(tiny, tmp_path, "catch-up", 0.03, 0.03)
    assert 1e3 * RTT_S < record["pdd_handoff_pause_ms"] <= bound_ms
    assert record["pdd_handoff_recomputed"] <= 3, "the rest was computed before the relay stopped"
    assert record["pdd_handoff_rounds"] > 2


def test_overlap_hides_the_round_trip_where_main_decode_is_faster(tiny: LoadedModel, tmp_path: Path) -> None:
    bound_ms = 1e3 * 2 * 0.06
    record = measured(tiny, tmp_path, "overlap", 0.06, 0.02)
    assert record["pdd_handoff_pause_ms"] <= bound_ms < 1e3 * RTT_S


def test_overlap_with_an_equal_main_decode_is_no_worse_than_catch_up(tiny: LoadedModel, tmp_path: Path) -> None:
    bound_ms = 1e3 * (RTT_S + 2 * 0.04)
    record = measured(tiny, tmp_path, "overlap", 0.03, 0.03, tokens=90)
    assert record["pdd_handoff_pause_ms"] <= bound_ms
