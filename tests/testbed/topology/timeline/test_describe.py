"""What the guide shows is a timeline, and what a timeline means can be read."""

import re

from testbed.topology.timeline.describe import describe_timeline
from tests.conftest import ROOT
from tests.testbed.topology.timeline.timelines import timeline


def test_the_example_of_the_guide_is_a_timeline() -> None:
    guide = (ROOT / "docs/congestion.md").read_text()
    (example,) = re.findall(r"```yaml\n(congestion:\n.*?)```", guide, re.DOTALL)
    assert describe_timeline(timeline(example.replace("lte.mahi", "steady.mahi"))) == [
        "at 5s on wan0 both ways: rate 10mbit, delay 100ms",
        "at 10s on wan0 both ways: within 5s rate from 400mbit to 10mbit, loss from 0% to 2%",
        "at 20s on wan0 forward: an outage of 1s",
        "at 30s on wan0 both ways: cross traffic for 20s: 4 udp flows, 100mbit, "
        "on and off for 200ms and 300ms on average",
        "at 60s on wan0 forward: trace "
        f"{ROOT}/tests/fixtures/traces/steady.mahi for 2min (1 change in 3s, 6mbit on average, in steps of 20ms)",
        "on kv-transfer at 60% on wan0 both ways: an outage of 5s",
    ]


def test_every_value_of_a_step_can_be_read() -> None:
    text = (
        "- step: {when: {event: handoff, request: each}, link: wan1, direction: backward, rate: none,"
        " jitter: {std: 1ms}, duplicate: 1%, corrupt: 0%, loss: {good_to_bad: 1%, bad_to_good: 9%},"
        " repeat: {every: 2s, times: 3}}\n"
        "- step: {at: 0s, link: wan0, rate: 1mbit, jitter: {std: 0ms}, loss: 0%, queue: {bytes: 64KiB, codel: true}}\n"
    )
    assert describe_timeline(timeline(text)) == [
        "on handoff of each request, 3 times every 2s, on wan1 backward: rate without limit, jitter 1ms normal, "
        "loss in bursts, duplicate 1%, corrupt 0%",
        "at 0s on wan0 both ways: rate 1mbit, jitter off, loss off, queue 65,536 B, codel on",
    ]
