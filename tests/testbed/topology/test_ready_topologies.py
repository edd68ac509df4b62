"""The topology files that come with the project say what they promise."""

import re
from pathlib import Path

import pytest

from testbed.topology import load_plan
from testbed.topology.load import plan_from_text
from testbed.topology.schema import (
    Api,
    Cpu,
    Datacenter,
    Fabric,
    Host,
    KvPool,
    Model,
    Queue,
    Serving,
    Tcp,
    TopologyFile,
    Wan,
)
from testbed.topology.speeds import KvBytes, Profile, ScaleSection

READY = Path(__file__).parents[3] / "topologies"
MS = 1_000_000


@pytest.mark.parametrize("file", sorted(READY.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_ready_topology_is_valid_and_named_after_its_file(file: Path) -> None:
    assert load_plan(file).name == file.stem


def test_two_dc_is_the_lab_that_the_readme_shows() -> None:
    plan = load_plan(READY / "two-dc.yaml")
    assert [(host.name, host.datacenter, host.role) for host in plan.hosts] == [
        ("gw0", "main", "gateway"),
        ("p0", "main", "prefill"),
        ("rld0", "main", "relay-decode"),
        ("md0", "remote", "main-decode"),
    ]
    (wan,) = plan.wans
    assert wan.forward == wan.backward
    assert (wan.forward.rate_bps, wan.forward.delay_ns) == (400_000_000, 20 * MS)
    assert plan.model["name"] == "smollm2-135m"


def test_two_dc_tiny_differs_from_two_dc_by_name_and_model_only() -> None:
    full, tiny = load_plan(READY / "two-dc.yaml"), load_plan(READY / "two-dc-tiny.yaml")
    assert (tiny.datacenters, tiny.wans, tiny.routes) == (full.datacenters, full.wans, full.routes)
    assert (tiny.serving, tiny.api_port) == (full.serving, full.api_port)
    assert tiny.model["name"] == "tiny"


def test_three_dc_routes_around_its_expensive_link() -> None:
    plan = load_plan(READY / "three-dc.yaml")
    route = next(r for r in plan.routes if (r.datacenter, r.destination) == ("main", "south"))
    assert route.links == ("wan-north", "wan-coast")
    assert route.rtt_ns == 54 * MS


def test_the_example_of_the_documentation_is_valid() -> None:
    text = (READY.parent / "docs" / "topology.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    plan = plan_from_text(example, "example.yaml")
    assert plan.wans[0].backward.rate_bps == 100_000_000


def test_the_documentation_names_every_key() -> None:
    text = (READY.parent / "docs" / "topology.md").read_text()
    words = set(re.findall(r"[a-z_]+", text))
    sections = [TopologyFile, Datacenter, Fabric, Host, Cpu, Wan, Queue, Tcp, Model, Serving, KvPool, Api]
    sections += [Profile, ScaleSection, KvBytes]
    assert {key for section in sections for key in section.model_fields} <= words
