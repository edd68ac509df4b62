"""Changes of a link that carries traffic lose nothing, and keep what they do not name. Lies are in `test_lies`."""

import json
import threading
import time
from collections.abc import Callable

import pytest

from tests.conftest import Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.quiet]
TINY = "topologies/two-dc-tiny.yaml"


def test_wan_set_changes_one_value_keeps_the_others_and_loses_nothing_during_a_transfer(
    raise_lab: Callable[..., Lab],
) -> None:
    lab = raise_lab(TINY, "changed", "--no-workers", "--no-verify")
    assert lab.exec("md0", "iperf3", "-s", "-1", "-D", "--logfile", "/dev/null").returncode == 0
    # When the delay falls, what was sent meanwhile arrives at once: 10 Mbit/s fit iperf3's own receive buffer then.
    command = ["iperf3", "-c", "md0", "-u", "-b", "10M", "-l", "1400", "-t", "4", "-J"]
    outcome: dict[str, str] = {}
    sending = threading.Thread(target=lambda: outcome.update(report=lab.exec("p0", *command).stdout))
    sending.start()
    time.sleep(1.5)
    for values in (["--delay", "80ms"], ["--delay", "5ms"], ["--rate", "1gbit"], ["--queue", "4MiB"]):
        result = run_pddbed("wan", "set", "-l", "changed", "wan0", *values, "--json")
        assert result.returncode == 0, result.stderr
    sending.join()
    received = json.loads(outcome["report"])["end"]["sum_received"]
    assert received["packets"] > 3000
    assert received["lost_packets"] == 0
    link = json.loads(result.stdout)
    assert all(link["counters"]["forward"][cause] == 0 for cause in ("dropped_queue", "dropped_unasked"))
    assert (
        link["asked"]["forward"] | {"rate_bps": 10**9, "delay_ns": 5_000_000, "queue_bytes": 4 << 20}
        == (link["asked"]["forward"])
    )
    assert link["asked"]["forward"]["loss"] is None
    assert run_pddbed("wan", "reset", "-l", "changed").returncode == 0
    (link,) = json.loads(run_pddbed("wan", "show", "-l", "changed", "--json").stdout)
    assert link["asked"] == link["file"]


def test_setting_loss_and_taking_it_back_leaves_the_delay_that_was_set(raise_lab: Callable[..., Lab]) -> None:
    lab = raise_lab(TINY, "kept", "--no-workers", "--no-verify")
    assert run_pddbed("wan", "set", "-l", "kept", "wan0", "--loss", "5%", "--delay", "300ms").returncode == 0
    assert run_pddbed("wan", "set", "-l", "kept", "wan0", "--loss", "0%").returncode == 0
    (link,) = lab.status()["links"]
    assert link["asked"]["forward"]["delay_ns"] == 300_000_000
    assert link["asked"]["forward"]["loss"] is None
    assert min(lab.ping_rtts_ms("gw0", "md0", count=5)) >= 600
