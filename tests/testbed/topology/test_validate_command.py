"""`pddbed validate` and `pddbed schema` through the real command."""

import json
from pathlib import Path

from tests.conftest import ROOT, run_pddbed

WRONG = ROOT / "tests" / "fixtures" / "wrong-topologies"


def test_a_valid_file_is_described_and_the_status_is_0() -> None:
    result = run_pddbed("validate", "topologies/two-dc.yaml", "topologies/three-dc.yaml")
    assert (result.returncode, result.stderr) == (0, "")
    assert 'topologies/two-dc.yaml: lab "two-dc"' in result.stdout
    assert "wan0: main <-> remote: 400mbit, 20ms, queue 2MB (40ms) each way; RTT 40ms" in result.stdout
    assert 'topologies/three-dc.yaml: lab "three-dc"' in result.stdout


def test_every_mistake_is_on_stderr_with_its_line_under_it_and_the_status_is_1() -> None:
    result = run_pddbed("validate", str(WRONG / "delay-without-unit.yaml"), "topologies/two-dc.yaml")
    assert result.returncode == 1
    assert 'lab "two-dc"' in result.stdout
    lines = result.stderr.splitlines()
    assert f'{WRONG}/delay-without-unit.yaml:17:12: wan[0].delay: "20" has no unit' in lines[3]
    assert lines[4:6] == ["    17 |     delay: 20", "       |            ^^"]
    assert lines[6].endswith("2 mistakes")


def test_json_has_the_plan_or_the_mistakes_of_every_file() -> None:
    result = run_pddbed("validate", "--json", str(WRONG / "delay-without-unit.yaml"), "topologies/two-dc.yaml")
    assert (result.returncode, result.stderr) == (1, "")
    wrong, right = json.loads(result.stdout)
    assert [error["line"] for error in wrong["errors"]] == [16, 17]
    assert wrong["errors"][1]["path"] == "wan[0].delay"
    assert right["valid"]
    assert right["plan"]["wans"][0]["forward"]["delay_ns"] == 20_000_000


def test_a_file_that_is_not_there_is_a_mistake_like_any_other(tmp_path: Path) -> None:
    result = run_pddbed("validate", str(tmp_path / "none.yaml"))
    assert result.returncode == 1
    assert result.stderr == f"{tmp_path}/none.yaml: there is no such file\n"


def test_without_a_file_it_is_a_usage_error() -> None:
    assert run_pddbed("validate").returncode == 2


def test_schema_prints_a_json_schema() -> None:
    result = run_pddbed("schema")
    assert result.returncode == 0
    assert json.loads(result.stdout)["properties"]["datacenters"]
