"""A topology as text in box-drawing characters: datacenters below each other, WAN links on tracks beside them.

Owns the arrangement; fits into the given width unless the links need more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from testbed.graph.layout import Track, ports, tracks
from testbed.graph.measure import cut, shorten
from testbed.graph.scene import DatacenterText, HostText, LinkLine, LinkText, Scene

UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
_CHARACTERS = {
    0: " ",
    UP | DOWN: "│",
    LEFT | RIGHT: "─",
    UP | LEFT: "┘",
    DOWN | LEFT: "┐",
    UP | DOWN | LEFT | RIGHT: "┼",
}
WIDTH = 80
_LEAST_INNER = 32  # columns within a datacenter's box, even where that takes more than the width
_LONGEST_LABEL = 18
_SHORTEST_NAME = 8
_TRACK = 3  # columns a track takes
_LIST_UP_TO = 8  # hosts, one a line; more are set in columns

Paint = Callable[[str, str], str]  # (text, style): a kind of host, or title, dim, ok, failed


@dataclass(frozen=True, slots=True)
class _Cell:
    """Text of `length` characters, painted."""

    painted: str
    length: int


def draw_text(scene: Scene, width: int = WIDTH, paint: Paint = lambda text, _style: text) -> str:
    """The picture and, under it, every link in words."""
    apart = "  " if len(scene.title) + len(scene.subtitle) + 2 <= width else "\n"
    lines = [f"{paint(scene.title, 'title')}{apart}{paint(scene.subtitle, 'dim')}"]
    lines += [paint(f"not to be trusted: {reason}", "failed") for reason in scene.warnings]
    lines += ["", *_picture(scene, width, paint)]
    for link, (a, b) in zip(scene.links, scene.ends, strict=True):
        names = scene.datacenters[a].name, scene.datacenters[b].name
        lines += _link(link, names, width, paint)
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def _picture(scene: Scene, width: int, paint: Paint) -> list[str]:
    laid = tracks(scene.ends)
    label = min(max((len(link.name) for link in scene.links), default=0), _LONGEST_LABEL)
    before_tracks = label + 4 if laid else 0  # "─ name ─"
    beside = before_tracks + _TRACK * (1 + max((track.depth for track in laid), default=-1))
    most = max(width - beside - 4, _LEAST_INNER)
    bodies = [_body(datacenter, most, paint) for datacenter in scene.datacenters]
    titles = [_title(datacenter, most, paint) for datacenter in scene.datacenters]
    inner = max(cell.length for cells in [titles, *bodies] for cell in cells)

    lines: list[str] = []
    starts: list[int] = []  # line of each datacenter's first row
    for position, (title, body) in enumerate(zip(titles, bodies, strict=True)):
        rows = max(len(body), len(ports(laid, position)), 1)
        starts.append(len(lines) + 1)
        lines += _box(title, body, rows, inner)
    grid = LineGrid(len(lines), beside + 1)
    left: dict[int, int] = {}  # link -> the line where it left its first datacenter
    for position, body in enumerate(bodies):
        for row, track in _port_rows(ports(laid, position), len(body), position):
            line = starts[position] + row
            lines[line] = lines[line][:-1] + "├"
            grid.write(line, 1, f" {shorten(scene.links[track.link].name, label)} ")
            if track.start == position:
                left[track.link] = line
            else:
                grid.bracket(before_tracks + track.depth * _TRACK, left[track.link], line)
    return [line + grid.render(number) for number, line in enumerate(lines)]


def _port_rows(laid: Sequence[Track], rows: int, position: int) -> list[tuple[int, Track]]:
    """Rows of a box where its links leave: those from above at the top, those that go down at the bottom."""
    rows = max(rows, len(laid), 1)
    coming = sum(track.end == position for track in laid)
    return [(index if index < coming else rows - len(laid) + index, track) for index, track in enumerate(laid)]


def _box(title: _Cell, body: Sequence[_Cell], rows: int, inner: int) -> list[str]:
    cells = [*body, *[_Cell("", 0)] * (rows - len(body))]
    return [
        f"┌ {title.painted} {'─' * (inner - title.length)}┐",
        *(f"│ {cell.painted}{' ' * (inner - cell.length)} │" for cell in cells),
        f"└{'─' * (inner + 2)}┘",
        " " * (inner + 4),
    ]


def _title(datacenter: DatacenterText, most: int, paint: Paint) -> _Cell:
    subnet = datacenter.subnet
    name = shorten(datacenter.name, most - len(subnet) - 2)
    return _Cell(f"{paint(name, 'title')}  {paint(subnet, 'dim')}", len(name) + 2 + len(subnet))


def _body(datacenter: DatacenterText, most: int, paint: Paint) -> list[_Cell]:
    hosts = datacenter.hosts
    if not hosts:
        return [_Cell(paint("no hosts", "dim"), 8)]
    beside = max(len(host.lines[0]) for host in hosts) + 2
    column = min(max(len(host.name) for host in hosts), max(most - beside, _SHORTEST_NAME))
    if len(hosts) <= _LIST_UP_TO:
        return [cell for host in hosts for cell in _entry(host, column, most, paint)]
    long = [cell for host in hosts if len(host.lines) > 1 for cell in _entry(host, column, most, paint)]
    short = [cell for host in hosts if len(host.lines) == 1 for cell in _entry(host, column, most, paint)]
    return long + _columns(short, most)


def _entry(host: HostText, column: int, most: int, paint: Paint) -> list[_Cell]:
    """A host's name and first line, and a line for each of the others, below the first where they fit."""
    first = cut(host.lines[0], most - column - 2)
    cells = [_Cell(f"{paint(f'{shorten(host.name, column):<{column}}', host.kind)}  {first}", column + 2 + len(first))]
    for line in host.lines[1:]:
        text = cut(line, most - 2)
        indent = max(2, min(column + 2, most - len(text)))
        cells.append(_Cell(" " * indent + paint(text, "dim"), indent + len(text)))
    return cells


def _columns(cells: Sequence[_Cell], most: int) -> list[_Cell]:
    """The cells in as many columns as fit, read downwards."""
    widest = max((cell.length for cell in cells), default=0)
    columns = max(1, (most + 3) // (widest + 3))
    rows = -(-len(cells) // columns)
    lines = []
    for row in range(rows):
        chosen = cells[row::rows]
        painted = "   ".join(cell.painted + " " * (widest - cell.length) for cell in chosen)
        lines.append(_Cell(painted, len(chosen) * (widest + 3) - 3))
    return lines


def _link(link: LinkText, names: tuple[str, str], width: int, paint: Paint) -> list[str]:
    names = shorten(names[0], _LONGEST_LABEL), shorten(names[1], _LONGEST_LABEL)
    heading = f"{names[0]} \u2194 {names[1]}, {', '.join(link.facts)}"
    apart = "  " if len(link.name) + len(heading) + 2 <= width else "\n  "
    lines = [paint(link.name, "title") + apart + heading]
    labels = [_label(line, names) for line in link.lines]
    column = max(map(len, labels)) + 4
    for number, (line, label) in enumerate(zip(link.lines, labels, strict=True)):
        label = "" if number and label == labels[number - 1] else label
        first, *more = wrap(", ".join(line.parts), max(width - column, 30), break_long_words=False)
        style = line.verdict if line.verdict in ("ok", "failed") else "dim"
        lines.append(f"  {label:<{column - 2}}{paint(first, style)}")
        lines += [" " * column + paint(text, style) for text in more]
    return lines


def _label(line: LinkLine, names: tuple[str, str]) -> str:
    if line.way == "both":
        return "each way"
    source, target = names if line.way == "forward" else names[::-1]
    return f"{source} \u2192 {target}"


class LineGrid:
    """Lines of box-drawing characters, `lines` x `columns`: they join where they turn and cross where they meet."""

    def __init__(self, lines: int, columns: int) -> None:
        self._arms = [[0] * columns for _ in range(lines)]
        self._words: dict[int, tuple[int, str]] = {}

    def bracket(self, column: int, first: int, last: int) -> None:
        """From the left edge of line `first` to `column`, down, and back to the left edge of line `last`."""
        for line, arm in ((first, DOWN), (last, UP)):
            for cell in range(column):
                self._arms[line][cell] |= LEFT | RIGHT
            self._arms[line][column] |= LEFT | arm
        for line in range(first + 1, last):
            self._arms[line][column] |= UP | DOWN

    def write(self, line: int, column: int, text: str) -> None:
        """`text` over what is drawn there; one a line."""
        self._words[line] = (column, text)

    def render(self, line: int) -> str:
        """One line, without blanks at its end."""
        drawn = "".join(_CHARACTERS[arms] for arms in self._arms[line])
        if line in self._words:
            column, text = self._words[line]
            drawn = drawn[:column] + text + drawn[column + len(text) :]
        return drawn.rstrip()
