"""KV connections of a fresh lab across its emulated WAN: warm before the first request, with little padding."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.warm_start import TOPOLOGY, ask, padding_bytes
from testbed.topology.overlay import laid_over
from tests.conftest import Lab, run_pddbed

BDP_BYTES = 400e6 / 8 * 0.040
COLD_MS = 290  # 2 MB from ten segments on: seven doublings of 40 ms, half a round trip and the rest

pytestmark = [pytest.mark.root, pytest.mark.quiet]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    file = tmp_path / "warm.yaml"
    file.write_text(laid_over(file, {"serving.kv_pool": {"warm": True}}, TOPOLOGY))
    result = run_pddbed("up", str(file), "--name", "warm", "--api", "auto")
    assert result.returncode == 0, result.stderr
    yield Lab("warm")
    assert run_pddbed("down", "warm").returncode == 0


def test_the_first_transfer_finds_an_open_window(lab: Lab) -> None:
    api = lab.status()["api"]
    deadline = time.monotonic() + 30
    while (sent := padding_bytes(api)) < 0.7 * BDP_BYTES * 1.8:
        assert time.monotonic() < deadline, f"{sent} bytes of padding"
        time.sleep(0.1)
    time.sleep(0.3)  # the last of it arrives
    record = ask(api, 0)
    assert padding_bytes(api) < 2 * BDP_BYTES
    assert record["pdd_delta_bytes"] == 1000 * 2048, "padding is no KV"
    assert record["pdd_kv_xfer_ms"] < 0.6 * COLD_MS
