"""`pddbed sim` as a user meets it."""

import itertools
import json
from pathlib import Path

from click.testing import CliRunner

from experiments.sim.workload import spread
from experiments.traces.sessions import SessionRecipe, generate_sessions
from experiments.traces.write import write_trace
from testbed.cli import main


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["sim", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_policies_are_compared_in_a_table_of_80_columns() -> None:
    status, out, _ = run("--num", "100")
    assert status == 0
    rows = out.splitlines()
    assert [row.split()[0] for row in rows[1:6]] == ["pdd", "cdc-pd", "idc-pd", "pdd-chunked", "cdc-pd-chunked"]
    assert max(len(row.rstrip()) for row in rows) <= 80


def test_json_says_what_was_simulated() -> None:
    status, out, _ = run("--num", "50", "--policy", "pdd", "--set", "relay_itl_s=0.2", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["deployment"]["relay_itl_s"] == 0.2
    assert list(found["policies"]) == ["pdd"]
    assert found["policies"]["pdd"]["completed"] == 50
    assert found["trace"]["warm_up"] == 64


def test_a_trace_of_ones_own_is_simulated(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl.gz"
    write_trace(generate_sessions(SessionRecipe(requests=40, sessions=4)), file)
    status, out, _ = run("--trace", str(file), "--policy", "cdc-pd", "--rate", "1", "--warm-up", "4", "--json")
    assert status == 0
    assert json.loads(out)["policies"]["cdc-pd"]["completed"] == 40


def test_spread_keeps_the_rhythm_of_each_session() -> None:
    trace = generate_sessions(SessionRecipe(requests=40, sessions=4))
    moved = spread(trace, 1000, 1)

    def gaps(session: int, requests: tuple) -> list[int]:  # type: ignore[type-arg]
        times = [one.time_ns for one in requests if one.session == session]
        return [after - before for before, after in itertools.pairwise(times)]

    assert all(gaps(session, trace.requests) == gaps(session, moved.requests) for session in range(4))


def test_bad_settings_are_usage_errors_and_bad_traces_failures(tmp_path: Path) -> None:
    for setting in ("speed=1", "relay_itl_s", "relay_itl_s=fast", "relay_itl_s=0", "prefill_nodes=1.5", "handoff=kv"):
        status, _, err = run("--num", "10", "--set", setting)
        assert status == 2, setting
        assert setting.partition("=")[0] in err
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 0, "input_length": 10}\n')
    status, _, err = run("--trace", str(broken))
    assert status == 1
    assert "broken.jsonl:1" in err


def test_the_keys_can_be_listed() -> None:
    status, out, _ = run("--set", "?")
    assert status == 0
    assert "prefill_nodes=6" in out
