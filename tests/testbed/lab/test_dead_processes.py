"""Processes of a lab that die: `ps` and `status` tell, and a gateway is started anew on the socket of its clients."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT, Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]


def host(lab: Lab, name: str) -> dict[str, Any]:
    (found,) = [host for host in lab.status()["hosts"] if host["name"] == name]
    return dict(found)


def kill(lab: Lab, name: str, signal: str = "KILL") -> int:
    pid = int(host(lab, name)["pid"])
    assert lab.exec(name, "kill", f"-{signal}", str(pid)).returncode == 0
    return pid


def until(condition: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        time.sleep(0.2)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=20).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_gateway_that_dies_is_started_anew_and_a_worker_that_dies_is_told(
    raise_lab: Callable[..., Lab],
) -> None:
    lab = raise_lab(ROOT / "topologies" / "two-dc-tiny.yaml", "dead-processes", "--no-verify")
    url = lab.status()["api"]
    first = kill(lab, "gw0")
    until(lambda: host(lab, "gw0")["state"] == "ready" and host(lab, "gw0")["pid"] != first, "another gateway")
    assert healthy(url), "it serves on the socket of the one before"
    assert (host(lab, "gw0")["restarts"], host(lab, "gw0")["exit_status"]) == (1, -9)
    assert (
        "gw0 was ended by signal 9 and started anew (1 x); see: pddbed logs gw0"
        in run_pddbed("status", "-l", lab.name).stdout
    )
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 5}, timeout=60)
    assert answer.status_code == 200

    kill(lab, "md0")
    until(lambda: host(lab, "md0")["state"] == "exited", "md0 is told as gone")
    shown = [one for one in json.loads(run_pddbed("ps", "--json").stdout) if one["name"] == lab.name]
    assert [one["lost"] for one in shown] == [{"md0": "was ended by signal 9"}]
    assert "md0 was ended by signal 9" in run_pddbed("ps").stdout

    for _ in range(3):  # the fourth end within a minute
        kill(lab, "gw0", "SEGV")
        until(lambda: host(lab, "gw0")["state"] in ("ready", "exited"), "started anew, or not")
    until(lambda: host(lab, "gw0")["state"] == "exited", "the gateway stays down")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=20)
    assert set(lab.status()["lost"]) == {"gw0", "md0"}


def test_a_gateway_that_is_asked_to_end_stays_down_and_the_api_refuses(raise_lab: Callable[..., Lab]) -> None:
    lab = raise_lab(ROOT / "topologies" / "two-dc-tiny.yaml", "ended-gateway", "--no-verify")
    url = lab.status()["api"]
    kill(lab, "gw0", "TERM")
    until(lambda: host(lab, "gw0")["state"] == "exited", "it has ended")
    assert (host(lab, "gw0")["restarts"], host(lab, "gw0")["exit_status"]) == (0, 0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=20)
