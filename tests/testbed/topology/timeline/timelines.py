"""Timelines from text, as `wan play` reads them, and Hypothesis's own."""

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from testbed.model.direction import DIRECTIONS
from testbed.model.impairment import Impairment
from testbed.model.timeline import ANY, EACH, Change, CrossTraffic, Event, Outage, Ramp, Step, Timeline, Trigger
from testbed.topology.timeline.file import timeline_from_text
from testbed.topology.timeline.link_values import LinkFacts

MS = 1_000_000
SECOND = 1_000_000_000
MBIT = 1_000_000
FIXTURES = Path(__file__).parents[3] / "fixtures"
BEFORE = Impairment(rate_bps=100 * MBIT, delay_ns=20 * MS, queue_bytes=500_000)
LINKS = tuple(LinkFacts(name, "userspace", 1500, {"forward": BEFORE, "backward": BEFORE}) for name in ("wan0", "wan1"))


def timeline(text: str, links: Any = LINKS, folder: Path = FIXTURES / "traces", seed: int = 1) -> Timeline:
    """Read a timeline; raises TopologyErrors."""
    return timeline_from_text(text, "timeline.yaml", folder, links, seed=seed, memory_bytes=8 << 30)


times = st.integers(0, 20 * SECOND)
durations = st.integers(1, 3 * SECOND)
whats = st.one_of(
    st.builds(Step, st.builds(lambda value: Change((("rate_bps", value),)), st.integers(1000, 10**9))),
    st.builds(
        Ramp,
        durations,
        st.tuples(st.tuples(st.just("delay_ns"), st.integers(0, SECOND), st.integers(0, SECOND))),
    ),
    st.builds(Outage, durations),
    st.builds(CrossTraffic, durations, st.just("udp"), st.just(MBIT)),
)
targets = st.sampled_from([(("wan0", "forward"),), (("wan0", "backward"),), tuple(("wan0", way) for way in DIRECTIONS)])


@st.composite
def events(draw: Any, number: int = 0, triggered: bool = False) -> Event:
    what = draw(whats)
    repeats = draw(st.integers(1, 3))
    trigger = Trigger(
        draw(st.sampled_from(["a", "b"])), draw(st.sampled_from([None, 0.5])), draw(st.sampled_from([ANY, EACH, "r1"]))
    )
    return Event(
        number=number,
        what=what,
        targets=draw(targets),
        at_ns=None if triggered else draw(times),
        trigger=trigger if triggered else None,
        every_ns=draw(st.integers(3 * SECOND, 5 * SECOND)) if repeats > 1 else 0,
        times=repeats,
    )


@st.composite
def timelines(draw: Any, triggered: bool = False) -> Timeline:
    count = draw(st.integers(1, 5))
    return Timeline(tuple(draw(events(number, triggered)) for number in range(count)), draw(st.integers(0, 9)))
