"""Timelines on a real lab: what is asked happens when it is asked, to the packets it is asked for, and ends.

One lab for all of them; each test plays a timeline of its own with `pddbed wan play`.
"""

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.congestion.traffic.pacing import burst_seed, bursts
from testbed.lab.control import ask_lab
from testbed.lab.messages import WanPlaying, WanReset, WanSet, WanShow, WanStop
from testbed.lab.record import find_record
from tests.conftest import run_pddbed
from tests.testbed.congestion.probes import probe
from tests.testbed.topology.timeline.timelines import MBIT, MS, SECOND
from workers.events import Teller

pytestmark = [pytest.mark.root, pytest.mark.quiet]
NAME = "congestion-test"
SEED = 7
TOPOLOGY = f"""\
seed: {SEED}
datacenters:
  main:   {{subnet: 10.1.0.0/24, hosts: {{a: {{address: 10.1.0.2}}}}}}
  remote: {{subnet: 10.2.0.0/24, hosts: {{b: {{address: 10.2.0.2}}}}}}
wan:
  - {{name: wan0, between: [main, remote], rate: 20mbit, delay: 10ms, queue: {{bytes: 100KiB}}}}
congestion:
  - step: {{at: 200ms, delay: 20ms}}
"""
BEFORE = {"rate_bps": 20 * MBIT, "delay_ns": 20 * MS, "queue_bytes": 100 * 1024}
# Between a move's effect and the packets around it: a thread of this test may be preempted between stamp and send.
SLACK_NS = 10 * MS


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("congestion") / "lab.yaml"
    file.write_text(TOPOLOGY)
    result = run_pddbed("up", str(file), "--name", NAME, "--no-workers", "--no-verify")
    assert result.returncode == 0, result.stderr
    yield NAME
    run_pddbed("down", NAME)


@pytest.fixture(autouse=True)
def _as_in_the_file(lab: str) -> Iterator[None]:
    """Every test finds the link as the file and its own timeline leave it, and nothing playing."""
    yield
    record = find_record(lab)
    if playing(lab)["state"] in ("preparing", "playing", "waiting"):
        ask_lab(record, WanStop())
    ask_lab(record, WanReset())
    ask_lab(record, WanSet("wan0", None, {"delay": "20ms"}))


def playing(lab: str) -> dict[str, Any]:
    state: Any = ask_lab(find_record(lab), WanPlaying()).congestion
    return state


def shown(lab: str) -> dict[str, Any]:
    link: Any = ask_lab(find_record(lab), WanShow()).links[0]
    return link


def change_log(lab: str, since_ns: int = 0) -> list[dict[str, Any]]:
    lines = (find_record(lab).results / "congestion.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["monotonic_ns"] >= since_ns]


def play(lab: str, text: str, tmp_path: Path, *options: str) -> int:
    """Begin a timeline; returns its zero."""
    file = tmp_path / "timeline.yaml"
    file.write_text(text)
    result = run_pddbed("wan", "play", "-l", lab, str(file), "--json", *options)
    assert result.returncode == 0, result.stderr
    zero: int = json.loads(result.stdout)["began_monotonic_ns"]
    return zero


def wait_until_over(lab: str, timeout_s: float = 15) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while (state := playing(lab))["state"] not in ("over", "stopped", "failed"):
        assert time.monotonic() < deadline, state
        time.sleep(0.05)
    assert not state["errors"], state
    return state


def sleep_until(moment_ns: int) -> None:
    time.sleep(max(0.0, (moment_ns - time.monotonic_ns()) / 1e9))


def forward_probe(lab: str, port: int) -> Any:
    return probe(lab, "a", "b", "10.2.0.2", port)


def test_a_topologys_timeline_begins_when_the_lab_is_up(lab: str) -> None:
    state = wait_until_over(lab)
    assert (state["applied"], state["source"].endswith("lab.yaml")) == (1, True)
    asked = shown(lab)["asked"]
    for direction in ("forward", "backward"):
        assert {key: asked[direction][key] for key in BEFORE} == BEFORE
    output = run_pddbed("wan", "show", "-l", lab).stdout
    assert "lab.yaml: over" in output
    assert "1 changes applied" in output


def test_a_step_changes_the_delay_when_and_as_asked_and_keeps_the_rest(lab: str, tmp_path: Path) -> None:
    with forward_probe(lab, 7001) as packets:
        with packets.sending(per_second=500):
            zero = play(lab, "- step: {at: 500ms, delay: 60ms, direction: forward}\n", tmp_path)
            sleep_until(zero + SECOND)
        time.sleep(0.1)
        (step,) = [entry for entry in change_log(lab, zero) if entry["what"] == "set"]
    assert step["logical_ns"] == 500 * MS
    assert step["due_ns"] == zero + 500 * MS
    assert 0 <= step["late_ns"] < 50 * MS
    effect = step["due_ns"] + step["late_ns"]
    delays = packets.delays_ms()
    old = [delay for sent, delay in delays if sent < step["due_ns"] - 25 * MS]
    new = [delay for sent, delay in delays if sent > effect]
    assert len(old) > 20
    assert len(new) > 100
    for found, asked_ms in ((old, 20), (new, 60)):
        assert min(found) >= asked_ms
        # The fastest tenth: a busy machine's hosts deliver late, but never early.
        assert statistics.quantiles(found, n=10)[0] < asked_ms + 1
    assert len(packets.received) == len(packets.sent), "no packet is lost by a change"
    asked = shown(lab)["asked"]
    assert asked["forward"] == {**shown(lab)["file"]["forward"], "delay_ns": 60 * MS}
    assert asked["backward"]["delay_ns"] == 20 * MS


def test_an_outage_loses_exactly_the_packets_sent_in_it_and_none_in_flight(lab: str, tmp_path: Path) -> None:
    timeline = (
        "- step: {at: 0s, delay: 200ms, direction: forward}\n"  # 200 packets are in flight when the link is cut
        "- outage: {at: 400ms, duration: 1s, direction: forward}\n"
    )
    with forward_probe(lab, 7002) as packets:
        with packets.sending(per_second=1000):
            zero = play(lab, timeline, tmp_path)
            sleep_until(zero + 1600 * MS)
        time.sleep(0.4)
        entries = {entry["what"]: entry for entry in change_log(lab, zero)}
    began, ended = (entries[what]["due_ns"] for what in ("cut", "heal"))
    cut_by = began + entries["cut"]["late_ns"]
    healed_by = ended + entries["heal"]["late_ns"]
    lost = sorted(set(range(len(packets.sent))) - set(packets.received))
    assert lost == list(range(lost[0], lost[-1] + 1)), "one gap"
    assert began - SLACK_NS <= packets.sent[lost[0]] <= cut_by + SLACK_NS
    assert ended - SLACK_NS <= packets.sent[lost[-1]] <= healed_by + SLACK_NS
    assert [at for at in packets.sent if cut_by < at < ended] == [
        packets.sent[number] for number in lost if cut_by < packets.sent[number] < ended
    ], "everything sent in it is lost"
    assert entries["heal"]["dropped"] == [["wan0", "forward", len(lost), len(lost) * 128]]
    assert (entries["cut"]["logical_ns"], ended - began) == (400 * MS, SECOND)
    before = [number for number, at in enumerate(packets.sent) if began - 200 * MS < at < began - SLACK_NS]
    assert len(before) > 100
    assert set(before) <= set(packets.received), "what is in flight arrives"
    counters = shown(lab)["counters"]["forward"]
    assert counters["dropped_unasked"] == 0


def test_a_ramp_is_monotonic_at_the_receiver(lab: str, tmp_path: Path) -> None:
    timeline = "- ramp: {at: 200ms, duration: 1s, delay: [20ms, 120ms], direction: forward}\n"
    with forward_probe(lab, 7003) as packets:
        with packets.sending(per_second=1000):
            zero = play(lab, timeline, tmp_path)
            sleep_until(zero + 1400 * MS)
        time.sleep(0.2)
    steps = [entry for entry in change_log(lab, zero) if entry["what"] == "set"]
    values = [entry["values"]["delay_ns"] for entry in steps]
    skipped = sum(entry.get("superseded", 0) for entry in steps)
    assert len(steps) + skipped == 51
    assert (values[0], values[-1]) == (20 * MS, 120 * MS)
    assert values == sorted(set(values))
    delays = packets.delays_ms()
    medians = []
    for tenth in range(11):
        began = zero + 200 * MS + tenth * 100 * MS
        medians.append(statistics.median(delay for sent, delay in delays if began <= sent < began + 100 * MS))
    assert medians == sorted(set(medians)), medians
    for tenth, median in enumerate(medians[:-1]):
        assert median == pytest.approx(20 + 10 * tenth + 5, abs=3), medians
    assert len(packets.received) == len(packets.sent)


def rate_bps(lab: str, seconds: float, direction: str = "forward") -> float:
    """What goes onto the link, by its own counter."""
    sums = []
    for pause in (seconds, 0):
        before = time.monotonic_ns()
        count = shown(lab)["counters"][direction]["bytes"]
        sums.append((count, (before + time.monotonic_ns()) / 2))
        time.sleep(pause)
    (first, start), (last, end) = sums
    return (last - first) * 8e9 / (end - start)


def test_udp_cross_traffic_takes_its_share_beside_a_tcp_flow_and_stops(lab: str, tmp_path: Path) -> None:
    timeline = "- cross_traffic: {at: 300ms, duration: 4s, protocol: udp, rate: 8mbit, flows: 2, direction: forward}\n"
    assert run_pddbed("wan", "set", "-l", lab, "wan0", "--queue", "400KiB").returncode == 0  # TCP needs a queue to fill
    zero = play(lab, timeline, tmp_path)
    sleep_until(zero + 700 * MS)
    assert rate_bps(lab, 0.8) == pytest.approx(8 * MBIT, rel=0.03), "alone: its rate in IP bytes"
    server = run_pddbed("exec", "-l", lab, "b", "--", "sh", "-c", "iperf3 -s -1 -D --logfile /dev/null")
    assert server.returncode == 0
    command = ["exec", "-l", lab, "a", "--", "iperf3", "-c", "10.2.0.2", "-t", "60"]
    client = threading.Thread(target=run_pddbed, args=command)
    client.start()
    sleep_until(zero + 3200 * MS)
    assert rate_bps(lab, 1.0) == pytest.approx(20 * MBIT, rel=0.03), "beside a TCP flow: the link is full"
    assert run_pddbed("exec", "-l", lab, "a", "--", "sh", "-c", "kill $(pidof iperf3)").returncode == 0
    client.join()
    wait_until_over(lab)
    assert rate_bps(lab, 0.3) == 0, "it has stopped"
    (report,) = [entry for entry in change_log(lab, zero) if entry["what"] == "traffic"]
    sent = [flow["packets"] for flow in report["sent"]["flows"]]
    assert sum(sent) == pytest.approx(8 * MBIT * 4 / 8 / 1500, rel=0.01)
    assert abs(sent[0] - sent[1]) <= 1
    received = sum(flow["packets"] for flow in report["received"]["flows"])
    assert received == pytest.approx(sum(sent), rel=0.05), "UDP does not yield: TCP got the rest"
    assert report["received"]["dropped_at_socket"] == 0


def test_tcp_cross_traffic_fills_the_link_from_its_own_hosts_and_stops(lab: str, tmp_path: Path) -> None:
    timeline = "- cross_traffic: {at: 0s, duration: 2500ms, flows: 4, direction: backward}\n"
    zero = play(lab, timeline, tmp_path)
    sleep_until(zero + SECOND)
    assert rate_bps(lab, 1.2, "backward") == pytest.approx(20 * MBIT, rel=0.03)
    wait_until_over(lab)
    assert rate_bps(lab, 0.3, "backward") == 0
    (report,) = [entry for entry in change_log(lab, zero) if entry["what"] == "traffic"]
    assert 0 <= report["sent"]["ended_ns"] - (zero + 2500 * MS) < 300 * MS, "it stops when it is asked to"
    drained = (20 + 41 + 100) * MS  # the delay, a full queue, and the TCP ends' own lateness
    assert report["received"]["last_ns"] < report["sent"]["ended_ns"] + drained, "nothing unsent follows"
    assert (report["link"], report["direction"]) == ("wan0", "backward")
    assert len(report["received"]["flows"]) == 4
    assert report["received"]["bytes"] == pytest.approx(20 * MBIT * 2.5 / 8 * 1448 / 1500, rel=0.1)


def test_the_same_seed_gives_the_same_bursts(lab: str, tmp_path: Path) -> None:
    timeline = (
        "- cross_traffic: {at: 0s, duration: 1s, protocol: udp, rate: 4mbit, flows: 3, direction: forward,"
        " bursts: {on: 100ms, off: 100ms}}\n"
    )
    expected = []
    for flow in range(3):
        on = sum(end - start for start, end in bursts(burst_seed(SEED, 0, 0, 0, flow), SECOND, 100 * MS, 100 * MS))
        expected.append(on * (4 * MBIT // 3) // (1500 * 8 * SECOND))
    zero = play(lab, timeline, tmp_path)
    wait_until_over(lab)
    (report,) = [entry for entry in change_log(lab, zero) if entry["what"] == "traffic"]
    for flow, packets in zip(report["sent"]["flows"], expected, strict=True):
        assert packets - 2 <= flow["packets"] <= packets, "what is due in the last millisecond may stay unsent"


@pytest.fixture
def trace(tmp_path: Path) -> list[int]:
    """Delivery times in ms: 12, 4 (after a gap of 300 ms) and 8 Mbit/s, a second each."""
    times = list(range(1, 1001))
    times += [1300 + round(k * 700 / 333) for k in range(1, 334)]
    times += [2000 + round(k * 1000 / 667) for k in range(1, 668)]
    (tmp_path / "link.mahi").write_text("".join(f"{at}\n" for at in times))
    return times


def test_a_mahimahi_trace_delivers_what_it_recorded_second_by_second(
    lab: str, tmp_path: Path, trace: list[int]
) -> None:
    # A queue that outlasts this sender's pauses: a trace delivers only what is there to be delivered.
    assert run_pddbed("wan", "set", "-l", lab, "wan0", "--queue", "1MiB").returncode == 0
    timeline = "- replay: {at: 500ms, duration: 3s, trace: link.mahi, direction: forward}\n"
    with forward_probe(lab, 7004) as packets:
        with packets.sending(per_second=2000, size=1472):  # 24 Mbit/s: there is always a queue
            zero = play(lab, timeline, tmp_path)
            sleep_until(zero + 3600 * MS)
    state = wait_until_over(lab)
    began = zero + 500 * MS + 20 * MS  # what leaves the bottleneck arrives after the delay
    for second in range(3):
        recorded = sum(1500 for at in trace if second * 1000 < at <= (second + 1) * 1000)
        arrived = sum(
            packets.sizes[number]
            for number, at in packets.received.items()
            if began + second * SECOND < at <= began + (second + 1) * SECOND
        )
        assert arrived == pytest.approx(recorded, rel=0.05), (second, state)
    asked = shown(lab)["asked"]["forward"]
    assert asked == {**shown(lab)["file"]["forward"], "delay_ns": 20 * MS, "queue_bytes": 2**20}, "put back as found"
    assert shown(lab)["counters"]["forward"]["dropped_unasked"] == 0


def test_a_serving_event_cuts_the_link_when_enough_has_crossed(lab: str, tmp_path: Path) -> None:
    timeline = "- outage: {when: {event: kv-transfer, fraction: 60%}, duration: 300ms, direction: forward}\n"
    zero = play(lab, timeline, tmp_path)
    assert "waits for kv-transfer at 60%: outage on wan0 forward" in run_pddbed("wan", "show", "-l", lab).stdout
    teller = Teller(str(find_record(lab).events_socket))
    told_at = 0
    for share in (0.2, 0.59, 0.61, 0.8, 1.0):
        told_at = time.monotonic_ns() if share == 0.61 else told_at
        assert teller.tell("kv-transfer", request="cmpl-1", fraction=share)
        time.sleep(0.02)
    wait_until_over(lab)
    entries = {entry["what"]: entry for entry in change_log(lab, zero)}
    assert entries["triggered"]["fraction"] == 0.61
    assert entries["triggered"]["request"] == "cmpl-1"
    cut = entries["cut"]
    assert told_at <= cut["due_ns"] <= told_at + 5 * MS, "the outage counts from when the sender says it happened"
    assert cut["late_ns"] < 50 * MS
    assert entries["heal"]["due_ns"] - cut["due_ns"] == 300 * MS
    assert not find_record(lab).events_socket.exists()


def ping_works(lab: str) -> bool:
    return run_pddbed("exec", "-l", lab, "a", "--", "ping", "-n", "-c", "1", "-W", "1", "10.2.0.2").returncode == 0


def test_stop_heals_ends_traffic_and_leaves_steps(lab: str, tmp_path: Path) -> None:
    timeline = (
        "- step: {at: 0s, delay: 5ms}\n"
        "- outage: {at: 0s, duration: 60s}\n"
        "- cross_traffic: {at: 0s, duration: 60s, protocol: udp, rate: 1mbit, direction: backward}\n"
    )
    zero = play(lab, timeline, tmp_path)
    second = run_pddbed("wan", "play", "-l", lab, str(tmp_path / "timeline.yaml"))
    assert second.returncode == 1
    assert "is playing; end it first with: pddbed wan play --stop" in second.stderr
    output = run_pddbed("wan", "show", "-l", lab).stdout
    assert "now: outage on wan0 both ways" in output
    assert "now: cross_traffic on wan0 backward" in output
    assert not ping_works(lab)
    result = run_pddbed("wan", "play", "-l", lab, "--stop")
    assert result.returncode == 0, result.stderr
    assert ping_works(lab)
    assert rate_bps(lab, 0.2, "backward") == 0
    assert shown(lab)["asked"]["forward"]["delay_ns"] == 5 * MS
    assert {"cut", "traffic", "heal", "end"} <= {entry["what"] for entry in change_log(lab, zero)}
    again = run_pddbed("wan", "play", "-l", lab, "--stop")
    assert (again.returncode, again.stderr) == (1, "pddbed: no timeline is playing\n")


def test_a_timeline_and_wan_set_keep_each_others_values(lab: str, tmp_path: Path, trace: list[int]) -> None:
    timeline = "- replay: {at: 0s, duration: 60s, trace: link.mahi}\n- step: {at: 500ms, delay: 30ms}\n"
    zero = play(lab, timeline, tmp_path)
    assert run_pddbed("wan", "set", "-l", lab, "wan0", "--queue", "200KiB").returncode == 0
    sleep_until(zero + 600 * MS)
    asked = shown(lab)["asked"]["forward"]
    assert (asked["queue_bytes"], asked["delay_ns"]) == (200 * 1024, 30 * MS)
    assert asked["rate_bps"] != 20 * MBIT
    ask_lab(find_record(lab), WanStop())
    asked = shown(lab)["asked"]["forward"]
    assert (asked["rate_bps"], asked["queue_bytes"], asked["delay_ns"]) == (20 * MBIT, 200 * 1024, 30 * MS)


def test_a_wrong_timeline_is_refused_with_all_its_lines_and_nothing_begins(lab: str, tmp_path: Path) -> None:
    before = playing(lab)
    (tmp_path / "bad.mahi").write_text("1\n2\nx\n")
    wrong = (
        "- step: {at: 0s, delay: 1s}\n"
        "- outage: {at: 5, duration: 1s, link: wan7}\n"
        "- replay: {at: 0s, trace: bad.mahi}\n"
        "- step: {at: 1s, rate: 100gbit}\n"
    )
    file = tmp_path / "wrong.yaml"
    file.write_text(wrong)
    result = run_pddbed("wan", "play", "-l", lab, str(file))
    assert result.returncode == 1
    for words in (
        f'{file}:2:16: [1].outage.at: "5" has no unit',
        f'{tmp_path}/bad.mahi:3:1: "x" is no whole number of ms',
        f"{file}:4:9: [3].step: asks wan0 forward for 100gbit; its driver holds at most 20gbit",
    ):
        assert words in result.stderr, result.stderr
    assert playing(lab) == before
    assert shown(lab)["asked"]["forward"]["delay_ns"] == 20 * MS


def test_a_timeline_from_standard_input_can_be_followed_to_its_end(lab: str) -> None:
    result = run_pddbed("wan", "play", "-l", lab, "-", "--wait", input="[{step: {at: 100ms, delay: 25ms}}]")
    assert result.returncode == 0, result.stderr
    assert "timeline <stdin>: over" in result.stdout
    assert shown(lab)["asked"]["backward"]["delay_ns"] == 25 * MS


@pytest.mark.parametrize("arguments", [[], ["x.yaml", "--stop"]])
def test_play_wants_a_file_or_stop(arguments: list[str]) -> None:
    result = run_pddbed("wan", "play", *arguments)
    assert result.returncode == 2


def test_at_ready_waits_for_a_lab_that_is_not_up_yet(tmp_path: Path) -> None:
    file, name = tmp_path / "late.yaml", f"{NAME}-late"
    file.write_text(TOPOLOGY.split("congestion:")[0])
    (tmp_path / "timeline.yaml").write_text("- step: {at: 0s, delay: 1ms}\n")
    outcome: list[subprocess.CompletedProcess[str]] = []
    waiting = threading.Thread(
        target=lambda: outcome.append(
            run_pddbed("wan", "play", "-l", name, str(tmp_path / "timeline.yaml"), "--at-ready", "--wait")
        )
    )
    waiting.start()
    try:
        time.sleep(0.5)
        assert run_pddbed("up", str(file), "--name", name, "--no-workers", "--no-verify").returncode == 0
        waiting.join()
        assert outcome[0].returncode == 0, outcome[0].stderr
        assert shown(name)["asked"]["forward"]["delay_ns"] == MS
    finally:
        run_pddbed("down", name)
