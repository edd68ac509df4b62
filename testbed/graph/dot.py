"""A topology in Graphviz's DOT language, for those who lay it out their own way (`dot -Tpdf lab.dot`)."""

from testbed.graph.scene import DatacenterText, Kind, LinkLine, LinkText, Scene

_FILL: dict[Kind, str] = {
    "gateway": "#eef1f5",
    "prefill": "#e6f1f8",
    "relay-decode": "#fcefe6",
    "main-decode": "#e5f5f0",
    "command": "#f3edf6",
    "host": "#f4f5f7",
}
_ARROWS = {"both": "<->", "forward": "->", "backward": "<-"}


def draw_dot(scene: Scene) -> str:
    """An undirected graph: a cluster per datacenter with its router and hosts, an edge per WAN link."""
    lines = [
        f"graph {_quoted(scene.title)} {{",
        f"  label={_quoted(f'{scene.title}: {scene.subtitle}')}; labelloc=t; compound=true;",
        '  node [shape=box, style="rounded,filled", fillcolor="#ffffff", fontname="sans-serif", fontsize=11];',
        '  edge [fontname="sans-serif", fontsize=10];',
    ]
    for position, datacenter in enumerate(scene.datacenters):
        lines += _cluster(position, datacenter)
    for link, (a, b) in zip(scene.links, scene.ends, strict=True):
        lines.append(f"  r{a} -- r{b} [label={_quoted(*_words(link))}{'' if link.ok else ', color=red'}];")
    return "\n".join([*lines, "}"]) + "\n"


def _cluster(position: int, datacenter: DatacenterText) -> list[str]:
    lines = [
        f"  subgraph cluster_{position} {{",
        f"    label={_quoted(f'{datacenter.name}  {datacenter.subnet}')};",
        f'    r{position} [label={_quoted(f"router {datacenter.router}")}, fillcolor="#dbe1e8"];',
    ]
    for number, host in enumerate(datacenter.hosts):
        node = f"h{position}_{number}"
        lines.append(f'    {node} [label={_quoted(host.name, *host.lines)}, fillcolor="{_FILL[host.kind]}"];')
        lines.append(f"    r{position} -- {node};")
    return [*lines, "  }"]


def _words(link: LinkText) -> list[str]:
    return [f"{link.name}  {', '.join(link.facts)}", *map(_line, link.lines)]


def _line(line: LinkLine) -> str:
    return f"{_ARROWS[line.way]} {', '.join(line.parts)}"


def _quoted(*lines: str) -> str:
    r"""A DOT string; lines are joined by \n, which Graphviz reads as a line break."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'
