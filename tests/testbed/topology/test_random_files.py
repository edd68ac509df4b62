"""Whatever a file holds, loading it gives a plan or TopologyErrors with lines: never a crash."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.model.impairment import GilbertElliottLoss
from testbed.model.plan import LabPlan
from testbed.topology.load import plan_from_text
from testbed.topology.problems import TopologyErrors
from testbed.topology.salvage import hints, sections_of
from testbed.topology.schema import Section, TopologyFile

DESIGN_EXAMPLE: dict[str, Any] = {
    "name": "two-dc",
    "seed": 1,
    "datacenters": {
        "main": {
            "subnet": "10.1.0.0/24",
            "fabric": {"mtu": 9000, "rate": "25gbit", "delay": "5us"},
            "switch": "linux-bridge",
            "hosts": {
                "gw0": {"role": "gateway"},
                "p0": {
                    "role": "prefill",
                    "device": "cpu",
                    "profile": "native",
                    "cpu": {"affinity": [0], "quota": "100%"},
                },
                "rld0": {"role": "relay-decode"},
                "any0": {"command": "vllm serve", "publish": ["127.0.0.1:9000:9000"], "environment": {"A": "b"}},
            },
        },
        "remote": {"subnet": "10.2.0.0/24", "hosts": {"md0": {"role": "main-decode", "address": "10.2.0.9"}}},
    },
    "wan": [
        {
            "name": "wan0",
            "between": ["main", "remote"],
            "driver": "auto",
            "mtu": 1500,
            "rate": "400mbit",
            "delay": "20ms",
            "jitter": {"std": "1ms", "distribution": "normal"},
            "loss": {"good_to_bad": "1%", "bad_to_good": "10%", "loss_bad": "70%", "loss_good": "0.1%"},
            "duplicate": "1%",
            "queue": {"bdp": 1.5},
            "tcp": {"congestion": "cubic", "initial_window": 10},
            "forward": {"rate": "1gbit", "queue": {"bytes": "8MiB"}},
            "backward": {"loss": "0%"},
            "cost": 1,
        }
    ],
    "model": {"name": "tiny", "seed": 0},
    "serving": {
        "pipeline": "pdd",
        "relay_threshold": "95%",
        "handoff": "auto",
        "block_size": 16,
        "kv_pool": {"connections": 8},
        "kv_send": "after-prefill",
    },
    "congestion": [],
    "scale": None,
    "api": {"listen": "127.0.0.1:8000"},
}

SCALED_EXAMPLE: dict[str, Any] = {
    "datacenters": {
        "main": {
            "subnet": "10.1.0.0/24",
            "hosts": {"gw0": {"role": "gateway"}, "p0": {"role": "prefill", "profile": "gpu"}},
        },
        "remote": {"subnet": "10.2.0.0/24", "hosts": {"md0": {"role": "main-decode", "profile": "chip"}}},
    },
    "wan": [
        {
            "between": ["main", "remote"],
            "rate": "10gbit",
            "rtt": "100ms",
            "queue": {"bytes": "64MiB"},
            "backward": {"rate": "5gbit"},
        }
    ],
    "serving": {"pipeline": "cdc-pd", "kv_chunk": 2048, "kv_pool": {"rate": "320mbit"}},
    "profiles": {
        "gpu": {"prefill": "9000 tokens/s", "decode": "75ms", "extend": "9000 tokens/s"},
        "chip": {"relative_to": "gpu", "prefill": "81%", "decode": "210%", "decode_per_sequence": "1ms"},
    },
    "congestion": [
        {"step": {"at": "1s", "rate": "1gbit"}},
        {"ramp": {"at": "2s", "duration": "1s", "delay": ["50ms", "90ms"]}},
        {"cross_traffic": {"at": "4s", "duration": "2s", "rate": "1gbit", "bursts": {"on": "1s", "off": "1s"}}},
    ],
    "scale": {
        "kv_bytes_per_token": {"deployment": "4400B", "lab": "2KiB"},
        "block_tokens": 64,
        "prompt_divisor": 64,
        "output_divisor": 4,
        "time_compression": 2,
    },
}


def vocabulary() -> list[str]:
    """Every key of every section."""
    words: set[str] = set()
    queue: list[type[Section]] = [TopologyFile]
    seen: set[type[Section]] = set()
    while queue:
        section = queue.pop()
        if section in seen:
            continue
        seen.add(section)
        for key, hint in hints(section).items():
            words.add(key)
            nested = sections_of(hint)
            if nested:
                queue.append(nested[1])
    return sorted(words)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.dates(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "20ms",
            "2s",
            "90 tokens/s",
            "gpu",
            "chip",
            "400mbit",
            "10tbit",
            "0bit",
            "1%",
            "100%",
            "101%",
            "8MiB",
            "10.1.0.0/24",
            "10.0.0.0/7",
            "10.1.0.0/31",
            "172.31.0.0/30",
            "10.1.0.1",
            "::1",
            "main",
            "remote",
            "gw0",
            "p0",
            "gateway",
            "prefill",
            "relay-decode",
            "main-decode",
            "netem",
            "ovs",
            "cuda",
            "127.0.0.1:8000",
            "9000:1",
        ]
    ),
)
KEYS = st.one_of(st.sampled_from(vocabulary()), st.sampled_from(["main", "remote", "gw0", "x y"]), st.text(max_size=5))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))


def load(text: str) -> LabPlan | TopologyErrors:
    try:
        return plan_from_text(text, "random.yaml", memory_bytes=2**34)
    except TopologyErrors as errors:
        result = errors
    last = len(text.splitlines()) + 1
    assert result.problems
    for problem in result.problems:
        assert problem.line is not None
        assert problem.line <= last
        assert str(problem).isprintable()
    return result


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [path, *(found for key, item in items for found in paths(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_the_example_of_the_design_is_a_plan() -> None:
    plan = load(yaml.safe_dump(DESIGN_EXAMPLE, sort_keys=False))
    assert isinstance(plan, LabPlan), plan
    assert plan.wans[0].forward.loss == GilbertElliottLoss(0.01, 0.1, 0.7, 0.001)
    assert plan.wans[0].backward.loss is None
    assert isinstance(load(yaml.safe_dump(SCALED_EXAMPLE, sort_keys=False)), LabPlan)


@settings(max_examples=250)
@given(st.lists(st.tuples(st.sampled_from(paths(DESIGN_EXAMPLE)), VALUES), min_size=1, max_size=4))
def test_a_good_file_with_some_values_replaced_by_others_never_crashes(changes: list[tuple[Any, Any]]) -> None:
    _replace_and_load(DESIGN_EXAMPLE, changes)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(paths(SCALED_EXAMPLE)), VALUES), min_size=1, max_size=4))
def test_a_good_file_with_a_scale_and_some_values_replaced_never_crashes(changes: list[tuple[Any, Any]]) -> None:
    _replace_and_load(SCALED_EXAMPLE, changes)


def _replace_and_load(data: Any, changes: list[tuple[Any, Any]]) -> None:
    for path, new in changes:
        if path in paths(data):
            data = replaced(data, path, new)
    load(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


@settings(max_examples=150)
@given(st.dictionaries(KEYS, VALUES, max_size=5))
@example({"[key]": None})  # how pydantic marks a wrong key
@example({"datacenters": {"[key]": {"[key]": 1, "hosts": {"[key]": {"[key]": 2}, "x y": {"[key]": 3}}}}})
def test_no_mapping_crashes_the_loader(data: dict[str, Any]) -> None:
    load(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("ab:-,[]{}&*!|>'\"%@#?~<. \n\t\r\u0085\u2028\ufeff\x00"), max_size=40))
@example("&a [*a]")
@example("? a\n: b")
@example("<<: &a {<<: *a}")
@example("%YAML 3.0\n---\na")
@example("--- !<x> a")
@example("\ufeffa: 1")
def test_no_text_crashes_the_loader(text: str) -> None:
    try:
        plan_from_text(text, "random.yaml", memory_bytes=2**34)
    except TopologyErrors as errors:
        assert errors.problems  # noqa: PT017


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_no_bytes_crash_the_loader(tmp_path_factory: Any, content: bytes) -> None:
    from testbed.topology import load_plan

    file: Path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    file.write_bytes(content)
    try:
        load_plan(file)
    except TopologyErrors as errors:
        assert all(str(problem).isprintable() for problem in errors.problems)  # noqa: PT017
