"""`pddbed sim` as a user meets it."""

import itertools
import json
from pathlib import Path

from click.testing import CliRunner

from experiments.sim.workload import spread
from experiments.traces.generate import SessionRecipe, generate_sessions
from experiments.traces.mooncake import write_trace
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


def test_what_is_cut_left_out_or_moved_is_told(tmp_path: Path) -> None:
    lengths = ((500, 10), (2000, 0), (3000, 5), (900, 200), (100, 1), (100, 1))
    rows = [
        {
            "timestamp": 1000 * at,
            "input_length": tokens,
            "output_length": answer,
            "hash_ids": list(range(-(-tokens // 16))),
        }
        for at, (tokens, answer) in enumerate(lengths)
    ]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (
        "--trace",
        str(file),
        "--policy",
        "pdd",
        "--set",
        "context_tokens=1000",
        "--warm-up",
        "1",
        "--num",
        "4",
    )
    status, out, _ = run(*arguments, "--rate", "2", "--json")
    assert status == 0
    trace = json.loads(out)["trace"]
    wanted = {"warm_up": 1, "cut_prompts": 2, "answers_beyond_context": 2, "empty_answers": 1, "beyond_num": 1}
    assert trace["left_out"] == wanted
    assert trace["notes"] == ["Times are 0.5 times the trace's, for 2 requests a second."]
    _, table, _ = run(*arguments)
    said = " ".join(table.split())
    assert "2 of 4 prompts are longer than context_tokens and were cut to it" in said
    assert "2 of 4 answers go beyond context_tokens with their prompt, and were not cut" in said
    assert "1 requests of the trace are left out behind --num" in said


def test_a_last_block_in_part_hits_as_in_trace_stats(tmp_path: Path) -> None:
    row = {"input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"timestamp": at * 10**6, **row}) + "\n" for at in range(2)))
    for policy in ("pdd", "prfaas"):
        _, out, _ = run("--trace", str(file), "--policy", policy, "--json")
        found = json.loads(out)["policies"][policy]
        assert found["mean_p_hit"] == (39 / 40) / 2
        assert found["kv_bytes"] >= 0


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
