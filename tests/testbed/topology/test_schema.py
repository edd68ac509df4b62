"""The JSON Schema that editors complete from agrees with what the loader accepts."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from testbed.topology import TopologyErrors
from testbed.topology.load import plan_from_text
from testbed.topology.schema import json_schema
from tests.testbed.topology.test_random_files import DESIGN_EXAMPLE

ROOT = Path(__file__).parents[3]
READY = sorted((ROOT / "topologies").glob("*.yaml"))
SCHEMA = json_schema()


def with_wan(**keys: Any) -> dict[str, Any]:
    wan = {"between": ["main", "remote"], **keys}
    return {**DESIGN_EXAMPLE, "wan": [wan]}


def test_the_schema_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", READY, ids=lambda file: file.stem)
def test_the_schema_accepts_every_ready_topology(file: Path) -> None:
    jsonschema.validate(yaml.safe_load(file.read_text()), SCHEMA)


def test_the_schema_accepts_the_example_of_the_design() -> None:
    jsonschema.validate(DESIGN_EXAMPLE, SCHEMA)


@pytest.mark.parametrize(
    "data",
    [
        with_wan(delay=20),
        with_wan(delay="20"),
        with_wan(delay="20 ms"),
        with_wan(rate="400mbps"),
        with_wan(loss="1"),
        with_wan(loss={"good_to_bad": "1%"}),
        with_wan(queue="8MiB"),
        with_wan(queue={"bytes": "8MB"}),
        with_wan(mtu=100),
        with_wan(dealy="20ms"),
        with_wan(driver="tc"),
        with_wan(tcp={"congestion": "Cubic!"}),
        with_wan(between=["main"]),
        {"name": "x"},
        {**DESIGN_EXAMPLE, "colour": "blue"},
        {**DESIGN_EXAMPLE, "datacenters": {"a": {"subnet": "fd00::/64"}}},
        {**DESIGN_EXAMPLE, "datacenters": {"a b": {"subnet": "10.1.0.0/24"}}},
        {**DESIGN_EXAMPLE, "datacenters": {"a": {"subnet": "10.1.0.0/24", "hosts": {"x": {"role": "decode"}}}}},
        {**DESIGN_EXAMPLE, "serving": {"relay_threshold": 0.95}},
        {**DESIGN_EXAMPLE, "api": {"listen": "8000"}},
    ],
    ids=repr,
)
def test_an_editor_marks_the_mistakes_that_the_loader_refuses(data: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)
    with pytest.raises(TopologyErrors):
        plan_from_text(yaml.safe_dump(data), "f.yaml")


def test_every_key_that_is_not_its_own_explanation_is_described() -> None:
    obvious = {"distribution", "tcp", "cpu", "fabric", "switch", "model", "serving", "kv_pool", "api", "dtype"}
    obvious |= {"connections", "listen"}
    sections = [SCHEMA, *SCHEMA["$defs"].values()]
    bare = {
        key
        for section in sections
        for key, field in section.get("properties", {}).items()
        if "description" not in field
    }
    assert bare <= obvious
    assert all(section.get("description") for section in sections)
