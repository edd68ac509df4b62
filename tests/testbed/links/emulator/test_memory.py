"""The memory a link may take: derived, shared between directions, refused with the arithmetic."""

import pytest

from testbed.links.emulator.memory import MemoryLimitError, available_bytes, in_flight_bytes, line_limit_bytes
from testbed.model.impairment import Impairment

MS, GBIT, GB = 1_000_000, 1_000_000_000, 1_000_000_000


def test_a_direction_holds_its_bandwidth_delay_product_queue_and_overhead() -> None:
    impairment = Impairment(rate_bps=GBIT, delay_ns=2000 * MS, queue_bytes=100_000_000)
    assert 350_000_000 < in_flight_bytes(impairment) < 600_000_000


def test_a_slow_link_of_small_packets_is_counted_in_packets() -> None:
    # 10 Mbit/s x 1 s in 28-byte packets: 44,642 packets, whose Python objects outweigh their bytes.
    assert in_flight_bytes(Impairment(rate_bps=10_000_000, delay_ns=1000 * MS, queue_bytes=1)) > 44_642 * 210


def test_a_limited_direction_gets_what_it_needs_and_an_unlimited_one_at_most_the_rest() -> None:
    asked = {
        "forward": Impairment(rate_bps=GBIT, delay_ns=1000 * MS, queue_bytes=10**6),
        "backward": Impairment(delay_ns=1000 * MS),
    }
    limits = line_limit_bytes(asked, 2 * GB)
    assert limits["forward"] == in_flight_bytes(asked["forward"])
    assert limits["backward"] == GB - limits["forward"]
    assert line_limit_bytes(asked, 100 * GB)["backward"] == in_flight_bytes(asked["backward"])


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    asked = {"forward": Impairment(rate_bps=10 * GBIT, delay_ns=1700 * MS, queue_bytes=10**6), "backward": Impairment()}
    with pytest.raises(MemoryLimitError, match=r"more than the 1\.00 GB.*forward 2.* GB for 10000 Mbit/s x 1700 ms"):
        line_limit_bytes(asked, 2 * GB)


def test_a_rate_without_a_bound_on_its_queue_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match="forward: a rate of 5 bit/s without a queue"):
        line_limit_bytes({"forward": Impairment(rate_bps=5)}, 2 * GB)


def test_this_machine_has_memory() -> None:
    assert available_bytes() > 10**8
