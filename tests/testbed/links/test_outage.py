"""The count of packets dropped in an outage leaves out those that the kernel counts and lets through at its ends."""

import pytest

from testbed.links.outage import Statistics, let_through

BEFORE = Statistics(packets=500, bytes=64_000, drops=500)
NONE = Statistics(0, 0, 0)


@pytest.mark.parametrize(
    ("during", "later", "passed"),
    [
        pytest.param(NONE, Statistics(1000, 128_000, 1000), NONE, id="none passed"),
        pytest.param(Statistics(1, 128, 0), Statistics(1001, 128_128, 1000), Statistics(1, 128, 0), id="one passed"),
        pytest.param(
            Statistics(3, 384, 2), Statistics(1001, 128_128, 1000), Statistics(1, 128, 0), id="one passed, two dropped"
        ),
        pytest.param(Statistics(1, 128, 0), Statistics(1, 128, 0), Statistics(1, 128, 0), id="nothing dropped at all"),
        pytest.param(NONE, Statistics(4000, 6_000_000, 100), NONE, id="super-packets, none passed"),
        pytest.param(
            Statistics(45, 67_500, 0),
            Statistics(4045, 6_067_500, 100),
            Statistics(45, 67_500, 0),
            id="one passed whole",
        ),
        pytest.param(Statistics(45, 67_500, 1), Statistics(4045, 6_067_500, 101), NONE, id="first one dropped at once"),
    ],
)
def test_packets_that_pass_during_the_cut_are_not_counted(
    during: Statistics, later: Statistics, passed: Statistics
) -> None:
    assert let_through(BEFORE, BEFORE + during, NONE, BEFORE + later) == passed


@pytest.mark.parametrize(
    ("healing", "later", "passed"),
    [
        pytest.param(NONE, Statistics(1000, 128_000, 1000), NONE, id="none passed"),
        pytest.param(Statistics(1, 128, 0), Statistics(1000, 128_000, 999), Statistics(1, 128, 0), id="one passed"),
        pytest.param(Statistics(1, 128, 1), Statistics(1000, 128_000, 1000), NONE, id="one dropped in time"),
        pytest.param(Statistics(1, 1500, 0), Statistics(4000, 6_000_000, 100), NONE, id="super-packets in between"),
    ],
)
def test_packets_that_pass_while_it_heals_are_not_counted(
    healing: Statistics, later: Statistics, passed: Statistics
) -> None:
    cut = BEFORE + Statistics(2, 256, 2)  # dropped at once
    assert let_through(BEFORE, cut, healing, BEFORE + later) == passed
