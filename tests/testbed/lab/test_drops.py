"""What is read of the kernel's counters of lost packets, and what is said of it."""

import os
from pathlib import Path

import pytest

from testbed.lab import drops
from testbed.lab.drops import DropWatch, backlog_drops, device_drops, receive_buffer_errors

NET_DEV = """\
Inter-|   Receive                                   |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 100 1 0 7 0 0 0 0 100 1 0 0 0 0 0 0
  eth0: 1234567 890 0 2 0 0 0 0 765432 543 0 3 0 0 0 0
  wan0: 1 1 0 9 0 0 0 0 1 1 0 9 0 0 0 0
"""


def test_drops_of_both_ways_are_added_up_and_wan_ends_are_the_links_business() -> None:
    assert device_drops(NET_DEV) == {"eth0": 5}


def test_the_backlogs_counter_is_the_second_column_in_hexadecimal(tmp_path: Path) -> None:
    file = tmp_path / "softnet_stat"
    file.write_text("04c7fdd6 0000000a 0000000e 00000000\n04c67c9d 00000010 0000000c 00000000\n")
    assert backlog_drops(file) == 26
    assert backlog_drops(tmp_path / "none") == 0


def test_only_what_was_lost_since_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 5
    monkeypatch.setattr(drops, "backlog_drops", lambda: lost)
    watch = DropWatch({"p0": os.getpid(), "gone": 2**22})
    assert list(watch.reasons()) == []
    lost = 8
    assert list(watch.reasons()) == ["3 packets dropped unasked: this machine's receive backlog (softnet_stat)"]


def test_errors_of_receive_buffers_are_read_of_a_real_namespace() -> None:
    assert receive_buffer_errors(os.getpid()) >= 0
    assert receive_buffer_errors(2**22) == 0
