"""What the two stages of the netem driver are told: limits, bursts, order, refusals. Arithmetic only."""

import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.links.qdisc import CELLS, PROBABILITY_ONE, U32_MAX, size_table
from testbed.links.shaping import fraction, gso_cap_bytes, refuse_beyond_memory, shape
from testbed.model.impairment import SMALLEST_PACKET_BYTES, BernoulliLoss, CoDel, GilbertElliottLoss, Impairment, Jitter

MS = 1_000_000
GB = 10**9
MTU = 1500

limited = st.builds(
    Impairment,
    rate_bps=st.integers(1_000, 100_000_000_000),
    delay_ns=st.integers(0, 5_000 * MS),
    queue_bytes=st.integers(1, U32_MAX),
)


@given(limited)
def test_the_delay_line_never_fills_before_the_rate_says_so(impairment: Impairment) -> None:
    """However small the packets, and with netem a second behind its clock."""
    assert impairment.rate_bps is not None
    netem = shape(impairment, MTU).netem
    in_flight = impairment.rate_bps * (impairment.delay_ns + 1000 * MS) / (8 * GB)
    assert netem.limit_packets * SMALLEST_PACKET_BYTES >= in_flight


@given(limited)
def test_netem_serializes_slightly_faster_than_tbf_lets_through(impairment: Impairment) -> None:
    """Otherwise its line would grow for as long as the link is full."""
    shaped = shape(impairment, MTU)
    assert shaped.tbf is not None
    for ip_bytes in (28, MTU):
        through_tbf_ns = ip_bytes * GB / shaped.tbf.rate_bytes_per_s
        through_netem_ns = ip_bytes * GB / shaped.netem.rate_bytes_per_s
        assert through_netem_ns <= through_tbf_ns
        assert through_netem_ns >= 0.99 * through_tbf_ns - 1


@given(limited)
def test_the_rate_is_exact_and_the_queue_is_the_files(impairment: Impairment) -> None:
    assert impairment.rate_bps is not None
    assert impairment.queue_bytes is not None
    tbf = shape(impairment, MTU).tbf
    assert tbf is not None
    assert abs(tbf.rate_bytes_per_s * 8 - impairment.rate_bps) <= 4
    # The buffer is both stages' together: what waits before the tokens, and what they let through at once.
    buffer_bytes = tbf.limit_bytes + tbf.burst_bytes
    if impairment.queue_bytes >= 4 * MTU:
        assert buffer_bytes == impairment.queue_bytes
    else:  # tbf passes nothing that does not fit into both
        assert impairment.queue_bytes <= buffer_bytes <= impairment.queue_bytes + 2 * MTU + 14
    assert tbf.limit_bytes >= gso_cap_bytes(impairment.rate_bps, MTU, impairment.queue_bytes)
    # A full packet must fit into the bucket with its Ethernet header, or tbf drops it.
    assert tbf.burst_bytes >= MTU + 14


def test_the_burst_is_a_super_packet_and_a_millisecond() -> None:
    tbf = shape(Impairment(rate_bps=400_000_000, delay_ns=20 * MS, queue_bytes=2_000_000), MTU).tbf
    assert tbf is not None
    assert tbf.burst_bytes == 25_000 + 14 + 50_000


@pytest.mark.parametrize(
    ("rate_bps", "queue_bytes", "cap"),
    [
        (None, None, 65_536),
        (1_000_000, None, 1500),  # half a millisecond is 62 bytes: one packet it is
        (100_000_000, None, 6_250),
        (400_000_000, None, 25_000),
        (10_000_000_000, None, 65_536),
        (400_000_000, 40_000, 10_000),  # four must fit into the queue
        (400_000_000, 100, 1500),
    ],
)
def test_super_packets_last_half_a_millisecond_at_most(rate_bps: int | None, queue_bytes: int | None, cap: int) -> None:
    assert gso_cap_bytes(rate_bps, MTU, queue_bytes) == cap


def test_without_a_rate_there_is_no_tbf_and_packets_still_keep_their_order() -> None:
    shaped = shape(Impairment(delay_ns=20 * MS), MTU)
    assert shaped.tbf is None
    assert shaped.netem.rate_bytes_per_s > 0
    assert shaped.netem.limit_packets >= 100_000


@pytest.mark.parametrize(
    "impairment",
    [
        Impairment(loss=BernoulliLoss(0.01)),
        Impairment(duplication=0.01),
        Impairment(corruption=0.01),
        Impairment(reordering=0.01, delay_ns=MS),
        Impairment(jitter=Jitter(MS), delay_ns=MS),
    ],
    ids=lambda impairment: next(name for name in Impairment.__slots__ if getattr(impairment, name)),
)
def test_what_acts_on_packets_gets_packets(impairment: Impairment) -> None:
    assert shape(impairment, MTU).netem.split
    assert not shape(Impairment(delay_ns=MS), MTU).netem.split


def test_probabilities_are_never_rounded_to_nothing_and_loss_bad_is_turned_round() -> None:
    assert fraction(0) == 0
    assert fraction(1e-15) == 1
    assert fraction(1) == PROBABILITY_ONE
    ge = shape(Impairment(loss=GilbertElliottLoss(0.01, 0.1, 0.7, 0.001)), MTU).netem.gilbert_elliott
    assert ge is not None
    assert ge.describe() == pytest.approx(
        {"good_to_bad": 0.01, "bad_to_good": 0.1, "loss_bad": 0.7, "loss_good": 0.001}, abs=1e-9
    )


@pytest.mark.parametrize(
    ("impossible", "message"),
    [
        (Impairment(rate_bps=100_000_000_001, queue_bytes=1), "above the netem driver's limit of 100gbit"),
        (Impairment(rate_bps=999, queue_bytes=1), "below the netem driver's limit of 1 kbit/s"),
        (Impairment(rate_bps=10**9), "a rate of 1000000000 bit/s needs a queue"),
        (Impairment(rate_bps=10**9, queue_bytes=U32_MAX + 1), "4,294,967,296 bytes exceed tbf's limit"),
        (Impairment(rate_bps=50 * GB, delay_ns=30_000 * MS, queue_bytes=1), "30 s at 50gbit are 6,919,642,858 of"),
        (Impairment(delay_ns=3_600_001 * MS), "above the netem driver's limit of one hour"),
        (Impairment(rate_bps=10**9, queue_bytes=1, codel=CoDel()), "no CoDel stage"),
        (Impairment(jitter=Jitter(MS), loss=GilbertElliottLoss(0.1, 0.1)), "two-state model anew"),
    ],
)
def test_what_the_kernel_cannot_hold_is_refused_with_the_arithmetic(impossible: Impairment, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shape(impossible, MTU)


def test_what_memory_cannot_hold_is_refused_with_the_arithmetic() -> None:
    long_fat = Impairment(rate_bps=10 * GB, delay_ns=2_000 * MS, queue_bytes=10**9)
    with pytest.raises(ValueError, match=r"would hold 11\.2 GB") as refused:
        refuse_beyond_memory('wan "wan0"', (long_fat, long_fat), MTU, 20 * GB)
    assert "10.0 GB that this machine can spare" in str(refused.value)
    assert str(refused.value).count("10gbit x 2 s in flight + 1,000,000,000 B queue") == 2
    refuse_beyond_memory('wan "wan0"', (long_fat, long_fat), MTU, 23 * GB)


@pytest.mark.parametrize("mtu", [576, 1500, 9000])
def test_the_size_table_charges_what_a_super_packet_becomes(mtu: int) -> None:
    """Against TCP's own arithmetic: segments of MTU - 52 bytes, each with 52 bytes of headers."""
    table = struct.unpack(f"{CELLS}H", size_table(mtu))
    for payload in (*range(1, 3 * mtu, 7), 10_000, 32_768, 65_000):
        frame = 14 + 52 + payload
        segments = -(-payload // (mtu - 52))
        assert abs(2 * table[frame >> 1] - (payload + 52 * segments)) <= (2 if segments == 1 else 54)
    for ip_bytes in range(28, mtu + 1):
        assert 0 <= 2 * table[(ip_bytes + 14) >> 1] - ip_bytes + 1 <= 2
