"""One contract between a lab and its workers: a topology file may say exactly what workers take.

Every field of `serving:`, `model:` and `api:` is compared with the struct of the workers: name, default, unit, and what
both sides say to values below, at and above each bound of either. The other fields that reach a worker are tried at
their bounds. A new field, or a bound that is moved on one side only, fails here.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from msgspec import Struct, inspect
from pydantic import TypeAdapter, ValidationError

from testbed.lab.environment import host_environment
from testbed.model.plan import HostPlan, LabPlan
from testbed.model.units import DURATION, RATE, SIZE
from testbed.topology import TopologyErrors, schema, speeds
from testbed.topology.fields import Reads
from testbed.topology.load import plan_from_text
from testbed.topology.resolve import API_LIMITS
from testbed.topology.section import Section
from workers.environment import EnvironmentProblem, KvPool, Serving, Speculative, read_environment
from workers.gateway.limits import ApiLimits
from workers.models import ModelSpec

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
    environment = read_environment(told(plan, plan.hosts[0]))
    assert (environment.serving, environment.model, environment.api) == (Serving(), ModelSpec("tiny"), ApiLimits())


# Of the worker's struct: the section of the file, the variable, where in that, and what only workers have.
BOTH_SIDES: dict[type[Struct], tuple[str, str, tuple[str, ...], set[str]]] = {
    Serving: ("serving", "PDDBED_SERVING", (), {"kv_bytes_per_token", "kv_pool", "speculative"}),
    KvPool: ("serving.kv_pool", "PDDBED_SERVING", ("kv_pool",), set()),
    Speculative: ("serving.speculative", "PDDBED_SERVING", ("speculative",), set()),
    ModelSpec: ("model", "PDDBED_MODEL", (), {"device"}),
    ApiLimits: ("api", "PDDBED_API", (), {"names", "head_bytes", "bodies_bytes", "answers_bytes"}),
}
KEYS = {name: key for key, name in API_LIMITS.items()}
FORMATS = {kind.noun: f"{{}}{next(iter(kind.units))}" for kind in (DURATION, RATE, SIZE)}


def common_fields() -> Iterator[Any]:
    for kind, (section, *_, workers_only) in BOTH_SIDES.items():
        for one in inspect.type_info(kind).fields:  # type: ignore[attr-defined]
            if one.encode_name not in workers_only:
                yield pytest.param(kind, one, id=f"{section}.{one.encode_name}")


def reader_of(section: str, key: str) -> tuple[Any, dict[str, Any]]:
    """How the file reads a field, and what its JSON Schema says of it."""
    model = SECTIONS[section][1]
    hint = get_type_hints(model, include_extras=True)[key]
    described = model.model_json_schema()["properties"][key]
    for part in get_args(hint):  # Annotated[...] | None
        hint = part if any(isinstance(one, Reads) for one in getattr(part, "__metadata__", ())) else hint
    return hint, described.get("anyOf", [described])[0]


def probes(one: Any, hint: Any, described: dict[str, Any]) -> list[tuple[Any, str]]:
    """Values around the bounds of either side, as a worker is told them and as the file writes them."""
    kind = one.type.types[0] if isinstance(one.type, inspect.UnionType) else one.type
    reads = next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Reads)), None)
    if isinstance(kind, inspect.LiteralType):
        choices = {*kind.values, *described.get("enum", ()), "nonsense"}
        return [(choice, choice) for choice in sorted(choices)]
    if isinstance(kind, inspect.BoolType):
        return [(True, "true"), (False, "false"), (1, "1"), ("yes", "yes")]
    if isinstance(kind, inspect.FloatType):
        return [(percent / 100, f"{percent}%") for percent in (-1, 0, 50, 100, 100.01, 101)]
    if isinstance(kind, inspect.StrType):
        return [("tiny", "tiny"), ("", "")]
    bounds = {kind.ge, kind.le, described.get("minimum"), described.get("maximum"), 0, 1, 1000, 2**63 - 1} - {None}
    written_as = "{}" if reads is None or reads.kind is None else FORMATS[reads.kind.noun]
    return [(value, written_as.format(value)) for bound in sorted(bounds) for value in (bound - 1, bound, bound + 1)]


def test_the_file_and_the_workers_have_the_same_fields() -> None:
    for kind, (section, *_, workers_only) in BOTH_SIDES.items():
        of_workers = {KEYS.get(one.encode_name, one.encode_name) for one in inspect.type_info(kind).fields}  # type: ignore[attr-defined]
        of_file = set(SECTIONS[section][1].model_fields) - {"listen"}
        assert of_workers - {"kv_bytes_per_token", *(() if kind is Serving else workers_only)} == of_file - {"names"}


@pytest.mark.parametrize(("kind", "one"), list(common_fields()))
def test_the_file_takes_what_workers_take_and_refuses_what_they_refuse(kind: type[Struct], one: Any) -> None:
    section, variable, place, _ = BOTH_SIDES[kind]
    key = KEYS.get(one.encode_name, one.encode_name)
    hint, described = reader_of(section, key)
    said = probes(one, hint, described)
    answers = set()
    for value, text in said:
        told_value: Any = {one.encode_name: value, **({"name": "tiny"} if key == "seed" or key == "dtype" else {})}
        for step in reversed(place):
            told_value = {step: told_value}
        try:
            read_environment({**told_by_default(), variable: json.dumps(told_value)})
            worker = None
        except EnvironmentProblem as error:
            worker = str(error)
        try:
            TypeAdapter(hint).validate_python(text)
            file = None
        except ValidationError as error:
            file = str(error)
        assert (worker is None) == (file is None), f"{text} ({value!r}): the worker says {worker}, the file {file}"
        answers.add(worker is None)
    assert True in answers
    assert False in answers, "no value that was tried is refused"


@cache
def told_by_default() -> dict[str, str]:
    plan = plan_from_text(FILE, "lab.yaml", memory_bytes=1 << 50)
    return told(plan, plan.hosts[0])


@pytest.mark.parametrize(("kind", "one"), list(common_fields()))
def test_a_value_of_the_file_reaches_the_worker_in_its_unit(kind: type[Struct], one: Any) -> None:
    section, _, place, _ = BOTH_SIDES[kind]
    key = KEYS.get(one.encode_name, one.encode_name)
    hint, described = reader_of(section, key)
    for value, text in probes(one, hint, described):
        try:
            plan = plan_from_text(written(section, key, text), "lab.yaml", memory_bytes=1 << 50)
        except TopologyErrors:
            continue
        environment = read_environment(told(plan, plan.hosts[0]))
        got: Any = {"serving": environment.serving, "model": environment.model, "api": environment.api}[
            section.split(".")[0]
        ]
        for step in place:
            got = getattr(got, step)
        assert getattr(got, one.name) == value


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "1.5", "1e9", "512MiB", "٣", "9" * 30])
def test_a_size_of_the_cache_that_no_worker_would_take_is_refused_in_the_file(value: str) -> None:
    with pytest.raises(TopologyErrors, match=r"PDDBED_KV_BYTES.*whole number of bytes"):
        check_workers(with_variable("PDDBED_KV_BYTES", value))


@pytest.mark.parametrize("value", ["1", "1000000", "9" * 18])
def test_a_size_of_the_cache_that_the_file_may_have_is_one_that_workers_take(value: str) -> None:
    check_workers(with_variable("PDDBED_KV_BYTES", value))
