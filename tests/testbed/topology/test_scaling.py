"""With `scale:` a file has the deployment's values, and the plan the lab's: every time is kept, or divided as asked."""

import json
from dataclasses import replace

import pytest

from testbed.lab.environment import host_environment
from testbed.model.plan import LabPlan
from testbed.model.scale import Scale
from testbed.topology import TopologyErrors
from testbed.topology.describe import describe, plan_as_dict
from testbed.topology.load import plan_from_text

MS = 1_000_000
DEPLOYMENT = """
datacenters:
  main:
    subnet: 10.1.0.0/24
    fabric: {rate: 200gbit, delay: 10us}
    hosts: {gw0: {role: gateway}, p0: {role: prefill, profile: gpu}, p1: {role: prefill}}
  remote: {subnet: 10.2.0.0/24, hosts: {md0: {role: main-decode, profile: chip}}}
wan:
  - between: [main, remote]
    rate: 10gbit
    rtt: 100ms
    jitter: {std: 2ms}
    queue: {bytes: 110MiB}
    backward: {rate: 5gbit}
serving:
  pipeline: cdc-pd
  kv_chunk: 2048
  offload_threshold: 19400
  busy_tokens: 16384
  kv_pool: {rate: 320mbit}
profiles:
  gpu: {prefill: 9000 tokens/s, decode: 75ms, decode_per_sequence: 1ms}
  chip: {relative_to: gpu, prefill: 81%, decode: 210%}
congestion:
  - step: {at: 60s, rate: 1gbit}
  - ramp: {at: 70s, duration: 10s, delay: [50ms, 100ms]}
  - cross_traffic: {at: 90s, duration: 4s, rate: 1gbit, bursts: {on: 2s, off: 1s}}
"""
SCALE = """
scale:
  kv_bytes_per_token: {deployment: 4400B, lab: 2KiB}
  block_tokens: 256
  prompt_divisor: 256
  output_divisor: 4
  time_compression: 2
"""


def lab() -> LabPlan:
    return plan_from_text(DEPLOYMENT + SCALE, "f.yaml")


def test_rates_shrink_by_the_ratio_of_bytes_and_grow_with_time() -> None:
    plan = lab()
    assert plan.scale is not None
    assert plan.scale.byte_ratio == 4400 * 256 / 2048 == 550
    (wan,) = plan.wans
    assert wan.forward.rate_bps == round(10e9 / 550 * 2)
    assert [one.fabric_rate_bps for one in plan.datacenters] == [round(200e9 / 550 * 2), None]
    assert wan.backward.rate_bps == round(5e9 / 550 * 2)
    assert plan.serving["kv_pool"]["rate"] == round(320e6 / 550 * 2)
    assert plan.routes[0].rate_bps == wan.forward.rate_bps


def test_times_and_buffers_keep_to_the_compression() -> None:
    (wan,) = lab().wans
    assert wan.rtt_ns == 50 * MS
    assert wan.forward.jitter is not None
    assert wan.forward.jitter.std_ns == MS
    asked, here = 110 * 2**20 * 8 / 10e9, wan.forward.queue_bytes * 8 / wan.forward.rate_bps
    assert here == pytest.approx(asked / 2, rel=1e-5)


def test_a_timeline_is_scaled_as_its_link_is() -> None:
    plan = lab()
    assert plan.congestion is not None
    text = "\n".join(describe(plan))
    assert "30s" in text
    assert "3636364bit" in text
    assert "on and off for 1s and 500ms on average" in text


def test_what_counts_prompt_tokens_is_divided() -> None:
    serving = lab().serving
    assert (serving["block_size"], serving["kv_chunk"], serving["offload_threshold"]) == (1, 8, 75)
    assert serving["busy_tokens"] == 64
    assert serving["kv_bytes_per_token"] == 2048, "workers check it"


def test_workers_are_paced_in_the_labs_tokens_and_times() -> None:
    plan = lab()
    told = {host.name: host_environment(plan, host, "", "/nowhere").get("PDDBED_PROFILE") for host in plan.hosts}
    assert told["p1"] is None
    assert told["gw0"] is None
    gpu, chip = json.loads(told["p0"] or ""), json.loads(told["md0"] or "")
    assert gpu == {
        "name": "gpu",
        "prefill_token_ns": pytest.approx(1e9 / 9000 * 256 / 2),
        "extend_token_ns": pytest.approx(1e9 / 9000 * 4 / 2),
        "decode_step_ns": pytest.approx(75 * MS * 4 / 2),
        "decode_sequence_ns": pytest.approx(1 * MS * 4 / 2),
        "extend_pass_ns": pytest.approx(75 * MS / 2),
    }
    assert gpu["prefill_token_ns"] / chip["prefill_token_ns"] == pytest.approx(0.81)
    assert gpu["decode_step_ns"] / chip["decode_step_ns"] == pytest.approx(2.10)
    assert gpu["decode_sequence_ns"] / chip["decode_sequence_ns"] == pytest.approx(2.10)


def test_without_a_scale_a_profile_is_what_it_says() -> None:
    plan = plan_from_text(DEPLOYMENT, "f.yaml")
    assert plan.scale is None
    assert plan.wans[0].forward.rate_bps == 10**10
    assert dict(plan.hosts[1].pace)["decode_step_ns"] == 75 * MS
    assert plan.serving["block_size"] == 16
    assert "kv_bytes_per_token" not in plan.serving


def test_a_scale_of_one_changes_no_value() -> None:
    one = "scale: {kv_bytes_per_token: {deployment: 2KiB, lab: 2KiB}, block_tokens: 16, prompt_divisor: 1}\n"
    plan, plain = plan_from_text(DEPLOYMENT + one, "f.yaml"), plan_from_text(DEPLOYMENT, "f.yaml")
    assert plan.scale is not None
    assert plan.scale.scale == Scale(1)
    without = {key: value for key, value in plan.serving.items() if key != "kv_bytes_per_token"}
    assert replace(plan, scale=None, serving=without) == plain


def test_validate_says_what_the_lab_is() -> None:
    text = "\n".join(describe(lab()))
    for words in (
        "prompt tokens 1:256, answer tokens 1:4, times 1:2",
        "bytes 1:550: KV of a token has 2,048 bytes, 4,400 in the deployment",
        "KV blocks of 1 token (256 of the deployment's); 1.164mbit for each KV connection",
        "profile gpu: prefill 70.31 tokens/s, decode 150ms a step and 2ms for each further sequence, extend 4500 tok",
        "prefill, paced as gpu",
    ):
        assert words in text
    assert json.loads(json.dumps(plan_as_dict(lab())))["scale"]["deployment_kv_bytes"] == 4400


@pytest.mark.parametrize(
    "key", ["extend: 900 tokens/s", "decode_per_sequence: 5ms", "decode: 20ms", "prefill: 10 tokens/s"]
)
def test_what_a_relative_profile_says_itself_holds(key: str) -> None:
    text = DEPLOYMENT.replace(
        "chip: {relative_to: gpu, prefill: 81%, decode: 210%}", f"chip: {{relative_to: gpu, {key}}}"
    )
    pace = dict(next(host for host in plan_from_text(text, "f.yaml").hosts if host.name == "md0").pace)
    expected = {"prefill_token_ns": 1e9 / 9000, "decode_step_ns": 75 * MS, "decode_sequence_ns": MS}
    expected["extend_token_ns"] = expected["prefill_token_ns"]
    changed = {
        "extend": {"extend_token_ns": 1e9 / 900},
        "decode_per_sequence": {"decode_sequence_ns": 5 * MS},
        "decode": {"decode_step_ns": 20 * MS},
        "prefill": {"prefill_token_ns": 1e8, "extend_token_ns": 1e8},
    }
    expected |= changed[key.split(":", maxsplit=1)[0]]
    assert {name: pace[name] for name in expected} == pytest.approx(expected)


def test_a_chain_of_profiles_multiplies() -> None:
    text = DEPLOYMENT.replace("congestion:", "  far: {relative_to: chip, decode: 50%}\ncongestion:")
    pace = dict(
        next(
            h for h in plan_from_text(text.replace("profile: chip", "profile: far"), "f").hosts if h.name == "md0"
        ).pace
    )
    assert pace["decode_step_ns"] == pytest.approx(75 * MS / 2.1 / 0.5)
    assert pace["prefill_token_ns"] == pytest.approx(1e9 / 9000 / 0.81)


def test_mistakes_elsewhere_are_found_beside_those_of_a_scale() -> None:
    with pytest.raises(TopologyErrors) as caught:
        plan_from_text(
            (DEPLOYMENT + SCALE).replace("rtt: 100ms", "rtt: 100").replace("block_tokens: 256", "block_tokens: 3"), "f"
        )
    assert [problem.path for problem in caught.value.problems] == ["wan[0].rtt", "scale.block_tokens"]
