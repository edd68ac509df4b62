"""A process of cross traffic answers an order that is none with one sentence, and ends."""

import subprocess
import sys

import pytest

SENDER = (
    '{"be": "sender", "protocol": "udp", "address": "127.0.0.1", "port": 9, "mtu": 1500, "seeds": ["x"], '
    '"rate_bps": 1000, "duration_ns": 1, "on_ns": null, "off_ns": null, "colour": 1}'
)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("", "Expecting value"),
        ("{x", "Expecting property name"),
        ('{"be": "cook"}', "Invalid value 'cook'"),
        ('{"be": "receiver", "protocol": "icmp", "address": "127.0.0.1", "flows": 1}', "Invalid enum value 'icmp'"),
        ('{"be": "receiver", "protocol": "udp", "address": "127.0.0.1", "flows": 65}', "`int` <= 64"),
        ('{"be": "receiver", "protocol": "udp", "flows": 1}', "missing required field `address`"),
        (SENDER, "unknown field `colour`"),
    ],
)
def test_an_order_that_is_none_is_one_error(line: str, error: str) -> None:
    command = [sys.executable, "-m", "testbed.congestion.traffic"]
    done = subprocess.run(command, input=line + "\n", capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("cross traffic: ")
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == 1
