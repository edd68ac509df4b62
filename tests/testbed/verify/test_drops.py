"""What is read of the kernel's counters of lost packets, and what is said of it."""

import os
import subprocess
from pathlib import Path

import pytest

from testbed.verify import drops
from testbed.verify.drops import DropWatch, backlog_drops, device_drops, receive_buffer_errors

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
    counts, backlog = {"eth0": 5}, 5
    monkeypatch.setattr(drops, "backlog_drops", lambda: backlog)
    monkeypatch.setattr(drops, "device_drops", lambda _: counts)
    watch = DropWatch({"p0": os.getpid()})
    assert list(watch.reasons()) == []
    counts = {"eth0": 8}
    assert list(watch.reasons()) == ["3 packets dropped unasked: p0, interface eth0"]
    backlog = 9
    beside = "meanwhile this machine's receive backlog dropped 4, of any lab or program"
    assert list(watch.reasons()) == [f"3 packets dropped unasked: p0, interface eth0 ({beside})"]


def test_what_the_whole_machine_dropped_is_not_charged_to_a_lab_that_lost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backlog = 0
    monkeypatch.setattr(drops, "backlog_drops", lambda: backlog)
    watch = DropWatch({"p0": os.getpid()})
    backlog = 1000
    assert list(watch.reasons()) == []


def test_a_node_that_has_ended_is_told_and_stays_told() -> None:
    child = subprocess.Popen(["sleep", "60"])
    watch = DropWatch({"p0": os.getpid(), "md0": child.pid})
    assert list(watch.reasons()) == []
    child.kill()
    child.wait()
    for _ in range(2):
        assert list(watch.reasons()) == ["md0 is gone: the process that held its network has ended"]


def test_errors_of_receive_buffers_are_read_of_a_real_namespace() -> None:
    assert receive_buffer_errors(os.getpid()) >= 0
    assert receive_buffer_errors(2**22) == 0
