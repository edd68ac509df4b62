"""The environment of a worker: parsed whole, or every mistake named."""

import json
from typing import Any

import pytest

from workers.engine import Profile
from workers.environment import EnvironmentProblem, KvPool, Serving, Speculative, read_environment
from workers.models import ModelSpec
from workers.wire.deadlines import Path

GOOD = {
    "PDDBED_LAB": "lab",
    "PDDBED_HOST": "md0",
    "PDDBED_ROLE": "main-decode",
    "PDDBED_ADDRESS": "10.2.0.2",
    "PDDBED_PORT": "7000",
    "PDDBED_SECRET": "ab" * 32,
    "PDDBED_DATACENTER": "remote",
    "PDDBED_MODEL": '{"name": "tiny", "seed": 3}',
    "PDDBED_PEERS": json.dumps(
        [
            {"name": "p0", "role": "prefill", "datacenter": "main", "address": "10.1.0.2", "port": 7000},
            {"name": "md0", "role": "main-decode", "datacenter": "remote", "address": "10.2.0.2", "port": 7000},
            {"name": "md1", "role": "main-decode", "datacenter": "remote", "address": "10.2.0.3", "port": 7000},
            {"name": "iperf", "role": None, "datacenter": "main", "address": "10.1.0.9", "port": 7000},
        ]
    ),
    "PDDBED_WAN": '{"main": {"rtt_ns": 40000000, "rate_bps": 400000000}}',
    "PDDBED_SERVING": json.dumps(
        {
            "pipeline": "cdc-pd",
            "relay_threshold": 0.9,
            "handoff": "auto",
            "block_size": 32,
            "kv_pool": {"connections": 4, "warm": False, "wan_dtype": "fp8", "rate": 5_000_000},
            "kv_send": "chunked",
            "kv_chunk": 64,
            "offload_threshold": 2000,
            "busy_tokens": 32,
            "speculative": {"ngram": 2},
        }
    ),
    "PDDBED_READY_FD": "5",
    "PDDBED_RECORDS": "/tmp/records",
    "PDDBED_PROFILE": '{"name": "chip", "prefill_token_ns": 7.5, "decode_step_ns": 30, "extend_token_ns": 2}',
}


def test_everything_is_read_once() -> None:
    environment = read_environment(GOOD)
    assert (environment.host, environment.role, environment.port) == ("md0", "main-decode", 7000)
    assert environment.model == ModelSpec("tiny", seed=3)
    assert environment.serving == Serving(
        pipeline="cdc-pd",
        relay_threshold=0.9,
        offload_threshold=2000,
        busy_tokens=32,
        handoff="auto",
        block_size=32,
        kv_pool=KvPool(connections=4, wan_dtype="fp8", rate_bps=5_000_000, warm=False),
        kv_send="chunked",
        kv_chunk=64,
        speculative=Speculative(ngram=2, draft=4),
    )
    assert environment.profile == Profile("chip", 7.5, 30, 2)
    assert environment.ready_fd == 5
    assert environment.api_fd is None
    assert {peer.name: peer.path for peer in environment.peers} == {
        "p0": Path(40_000_000, 400_000_000, connection_bps=5_000_000),
        "md1": Path(),
    }, "not itself, not a host that runs a program of its own; the WAN's delay only to the other datacenter"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"PDDBED_HOST": None}, "PDDBED_HOST is not set"),
        ({"PDDBED_ROLE": "cook"}, 'PDDBED_ROLE is "cook"; it must be one of gateway, main'),
        ({"PDDBED_PORT": "70000"}, 'PDDBED_PORT is "70000"; it must be a whole number from 0 to 65535'),
        ({"PDDBED_SECRET": "xyz"}, "PDDBED_SECRET is not hexadecimal"),
        ({"PDDBED_SECRET": "abcd"}, "PDDBED_SECRET has 2 bytes; it needs at least 16"),
        ({"PDDBED_MODEL": "{"}, "PDDBED_MODEL is not JSON"),
        (
            {"PDDBED_MODEL": '{"nam": 1}'},
            "PDDBED_MODEL: object contains unknown field `nam`; it must be an object with name",
        ),
        ({"PDDBED_PEERS": "{}"}, "PDDBED_PEERS is {}; it must be a list, each an object with name, role"),
        ({"PDDBED_PEERS": '[{"name": "x"}]'}, "PDDBED_PEERS.0: object missing required field `role`"),
        ({"PDDBED_WAN": '{"main": {}}'}, "PDDBED_WAN.main: object missing required field `rtt_ns`"),
        ({"PDDBED_LINKS": "/nowhere"}, "PDDBED_LINKS is '/nowhere'"),
        ({"PDDBED_LINKS": "/etc/hostname"}, "PDDBED_LINKS is '/etc/hostname'"),
        ({"PDDBED_UNWRITTEN": "0:/nowhere"}, "PDDBED_UNWRITTEN is '0:/nowhere'"),
        ({"PDDBED_UNWRITTEN": "rubbish"}, "PDDBED_UNWRITTEN is 'rubbish'"),
        ({"PDDBED_RECORDS_LIMIT": "1"}, 'PDDBED_RECORDS_LIMIT is "1"; it must be a whole number from 4096'),
        ({"PDDBED_SERVING": '{"pipeline": "magic"}'}, 'SERVING.pipeline is "magic"; it must be one of cdc-pd, idc-pd'),
        (
            {"PDDBED_SERVING": '{"kv_send": "sometimes"}'},
            'SERVING.kv_send is "sometimes"; it must be one of after-prefill, chunked',
        ),
        ({"PDDBED_SERVING": '{"block_size": 0}'}, "SERVING.block_size is 0; it must be a whole number from 1 to 1024"),
        (
            {"PDDBED_SERVING": '{"kv_pool": {"connections": true}}'},
            "SERVING.kv_pool.connections is true; it must be a whole number",
        ),
        ({"PDDBED_SERVING": '{"kv_pool": {"warm": 1}}'}, "SERVING.kv_pool.warm is 1; it must be true or false"),
        (
            {"PDDBED_SERVING": '{"kv_pool": {"wan_dtype": "int4"}}'},
            'SERVING.kv_pool.wan_dtype is "int4"; it must be one of fp8, same',
        ),
        ({"PDDBED_SERVING": '{"kv_chunk": 0}'}, "SERVING.kv_chunk is 0; it must be a whole number from 1"),
        ({"PDDBED_SERVING": '{"offload_threshold": "5k"}'}, 'SERVING.offload_threshold is "5k"; it must be a whole'),
        ({"PDDBED_SERVING": '{"busy_tokens": -1}'}, "SERVING.busy_tokens is -1; it must be a whole number"),
        (
            {"PDDBED_SERVING": '{"speculative": true}'},
            "SERVING.speculative is true; it must be an object with ngram, draft or null",
        ),
        ({"PDDBED_SERVING": '{"speculative": {"draft": 0}}'}, "SERVING.speculative.draft is 0; it must be a whole"),
        (
            {"PDDBED_SERVING": '{"relay_threshold": 95}'},
            "SERVING.relay_threshold is 95; it must be a number from 0 to 1",
        ),
        ({"PDDBED_PATIENCE": "soon"}, 'PDDBED_PATIENCE is "soon"; it must be a number from 0.01 to 1000'),
        (
            {"PDDBED_SERVING": '{"kv_pool": {"rate": "5mbit"}}'},
            'SERVING.kv_pool.rate is "5mbit"; it must be a whole number from 1000',
        ),
        ({"PDDBED_PROFILE": "[]"}, "PDDBED_PROFILE is []; it must be an object with name, prefill"),
        ({"PDDBED_PROFILE": '{"name": "chip"}'}, "PDDBED_PROFILE: object missing required field `prefill_token_ns`"),
        (
            {"PDDBED_PROFILE": '{"name": "c", "prefill_token_ns": -1, "decode_step_ns": 1, "extend_token_ns": 1}'},
            "PDDBED_PROFILE.prefill_token_ns is -1; it must be a number from 0",
        ),
        ({"PDDBED_SERVING": '{"kv_chunks": 64}'}, "object contains unknown field `kv_chunks`"),
        ({"PDDBED_SERVING": '{"drain": 7200000000000}'}, "SERVING.drain is 7200000000000; it must be a whole number"),
        ({"PDDBED_API": '{"body_bytes": 0}'}, "PDDBED_API.body_bytes is 0; it must be a whole number from 1"),
        ({"PDDBED_WAN": '{"main": {"rtt_ns": -1}}'}, "PDDBED_WAN.main.rtt_ns is -1; it must"),
        ({"PDDBED_WAN": "[" * 5000}, "PDDBED_WAN is not JSON"),
        ({"PDDBED_HOST": "\udcff", "PDDBED_MODEL": '{"name": "\udcff"}'}, "PDDBED_MODEL is not JSON"),
        ({"PDDBED_PATIENCE": "nan"}, 'PDDBED_PATIENCE is "nan"'),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], message: str) -> None:
    variables = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(EnvironmentProblem) as problem:
        read_environment(variables)
    assert message in str(problem.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(EnvironmentProblem) as problem:
        read_environment({"PDDBED_ROLE": "cook", "PDDBED_PORT": "x", "PDDBED_PEERS": "["})
    assert len(str(problem.value).splitlines()) == 6
