"""Drops of a netem: what was asked stays asked, what was not stays not, whatever is set afterwards. Values only."""

from testbed.links.netem_drops import Drops
from testbed.links.qdisc import PROBABILITY_ONE, Installed, Netem, Statistics

CLEAR, LOSSY = Netem(0, 1000, 10**9), Netem(0, 1000, 10**9, loss=PROBABILITY_ONE // 100)


def line(settings: Netem, packets: int, drops: int) -> Installed:
    return Installed("netem", settings, Statistics(packets, 0, drops, 0, 0), True)


def test_asked_loss_stays_asked_when_it_ends_and_overflow_stays_unasked_when_it_begins() -> None:
    drops = Drops()
    drops.count(line(CLEAR, 1000, 7))
    drops.count(line(LOSSY, 11_000, 7 + 100))
    drops.count(line(CLEAR, 12_000, 7 + 100 + 3))
    assert (drops.lost, drops.unasked) == (100, 10)


def test_an_outage_is_all_asked() -> None:
    drops = Drops()
    drops.count(line(Netem(0, 1000, 10**9, loss=PROBABILITY_ONE), 0, 5000))
    drops.count(line(CLEAR, 100, 5000))
    assert (drops.lost, drops.unasked) == (5000, 0)


def test_what_is_far_beyond_an_asked_loss_is_not_it() -> None:
    drops = Drops()
    for number in range(1, 11):  # asking often changes nothing: 1 % and a steady overflow of 5 %
        drops.count(line(LOSSY, 1000 * number, 60 * number))
    assert drops.lost + drops.unasked == 600
    assert 400 < drops.unasked < 500
    counted = drops.unasked
    drops.count(line(LOSSY, 100_000, 600))
    assert drops.unasked == counted, "what was told stays"


def test_jitter_and_new_seeds_are_no_change_of_what_is_lost() -> None:
    drops = Drops()
    drops.count(line(Netem(5, 1000, 10**9, loss=LOSSY.loss, seed=1), 5000, 50))
    drops.count(line(Netem(9, 1000, 10**9, loss=LOSSY.loss, seed=2), 10_000, 110))
    assert (drops.lost, drops.unasked) == (110, 0)
