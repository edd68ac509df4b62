"""The packet socket and the kernel's filter, on real packets in a namespace of their own."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.testbed.capture.ring_probe import PAYLOAD

pytestmark = pytest.mark.root
ETHERNET, IP = 14, 20
ICMP, TCP, UDP = 1, 6, 17


def _probe(*arguments: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.testbed.capture.ring_probe", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=30,
    )
    assert result.returncode == 0, result.stderr
    probed: dict[str, Any] = json.loads(result.stdout)
    return probed


def test_headers_only_keeps_exactly_the_headers() -> None:
    probed = _probe("headers", "outgoing")
    assert probed["dropped"] == 0
    assert probed["received"] == len(probed["rows"])
    by_kind = {
        kind: {
            (kept - ETHERNET - IP, original - kept)
            for protocol, fragment, kept, original, _ in probed["rows"]
            if protocol == kind and not fragment & 0x1FFF
        }
        for kind in (ICMP, TCP, UDP)
    }
    # 20 bytes and 12 of time stamps; the handshake's options make it 40; payload is cut to the last byte
    assert {header for header, _ in by_kind[TCP]} == {32, 40}
    assert (32, len(PAYLOAD)) in by_kind[TCP]
    assert all(cut in (0, len(PAYLOAD)) for _, cut in by_kind[TCP])
    assert (8, len(PAYLOAD)) in by_kind[UDP]
    assert (8, len(PAYLOAD)) in by_kind[ICMP]
    later_fragments = {kept for _, fragment, kept, _, _ in probed["rows"] if fragment & 0x1FFF}
    assert later_fragments == {ETHERNET + IP}


def test_without_a_limit_packets_are_whole_and_seen_both_ways() -> None:
    probed = _probe("whole", "both")
    assert probed["rows"]
    assert all(kept == original for _, _, kept, original, _ in probed["rows"])
    outgoing = [row for row in probed["rows"] if row[-1]]
    assert 0 < len(outgoing) < len(probed["rows"])


def test_outgoing_only_leaves_arrivals_out() -> None:
    both, outgoing = _probe("whole", "both"), _probe("whole", "outgoing")
    assert all(row[-1] for row in outgoing["rows"])
    assert len(outgoing["rows"]) < len(both["rows"])
