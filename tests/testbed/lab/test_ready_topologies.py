"""Every ready topology comes up, and its WAN is what its file says; byo-engine serves on this machine."""

import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from testbed.topology.load import load_plan
from tests.conftest import ROOT, Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]
SAMPLE = {"two-dc-tiny", "three-dc", "satellite"}  # raised for every commit; the others in the nightly lane
FILES = [
    pytest.param(file, id=file.stem, marks=[] if file.stem in SAMPLE else [pytest.mark.nightly])
    for file in sorted((ROOT / "topologies").glob("*.yaml"))
]
MS = 1_000_000


@pytest.mark.quiet
@pytest.mark.parametrize("file", FILES)
def test_a_ready_topology_comes_up_and_its_links_verify(raise_lab: Callable[..., Lab], file: Path) -> None:
    lab = raise_lab(file, f"ready-{file.stem}", "--no-workers")
    plan, status = load_plan(file), lab.status()
    assert status["verified"]["ok"], json.dumps(status["verified"], indent=1)
    for link in status["links"]:
        assert all(link["counters"][way]["dropped_unasked"] == 0 for way in ("forward", "backward"))
    source, target = plan.datacenters[0].hosts[0], plan.datacenters[-1].hosts[-1]
    ends = source.datacenter, target.datacenter
    (route,) = [route for route in plan.routes if (route.datacenter, route.destination) == ends]
    rtts = lab.ping_rtts_ms(source.name, target.name, count=20)
    assert statistics.median(rtts) == pytest.approx(route.rtt_ns / MS, rel=0.02, abs=1.5)


@pytest.mark.nightly
def test_the_losses_of_transpacific_are_counted_and_shown(raise_lab: Callable[..., Lab]) -> None:
    """As many packets as lose none with a probability of e^-20."""
    lab = raise_lab(ROOT / "topologies" / "transpacific.yaml", "ready-loss", "--no-workers", "--no-verify")
    floods = "for n in 1 2 3 4 5 6 7 8; do ping -n -q -c 2500 -i 0.002 md0 & done; wait"
    result = lab.exec("gw0", "sh", "-c", floods, timeout_s=60)
    assert result.stdout.count("2500 packets transmitted") == 8, result.stdout + result.stderr
    shown = run_pddbed("wan", "show", "-l", lab.name)
    dropped = [int(line.split()[-2]) for line in shown.stdout.splitlines() if line.startswith("cable")]
    assert len(dropped) == 2
    assert all(0 < count < 80 for count in dropped), shown.stdout  # 20 expected, standard deviation 4.5


def get(url: str, patience_s: float = 10) -> Any:
    """The JSON at `url`, asked for until the program behind it listens."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=patience_s) as reply:
                return json.load(reply)
        except (URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.mark.quiet
def test_byo_engine_is_reached_from_this_machine_and_reaches_its_peer_across_the_wan(
    raise_lab: Callable[..., Lab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # its commands run beside the file, wherever `up` was called
    lab = raise_lab(ROOT / "topologies" / "byo-engine.yaml", "ready-byo", "--no-verify")
    assert get("http://127.0.0.1:18100/") == {"host": "prefill0", "datacenter": "main", "greeting": "ready to prefill"}
    assert get("http://127.0.0.1:18200/")["host"] == "decode0"
    (peer,) = get("http://127.0.0.1:18100/peers")
    assert (peer["host"], peer["greeting"]) == ("decode0", "ready to decode")
    assert 80 <= peer["milliseconds"] < 200  # a connection and a request: two round trips of 40 ms
    assert "listens on 10.1.0.2:8000, its peers are: decode0\n" in run_pddbed("logs", "-l", lab.name, "prefill0").stdout
    (link,) = lab.status()["links"]
    assert all(link["counters"][way]["packets"] > 0 for way in ("forward", "backward"))
