"""Scenes to draw: any number of datacenters, hosts and links, with awkward names; and real files as scenes."""

from pathlib import Path

from hypothesis import strategies as st

from testbed.graph.scene import DatacenterText, HostText, LinkLine, LinkText, Scene, scene
from testbed.topology.load import load_plan, plan_from_text

NAMES = st.text("abcXYZ019-_.:@+", min_size=1, max_size=63)
HOSTS = st.builds(
    HostText,
    NAMES,
    st.sampled_from(["gateway", "prefill", "relay-decode", "main-decode", "command", "host"]),
    st.lists(st.text("abc <&>\"'$", min_size=1, max_size=80), max_size=3).map(lambda more: ("x · 10.1.0.2", *more)),
)
LINES = st.builds(
    LinkLine,
    st.sampled_from(["both", "forward", "backward"]),
    st.lists(st.sampled_from(["400mbit", "20ms", "bursty loss, 9.09% on average"]), min_size=1, max_size=7).map(tuple),
    st.sampled_from(["asked", "ok", "failed", "outdated"]),
)


@st.composite
def scenes(draw: st.DrawFn, most_datacenters: int = 6, most_links: int = 12) -> Scene:
    """A scene whose links have names of their own, as in a file."""
    count = draw(st.integers(1, most_datacenters))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda pair: pair[0] != pair[1])
    ends = draw(st.lists(pairs, max_size=most_links)) if count > 1 else []
    rows = st.lists(LINES, min_size=1, max_size=4).map(tuple)
    return Scene(
        title=draw(NAMES),
        subtitle="in words",
        warnings=tuple(draw(st.lists(st.just("the relay was late"), max_size=2))),
        datacenters=tuple(
            DatacenterText(
                draw(NAMES),
                "10.1.0.0/24",
                "linux-bridge, MTU 9000",
                "10.1.0.1",
                tuple(draw(st.lists(HOSTS, max_size=12))),
            )
            for _ in range(count)
        ),
        links=tuple(LinkText(f"w{number}", ("RTT 40ms", "MTU 1500"), draw(rows)) for number in range(len(ends))),
        ends=tuple(ends),
    )


def scene_of(file: Path) -> Scene:
    return scene(load_plan(file))


def full_mesh(count: int) -> Scene:
    """Every datacenter linked to every other."""
    names = [f"dc{number}" for number in range(count)]
    lines = ["name: mesh", "datacenters:"]
    lines += [
        f"  {name}: {{subnet: 10.{number}.0.0/24, hosts: {{h{number}: }}}}" for number, name in enumerate(names, 1)
    ]
    lines.append("wan:")
    lines += [
        f"  - {{between: [{a}, {b}], rate: 1gbit, delay: 20ms}}"
        for position, a in enumerate(names)
        for b in names[position + 1 :]
    ]
    return scene(plan_from_text("\n".join(lines), "mesh.yaml"))


def many_hosts(count: int) -> Scene:
    """One datacenter with `count` hosts, and one without any."""
    hosts = ", ".join(f"host-{number}: {{role: prefill}}" for number in range(count - 2))
    text = (
        f"name: many\ndatacenters:\n  main:\n    subnet: 10.1.0.0/24\n"
        f"    hosts: {{gw0: {{role: gateway}}, md0: {{role: main-decode}}, {hosts}}}\n"
        "  remote: {subnet: 10.2.0.0/24}\nserving: {pipeline: cdc-pd}\n"
        "wan: [{between: [main, remote], rate: 10gbit, delay: 20ms}]\n"
    )
    return scene(plan_from_text(text, "many.yaml"))
