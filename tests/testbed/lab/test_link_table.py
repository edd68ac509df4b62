"""What workers are told of the links: the lab's file as its readers understand it, and a lab whose links change."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.lab import link_table
from testbed.model.impairment import Jitter
from testbed.topology import load_plan
from testbed.topology.overlay import laid_over
from tests.conftest import ROOT, Lab, run_pddbed
from workers.wire import link_table as reading

TINY = ROOT / "topologies" / "two-dc-tiny.yaml"
S = 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`clock(s)`: both sides' CLOCK_MONOTONIC from now on."""
    now = [0]
    monkeypatch.setattr(link_table.time, "monotonic_ns", lambda: now[0])

    def at(seconds: float) -> None:
        now[0] = int(seconds * S)

    at(100)
    return at


def table_of(tmp_path: Path, text: str) -> tuple[link_table.LinkTable, Any, Callable[[str, str], reading.PresentLink]]:
    file = tmp_path / "lab.yaml"
    file.write_text(text)
    plan = load_plan(file)
    table = link_table.LinkTable(tmp_path / "links", plan)
    reader = reading.LinkTable(str(tmp_path / "links"))
    rows = link_table.rows_of(plan)
    return table, plan, lambda here, there: reader.link(rows[here, there])


def test_the_file_begins_with_what_the_topology_says_and_the_environment_names_the_row(tmp_path: Path) -> None:
    _, plan, link = table_of(tmp_path, laid_over(TINY, {"wan.wan0.jitter": {"std": "1ms"}}))
    told = link_table.paths_from(plan, "remote")
    queue_ns = 2 * (plan.wans[0].forward.queue_bytes * 8 * S // 400_000_000 + 6_000_000)
    assert told == {"main": {"rtt_ns": 40_000_000, "rate_bps": 400_000_000, "queue_ns": queue_ns, "row": 1}}
    assert link("remote", "main").now() == link("remote", "main").longest() == (40_000_000, 400_000_000, queue_ns)


def test_a_change_counts_at_once_and_what_was_until_its_last_byte_has_arrived(tmp_path: Path, clock: Any) -> None:
    table, plan, link = table_of(tmp_path, TINY.read_text())
    wan, there = plan.wans[0], link("main", "remote")
    size = wan.forward.queue_bytes
    slow = replace(wan.forward, rate_bps=500_000, delay_ns=3 * S)
    table.change("wan0", {"forward": slow, "backward": wan.backward})
    queue_ns = slow.serialization_ns(size) + wan.backward.serialization_ns(size)
    assert there.now().rtt_ns == 3_020_000_000
    clock(101.1)  # a rate counts as its mean over a second
    table.refresh()
    assert there.now() == (3_020_000_000, 500_000, queue_ns)
    assert there.longest()[0::2] == (3_020_000_000, queue_ns)
    assert link("remote", "main").now() == (3_020_000_000, 400_000_000, queue_ns), "its own direction's rate"
    clock(200)
    table.change("wan0", {"forward": wan.forward, "backward": wan.backward})
    assert there.now().rtt_ns == 40_000_000
    clock(201.1)
    table.refresh()
    clock(203)
    assert there.longest().rtt_ns == 3_020_000_000, "it still may arrive"
    assert there.longest().queue_ns < S, "what waits in the buffer leaves at the new rate"
    clock(201 + 3.02 + queue_ns / S)
    assert there.longest() == there.now()


def test_a_buffer_that_is_full_drains_at_the_rate_that_is_now(tmp_path: Path, clock: Any) -> None:
    table, plan, link = table_of(tmp_path, TINY.read_text())
    wan = plan.wans[0]
    full = replace(wan.forward, queue_bytes=2_000_000)
    table.change("wan0", {"forward": full, "backward": wan.backward})
    clock(150)
    table.change(
        "wan0", {"forward": replace(wan.forward, rate_bps=500_000, queue_bytes=100_000), "backward": wan.backward}
    )
    clock(152)
    table.refresh()
    assert link("main", "remote").longest().queue_ns > 32 * S
    assert link("main", "remote").now().queue_ns < 2 * S


def test_a_ramp_down_takes_the_deadlines_down_with_it(tmp_path: Path, clock: Any) -> None:
    """From 20 s to 0 within 100 s, a hundred changes a second."""
    table, plan, link = table_of(tmp_path, laid_over(TINY, {"wan.wan0.rate": None}))
    wan = plan.wans[0]
    for step in range(10_000):
        clock(200 + step / 100)
        delay_ns = 20 * S - step * S // 500
        table.change("wan0", dict.fromkeys(("forward", "backward"), replace(wan.forward, delay_ns=delay_ns)))
        if step == 5000:
            clock(250)
            # two thirds of the round trip's 40 s ago, at 35 s, what was sent then is still on its way
            assert 2 * delay_ns < link("main", "remote").longest().rtt_ns < 36 * S
    clock(201 + 100)
    assert link("main", "remote").longest().rtt_ns < S


def test_a_replay_counts_as_its_mean_and_what_it_holds_as_an_outage(tmp_path: Path, clock: Any) -> None:
    """Every other 20 ms nothing leaves: 1 kbit/s is how a trace's empty bin is played, and moves no deadline."""
    table, plan, link = table_of(tmp_path, TINY.read_text())
    wan, there = plan.wans[0], link("main", "remote")
    for step in range(500):
        clock(200 + step / 50)
        rate_bps = 1_000 if step % 2 else 8_000_000 + 1_000_000 * (step % 4)
        table.change("wan0", {"forward": replace(wan.forward, rate_bps=rate_bps), "backward": wan.backward})
    table.refresh()
    assert 8_000_000 < there.now().rate_bps < 11_000_000
    size = wan.forward.queue_bytes
    assert there.longest().queue_ns < 2 * (size * 8 * S // 8_000_000)
    table.change("wan0", {"forward": replace(wan.forward, rate_bps=1_000), "backward": wan.backward})
    for second in range(210, 300):
        clock(second)
        table.refresh()
    assert there.longest().queue_ns < 2 * (size * 8 * S // 8_000_000), "also when it holds for minutes"


def test_a_fabric_counts_for_its_own_datacenter_and_for_every_path_that_begins_or_ends_there(tmp_path: Path) -> None:
    text = laid_over(TINY, {"datacenters.main.fabric": {"rate": "100mbit", "delay": "100ms"}})
    _, plan, link = table_of(tmp_path, text)
    inside, across = link("main", "main").now(), link("main", "remote").now()
    assert inside.rtt_ns == 200_000_000
    assert inside.rate_bps == across.rate_bps == 100_000_000
    assert across.rtt_ns == 240_000_000
    assert link_table.paths_from(plan, "main")["main"]["rtt_ns"] == 200_000_000
    assert "remote" not in link_table.paths_from(plan, "remote")


def test_limits_of_the_link_are_told_from_64_kbit_to_10_gbit(tmp_path: Path, clock: Any) -> None:
    table, plan, link = table_of(tmp_path, TINY.read_text())
    wan = plan.wans[0]
    for at, rate_bps in enumerate((64_000, 10_000_000_000)):
        clock(1000 * at)
        for delay_ns in (0, 20 * S):
            values = replace(wan.forward, rate_bps=rate_bps, delay_ns=delay_ns, jitter=Jitter(1_000_000))
            table.change("wan0", {"forward": values, "backward": values})
            clock(1000 * at + 2)
            table.refresh()
            assert link("main", "remote").now()[:2] == (2 * delay_ns, rate_bps)


# -- a lab ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    result = run_pddbed("up", "topologies/two-dc-tiny.yaml", "--name", "moving", "--api", "auto", "--no-verify")
    assert result.returncode == 0, result.stderr
    yield Lab("moving")
    assert run_pddbed("down", "moving").returncode == 0


def set_link(**values: str) -> None:
    options = [word for key, value in values.items() for word in (f"--{key}", value)]
    result = run_pddbed("wan", "set", "wan0", *options, "--lab", "moving")
    assert result.returncode == 0, result.stderr


def losses(lab: Lab) -> list[str]:
    """What any worker has said of lost connections since the lab is up."""
    logs = Path(f"/run/pddbed/{lab.name}/logs/hosts").glob("*.log")
    return [line for log in logs for line in log.read_text().splitlines() if " lost " in line or "handshake" in line]


def ask(lab: Lab, prompt: list[int], tokens: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{lab.status()['api']}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.root
@pytest.mark.nightly
def test_main_decode_stays_when_a_link_becomes_long(lab: Lab) -> None:
    set_link(delay="3s")
    changed = time.monotonic()
    answer = ask(lab, list(range(1, 200)), 100)
    record = record_of(lab, answer["id"])
    assert record["pdd_recovery"] == record["pdd_unsettled"] == []
    assert record["pdd_kv_xfer_ms"] > 3000, "main decode has the KV"
    time.sleep(max(0, changed + 22 - time.monotonic()))  # by then it was lost, with the deadlines of the file's link
    assert losses(lab) == []
    set_link(delay="20ms")
    assert ask(lab, list(range(50, 250)), 1500)["pdd"]["instances"][-1] == "md0"
    assert losses(lab) == []


def record_of(lab: Lab, request: str) -> dict[str, Any]:
    """The line that a request leaves when every worker has let go of it."""
    file, end = Path(f"/run/pddbed/{lab.name}/records/requests.jsonl"), time.monotonic() + 90
    while time.monotonic() < end:
        for line in file.read_text().splitlines() if file.exists() else []:
            record: dict[str, Any] = json.loads(line)
            if record["request_id"] == request:
                return record
        time.sleep(0.2)
    raise AssertionError(f"{request} is not settled")


@pytest.mark.root
def test_ramps_steps_and_replays_are_told_like_changes_by_hand(lab: Lab, tmp_path: Path) -> None:
    set_link(delay="20ms", rate="400mbit")
    table = reading.LinkTable(f"/run/pddbed/{lab.name}/links.now")
    row = link_table.rows_of(load_plan(ROOT / "topologies/two-dc-tiny.yaml"))["main", "remote"]
    (tmp_path / "trace.csv").write_text("time:s,rate:mbit,delay:ms\n0,8,300\n0.5,16,300\n")
    (tmp_path / "timeline.yaml").write_text(
        "- ramp: {at: 100ms, duration: 500ms, link: wan0, delay: [20ms, 2s]}\n"
        "- step: {at: 1s, link: wan0, delay: 100ms}\n"
        f"- replay: {{at: 2s, duration: 2s, link: wan0, trace: {tmp_path}/trace.csv}}\n"
    )
    result = run_pddbed("wan", "play", "-l", lab.name, str(tmp_path / "timeline.yaml"))
    assert result.returncode == 0, result.stderr
    seen, end = [], time.monotonic() + 8
    while time.monotonic() < end:
        seen.append(table.link(row).now())
        time.sleep(0.05)
    trips = [link.rtt_ns for link in seen]
    assert max(trips) == 4 * S, "the ramp's end"
    rates = [link.rate_bps or 0 for link in seen if link.rtt_ns == 600_000_000]
    assert any(8_000_000 <= rate_bps <= 16_100_000 for rate_bps in rates), "the replay, as its mean over a second"
    assert table.link(row).now()[:2] == (200_000_000, 400_000_000), "what the replay found"
    set_link(delay="20ms")


@pytest.mark.root
@pytest.mark.nightly
def test_nothing_is_lost_while_kv_fills_a_link_that_became_slow(lab: Lab) -> None:
    set_link(delay="20ms", rate="500kbit", queue="2MiB")
    before = losses(lab)
    answer = ask(lab, [(7 * index) % 251 for index in range(700)], 40)  # 1.4 MB: 23 s
    assert answer["choices"][0]["finish_reason"] == "length"
    record = record_of(lab, answer["id"])
    assert record["pdd_kv_xfer_ms"] > 18_000
    assert record["pdd_recovery"] == []
    assert losses(lab) == before
    set_link(rate="400mbit", queue="bdp:1.5")
