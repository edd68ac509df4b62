"""From a file to a plan: addresses, defaults and overrides come out exactly, and the same every time."""

from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.model.impairment import BernoulliLoss, CoDel, GilbertElliottLoss, Jitter
from testbed.model.plan import LabPlan, Publish, WanPlan
from testbed.topology.addresses import WAN_RANGE, assign_hosts, capacity, wan_addresses
from testbed.topology.document import parse_yaml
from testbed.topology.load import lab_name, plan_from_text
from testbed.topology.problems import TopologyErrors
from testbed.topology.resolve import resolve
from testbed.topology.schema import TopologyFile

MS = 1_000_000
TWO = "datacenters: {a: {subnet: 10.1.0.0/24}, b: {subnet: 10.2.0.0/24}}\n"


def plan(text: str) -> LabPlan:
    return plan_from_text(text, "some/lab.yaml", memory_bytes=2**50)


def wan(keys: str) -> WanPlan:
    return plan(TWO + f"wan: [{{between: [a, b], {keys}}}]\n").wans[0]


def resolved(keys: str) -> WanPlan:
    """As `wan`, past the check that refuses what no driver does yet."""
    data = parse_yaml(TWO + f"wan: [{{between: [a, b], {keys}}}]\n", "f.yaml").data
    return resolve(TopologyFile.model_validate(data), "lab", None).wans[0]


def test_the_router_has_the_first_address_and_hosts_follow_around_those_that_ask() -> None:
    hosts = plan("datacenters: {a: {subnet: 10.1.0.0/29, hosts: {x: , y: {address: 10.1.0.3}, z: {}, w: {}}}}").hosts
    assert [(host.name, str(host.address)) for host in hosts] == [
        ("x", "10.1.0.2/29"),
        ("y", "10.1.0.3/29"),
        ("z", "10.1.0.4/29"),
        ("w", "10.1.0.5/29"),
    ]
    assert plan(TWO + "wan: [{between: [a, b]}]").datacenters[0].router_address == IPv4Interface("10.1.0.1/24")


@given(st.integers(20, 30), st.data())
def test_assigned_addresses_are_distinct_usable_and_kept_where_asked(prefix: int, data: st.DataObject) -> None:
    subnet = IPv4Network(f"10.64.0.0/{prefix}")
    usable = list(subnet.hosts())[1:]
    count = data.draw(st.integers(0, min(capacity(subnet), 40)))
    asked = data.draw(st.lists(st.sampled_from(usable), max_size=count, unique=True)) if count else []
    hosts = {f"h{i}": asked[i] if i < len(asked) else None for i in range(count)}
    order = data.draw(st.permutations(list(hosts)))
    given_out = assign_hosts(subnet, {name: hosts[name] for name in order})
    assert len({address.ip for address in given_out.values()}) == count
    for name, address in given_out.items():
        assert address.ip in usable
        assert address.network == subnet
        assert hosts[name] in (None, address.ip)


def test_every_wan_link_has_a_pair_of_addresses_of_its_own() -> None:
    ends = [end for index in range(1000) for end in wan_addresses(index)]
    assert len(set(ends)) == 2000
    assert all(end.ip in WAN_RANGE and end.network.prefixlen == 31 for end in ends)
    assert [str(end) for end in wan_addresses(1)] == ["172.31.0.2/31", "172.31.0.3/31"]


@pytest.mark.parametrize(
    ("keys", "rate", "delay", "queue"),
    [
        ("rate: 400mbit, delay: 20ms", 400_000_000, 20 * MS, 2_000_000),
        ("rate: 400mbit, rtt: 40ms", 400_000_000, 20 * MS, 2_000_000),
        ("rate: 400mbit, delay: 20ms, queue: {bdp: 1.5}", 400_000_000, 20 * MS, 3_000_000),
        ("rate: 400mbit, delay: 20ms, queue: {bytes: 8MiB}", 400_000_000, 20 * MS, 8 * 2**20),
        ("rate: 1.5gbit, delay: 0.75s", 1_500_000_000, 750 * MS, 281_250_000),
        ("rate: 40960000kbit, delay: 2s", 40_960_000_000, 2000 * MS, 20_480_000_000),
        ("rate: 1mbit, delay: 1ms", 1_000_000, MS, 64 * 1500),  # far less than one packet of BDP
        ("rate: 1mbit", 1_000_000, 0, 64 * 1500),
        ("delay: 2s", None, 2000 * MS, None),
        ("rate: null", None, 0, None),
    ],
)
def test_rate_delay_and_queue_are_exact(keys: str, rate: int | None, delay: int, queue: int | None) -> None:
    link = wan(keys)
    for direction in (link.forward, link.backward):
        assert (direction.rate_bps, direction.delay_ns, direction.queue_bytes) == (rate, delay, queue)


def test_an_odd_round_trip_is_split_without_losing_a_nanosecond() -> None:
    link = wan("rtt: 5ns")
    assert (link.forward.delay_ns, link.backward.delay_ns, link.rtt_ns) == (3, 2, 5)


def test_a_direction_overrides_what_it_names_and_keeps_the_rest() -> None:
    link = resolved("rate: 100mbit, delay: 10ms, loss: 1%, forward: {loss: 0%}, backward: {rate: 20mbit, delay: 30ms}")
    assert (link.forward.rate_bps, link.forward.delay_ns, link.forward.loss) == (100_000_000, 10 * MS, None)
    assert (link.backward.rate_bps, link.backward.delay_ns) == (20_000_000, 30 * MS)
    assert link.backward.loss == BernoulliLoss(0.01)
    # One BDP of each direction's own rate, over the one round trip of 40 ms.
    assert (link.forward.queue_bytes, link.backward.queue_bytes) == (500_000, 100_000)


def test_a_direction_can_take_the_limit_off() -> None:
    link = wan("rate: 100mbit, delay: 10ms, backward: {rate: null}")
    assert link.forward.rate_bps == 100_000_000
    assert link.backward.rate_bps is None
    assert link.backward.queue_bytes is None


def test_every_impairment_reaches_the_plan() -> None:
    link = resolved(
        "rate: 10mbit, delay: 1ms, jitter: {std: 5ms, distribution: pareto}, duplicate: 0.5%, corrupt: 0.25%, "
        "reorder: 2%, loss: {good_to_bad: 1%, bad_to_good: 10%, loss_bad: 70%, loss_good: 0.1%}, "
        "queue: {bytes: 1MiB, codel: true}"
    )
    assert link.forward == link.backward
    assert link.forward.jitter == Jitter(5 * MS, "pareto")  # more jitter than delay is allowed
    assert link.forward.loss == GilbertElliottLoss(0.01, 0.1, 0.7, 0.001)
    assert link.forward.duplication == 0.005
    assert link.forward.corruption == 0.0025
    assert link.forward.reordering == 0.02
    assert link.forward.codel == CoDel()


def test_impairments_of_nothing_are_none() -> None:
    link = wan("delay: 1ms, jitter: {std: 0ms}, loss: 0%, duplicate: 0%")
    assert link.forward == wan("delay: 1ms").forward


def test_what_a_host_says_reaches_the_plan() -> None:
    text = """
datacenters:
  a:
    subnet: 10.1.0.0/24
    fabric: {mtu: 1500}
    hosts:
      any0:
        command: "vllm serve tiny --port 9000"
        publish: [127.0.0.1:9001:9000, 9002:9000]
        cpu: {affinity: [0, 3], quota: 150%}
        environment: {DEBUG: on, LEVEL: 010, EMPTY: ""}
      plain0:
"""
    datacenter = plan(text).datacenters[0]
    host, plain = datacenter.hosts
    assert datacenter.fabric_mtu == 1500
    assert host.command == "vllm serve tiny --port 9000"
    assert host.port == 9000
    assert host.publish == (Publish("127.0.0.1", 9001, 9000), Publish("127.0.0.1", 9002, 9000))
    assert (host.affinity, host.quota) == ((0, 3), 1.5)
    assert host.environment == (("DEBUG", "on"), ("LEVEL", "010"), ("EMPTY", ""))
    assert (plain.role, plain.command) == (None, None)


def test_model_and_serving_are_handed_on_in_the_workers_own_units() -> None:
    lab = plan(TWO + "wan: [{between: [a, b]}]\nserving: {relay_threshold: 90%, kv_pool: {connections: 4}}\n")
    assert lab.model == {"name": "tiny", "seed": 0, "dtype": "float32"}
    assert lab.serving["relay_threshold"] == 0.9
    assert lab.serving["kv_pool"] == {"connections": 4, "wan_dtype": "same", "rate": None, "warm": True}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny", "tiny"),
        ("/models/x", "/models/x"),
        ("./x", str(Path("some/x").absolute())),
        ("x.gguf", str(Path("some/x.gguf").absolute())),
    ],
)
def test_a_checkpoint_is_looked_for_beside_the_topology_file(name: str, expected: str) -> None:
    lab = plan(TWO + f"wan: [{{between: [a, b]}}]\nmodel: {{name: {name}}}\n")
    assert lab.model["name"] == expected


def test_names_that_yaml_reads_as_something_else_stay_names() -> None:
    lab = plan(
        "name: 1:30\n"
        "datacenters:\n"
        "  on: {subnet: 10.1.0.0/24, hosts: {no: {}, null: {}, 2024-01-01: {}, edge-1.rack:2: {}}}\n"
        "  010: {subnet: 10.2.0.0/24}\n"
        "wan: [{name: 1e3, between: [on, 010]}]\n"
    )
    assert lab.name == "1:30"
    assert [datacenter.name for datacenter in lab.datacenters] == ["on", "010"]
    assert [host.name for host in lab.hosts] == ["no", "null", "2024-01-01", "edge-1.rack:2"]
    assert (lab.wans[0].name, lab.wans[0].a, lab.wans[0].b) == ("1e3", "on", "010")


def test_the_lab_is_named_by_the_caller_the_file_or_its_name() -> None:
    text = TWO + "wan: [{between: [a, b]}]\n"
    assert plan_from_text("name: mine\n" + text, "f.yaml", "other").name == "other"
    assert plan_from_text("name: mine\n" + text, "f.yaml").name == "mine"
    assert plan_from_text(text, "dir/my lab (2).yaml").name == "my-lab-2"
    assert lab_name("dir/\u00e9.yaml") == "lab"
    with pytest.raises(TopologyErrors, match=r"the lab's name .* white space"):
        plan_from_text(text, "f.yaml", "two words")


def test_empty_sections_are_as_good_as_absent_ones() -> None:
    text = TWO + "wan: [{between: [a, b], tcp: }]\nmodel:\nserving:\napi:\ncongestion: []\nscale: null\n"
    assert plan(text) == plan(TWO + "wan: [{between: [a, b]}]")
    assert plan("datacenters: {a: {subnet: 10.1.0.0/24, hosts: , fabric: }}\nwan:\n").wans == ()
