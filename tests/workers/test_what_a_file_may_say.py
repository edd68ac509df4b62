"""Whatever a topology file may say, workers take: every field that reaches them, at its bounds and by default.

The fields are those of the file's own models and the bounds those of its JSON Schema, so that a new field, or a bound
that is moved on one side only, fails here.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any, get_type_hints

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from testbed.lab.environment import host_environment
from testbed.topology import TopologyErrors, schema, speeds
from testbed.topology.load import plan_from_text
from testbed.topology.plan import HostPlan, LabPlan
from testbed.topology.section import Section
from workers.environment import Serving, read_environment

FILE = """
datacenters:
  main:
    subnet: 10.1.0.0/24
    hosts: {gw0: {role: gateway}, p0: {role: prefill, profile: fast}, rld0: {role: relay-decode}}
  remote: {subnet: 10.2.0.0/24, hosts: {md0: {role: main-decode, profile: slow}}}
wan: [{name: wan0, between: [main, remote], delay: 20ms, rate: 10gbit}]
profiles: {fast: {prefill: 9000 tokens/s, decode: 30ms}, slow: {relative_to: fast}}
serving: {}
"""
SCALE = {"kv_bytes_per_token": {"deployment": "4400B", "lab": "2KiB"}, "prompt_divisor": 4}
# Texts of every kind of value, small and large; those that a field refuses are not its business.
TEXTS = (
    *("0", "1", "2", "16", "1000000", "999999999999999", "-1"),
    *("0%", "0.0001%", "1%", "100%", "100000%", "true", "false", "none"),
    *("0s", "1ns", "1us", "1ms", "1s", "59min", "1h", "120min", "48h", "1000000h"),
    *("1kbit", "1mbit", "10gbit", "100tbit", "1B", "1KiB", "1GiB", "100TiB"),
    *("0.000001 tokens/s", "9000 tokens/s", "999999999999 tokens/s"),
    *("0.000001", "1.5", "1000", "some-text", "/a/path.gguf", "127.0.0.1:1", "0.0.0.0:65535"),
)
HOST = ("datacenters", "main", "hosts", "p0")
SECTIONS: dict[str, tuple[tuple[str | int, ...], type[Section]]] = {
    "serving": (("serving",), schema.Serving),
    "serving.kv_pool": (("serving", "kv_pool"), schema.KvPool),
    "serving.speculative": (("serving", "speculative"), schema.Speculative),
    "model": (("model",), schema.Model),
    "host": (HOST, schema.Host),
    "host.cpu": ((*HOST, "cpu"), schema.Cpu),
    "fabric": (("datacenters", "main", "fabric"), schema.Fabric),
    "wan": (("wan", 0), schema.Wan),
    "wan.forward": (("wan", 0, "forward"), schema.Direction),
    "wan.tcp": (("wan", 0, "tcp"), schema.Tcp),
    "profiles.fast": (("profiles", "fast"), speeds.Profile),
    "profiles.slow": (("profiles", "slow"), speeds.Profile),
    "scale": (("scale",), speeds.ScaleSection),
    "api": (("api",), schema.Api),
}
# Not values: sections of their own, names of other things, what never reaches a worker.
ELSEWHERE = {"kv_pool", "speculative", "cpu", "forward", "backward", "tcp", "kv_bytes_per_token", "jitter", "queue"}
ELSEWHERE |= {"between", "role", "command", "address", "publish", "environment", "affinity", "relative_to", "profile"}
ELSEWHERE |= {"names"}


def fields() -> Iterator[tuple[str, str]]:
    for section, (_, model) in SECTIONS.items():
        yield from ((section, name) for name in model.model_fields if name not in ELSEWHERE)


def values(section: str, name: str) -> list[str]:
    """Texts of a field: every choice; of what is counted the least and the most that is taken, and one between."""
    model = SECTIONS[section][1]
    described = model.model_json_schema()["properties"][name]
    texts: list[str] = []
    for part in (described, *described.get("anyOf", ())):
        texts += [*part.get("enum", ()), *part.get("examples", ())]
        texts += [str(part[key]) for key in ("const", "minimum", "maximum") if key in part]
    reader: TypeAdapter[Any] = TypeAdapter(get_type_hints(model, include_extras=True)[name])
    taken: dict[Any, str] = {}
    for text in (*texts, *TEXTS):
        with suppress(ValidationError):
            taken[reader.validate_python(text)] = text
    numbers = sorted(value for value in taken if isinstance(value, int | float))
    ends = {*numbers[:1], *numbers[len(numbers) // 2 : len(numbers) // 2 + 1], *numbers[-1:]}
    return [text for value, text in taken.items() if value not in numbers or value in ends]


def written(section: str, name: str, value: Any) -> str:
    document = yaml.load(FILE, yaml.BaseLoader)
    if section == "scale":
        document["scale"] = copy.deepcopy(SCALE)
    place = document
    for step in SECTIONS[section][0]:
        place = place[step] if isinstance(step, int) else place.setdefault(step, {})
    place[name] = value
    if name == "rtt":
        del place["delay"]
    return yaml.safe_dump(document)


def with_variable(name: str, value: str) -> str:
    return FILE.replace("role: prefill,", f"role: prefill, environment: {{{name}: {value!r}}},")


def told(plan: LabPlan, host: HostPlan) -> dict[str, str]:
    """A host's variables but those that name files of a running lab."""
    variables = host_environment(plan, host, "00" * 32, "/run/pddbed/lab/records")
    return {name: value for name, value in variables.items() if name not in ("PDDBED_LINKS", "PDDBED_UNWRITTEN")}


def check_workers(text: str) -> None:
    """Raises EnvironmentProblem when one would not start, TopologyErrors when the file is refused."""
    plan = plan_from_text(text, "lab.yaml", memory_bytes=1 << 50)
    for host in plan.hosts:
        read_environment(told(plan, host))


@pytest.mark.parametrize(("section", "name"), [pytest.param(*field, id=".".join(field)) for field in fields()])
def test_workers_take_every_value_of_a_field_that_the_file_may_have(section: str, name: str) -> None:
    taken = []
    for value in values(section, name):
        try:
            check_workers(written(section, name, value))
        except TopologyErrors:
            continue
        taken.append(value)
    assert taken, "no text that was tried is a value of this field; add one to TEXTS"


def test_what_a_file_leaves_out_is_what_a_worker_takes_by_itself() -> None:
    plan = plan_from_text(FILE, "lab.yaml", memory_bytes=1 << 50)
    assert asdict(read_environment(told(plan, plan.hosts[0])).serving) == asdict(Serving())


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "1.5", "1e9", "512MiB", "٣", "9" * 30])
def test_a_size_of_the_cache_that_no_worker_would_take_is_refused_in_the_file(value: str) -> None:
    with pytest.raises(TopologyErrors, match=r"PDDBED_KV_BYTES.*whole number of bytes"):
        check_workers(with_variable("PDDBED_KV_BYTES", value))


@pytest.mark.parametrize("value", ["1", "1000000", "9" * 18])
def test_a_size_of_the_cache_that_the_file_may_have_is_one_that_workers_take(value: str) -> None:
    check_workers(with_variable("PDDBED_KV_BYTES", value))
