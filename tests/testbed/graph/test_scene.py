"""What a picture says about links: asked by the file, or asked now and measured by a running lab."""

from typing import Any

import pytest

from testbed.graph.scene import SceneError, scene
from testbed.model.plan import LabPlan
from testbed.topology.load import plan_from_text

TEXT = """
name: file
datacenters:
  a: {subnet: 10.1.0.0/24, hosts: {x: {command: "sleep   9", publish: [9000:80]}, y: }}
  b: {subnet: 10.2.0.0/24}
wan: [{name: w0, between: [b, a], rate: 1gbit, delay: 20ms, loss: 1%, cost: 3}]
"""


def plan() -> LabPlan:
    return plan_from_text(TEXT, "file.yaml")


def figure(name: str, unit: str, asked: float | None, measured: float | None, ok: bool = True) -> dict[str, Any]:
    return {"figure": name, "unit": unit, "asked": asked, "measured": measured, "ok": ok}


def status(**changes: Any) -> dict[str, Any]:
    """As a running lab answers, in the fields that a picture needs."""
    (wan,) = plan().wans
    asked = {"forward": wan.forward.to_dict(), "backward": wan.backward.to_dict()}
    figures = [
        figure("delay", "ns", 20_000_000, 20_013_000.0),
        figure("rate (UDP)", "bit/s", 1_000_000_000, 999_800_000.0),
        figure("rate (TCP)", "bit/s", 1_000_000_000, None),
        figure("loss", "share", 0.01, 0.0102),
    ]
    return {
        "name": "lab",
        "file": "/other.yaml",
        "api": None,
        "hosts": [{"name": "x", "datacenter": "a"}, {"name": "y", "datacenter": "a"}],
        "links": [{"name": "w0", "between": ["b", "a"], "driver": "userspace", "asked": asked}],
        "verified": {"links": [{"name": "w0", "directions": {"forward": figures, "backward": []}}], "reasons": []},
        **changes,
    }


def rows(drawn: Any) -> list[tuple[str, str, str]]:
    return [(line.way, line.verdict, ", ".join(line.parts)) for link in drawn.links for line in link.lines]


def test_a_file_alone_says_what_is_asked() -> None:
    drawn = scene(plan())
    assert rows(drawn) == [("both", "asked", "1gbit, 20ms, loss 1%, queue 5MB (40ms)")]
    assert drawn.links[0].facts == ("RTT 40ms", "MTU 1500", "cost 3")
    assert drawn.ends == ((1, 0),)
    x, y = drawn.datacenters[0].hosts
    assert (x.kind, x.lines) == ("command", ("command · 10.1.0.2", "$ sleep 9", "port 80 on 127.0.0.1:9000"))
    assert (y.kind, y.lines) == ("host", ("plain host · 10.1.0.3",))


def test_a_running_lab_adds_what_was_measured_rate_first() -> None:
    drawn = scene(plan(), status())
    assert drawn.title == "lab"
    assert drawn.links[0].facts[0] == "userspace"
    assert rows(drawn)[1:] == [("forward", "ok", "measured 999.8mbit (UDP), 20.01ms, loss 1.02%")]
    assert drawn.links[0].ok


def test_what_is_out_of_tolerance_says_so() -> None:
    answer = status()
    answer["verified"]["links"][0]["directions"]["forward"][0]["ok"] = False
    drawn = scene(plan(), answer)
    assert rows(drawn)[1][1:] == ("failed", "measured 999.8mbit (UDP), 20.01ms, loss 1.02%, OUT OF TOLERANCE")
    assert not drawn.links[0].ok


def test_a_figure_measured_before_the_link_was_changed_is_no_verdict_on_what_it_does_now() -> None:
    answer = status()
    answer["links"][0]["asked"]["forward"]["delay_ns"] = 2_000_000_000
    assert rows(scene(plan(), answer)) == [
        ("forward", "asked", "1gbit, 2s, loss 1%, queue 5MB (40ms), changed"),
        ("forward", "outdated", "measured 999.8mbit (UDP), 20.01ms, loss 1.02%, before the change"),
        ("backward", "asked", "1gbit, 20ms, loss 1%, queue 5MB (40ms)"),
    ]


def test_a_lab_that_was_not_verified_shows_what_is_asked_and_says_that_nothing_was_measured() -> None:
    drawn = scene(plan(), status(verified=None))
    assert [row[1] for row in rows(drawn)] == ["asked"]
    assert drawn.subtitle.endswith("running, not measured")


@pytest.mark.parametrize(
    "changes",
    [{"hosts": []}, {"links": []}, {"hosts": [{"name": "x", "datacenter": "b"}, {"name": "y", "datacenter": "a"}]}],
)
def test_a_lab_of_another_file_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SceneError, match=r'lab "lab" has other hosts .* it was raised from /other\.yaml'):
        scene(plan(), status(**changes))
