"""A topology as an SVG drawing. Owns colours and strokes; positions come from `layout`, elements from `markup`.

Plain SVG 1.1 without scripts, style sheets or outside references; the same scene gives the same bytes. Full names
and commands are in tooltips (`title` elements) where the drawing shortens them.
"""

from xml.sax.saxutils import escape

from testbed.graph.boxes import Box, HostCard
from testbed.graph.cards import ARROW, CARD_PAD, CardLine, Wire
from testbed.graph.layout import MARGIN, lay_out
from testbed.graph.markup import INK, group, label, label_of, number, path, rectangle
from testbed.graph.metrics import LINE, NAME, PAD, SMALL, TITLE
from testbed.graph.scene import DOT, Kind, Scene, Verdict

# The widest comes last, see `textwidth`.
FONTS = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', 'Noto Sans', 'DejaVu Sans', sans-serif"
# Stripe and ground per kind of host: Okabe and Ito's colours, which most colour-blind readers can tell apart.
COLOURS: dict[Kind, tuple[str, str]] = {
    "gateway": ("#334155", "#eef1f5"),
    "prefill": ("#0072b2", "#e6f1f8"),
    "relay-decode": ("#d55e00", "#fcefe6"),
    "main-decode": ("#009e73", "#e5f5f0"),
    "command": ("#8c5ba8", "#f3edf6"),
    "host": ("#64748b", "#f4f5f7"),
}
WHITE, BOX, BORDER, STRIP, STEM = "#ffffff", "#fbfcfd", "#cbd5e1", "#eef2f6", "#94a3b8"
MUTED, WIRE, GOOD, BAD = "#64748b", "#475569", "#047857", "#c81e1e"
VERDICTS: dict[Verdict, str] = {"asked": INK, "ok": GOOD, "failed": BAD, "outdated": MUTED}
CORNER = 9.0  # where a link turns
HALO = 7.0  # what is left free around a link that crosses others


def draw_svg(scene: Scene) -> str:
    """The picture as an SVG document."""
    picture = lay_out(scene)
    width, height = number(picture.width), number(picture.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONTS}" font-size="{number(SMALL)}" fill="{INK}" role="img">',
        f"<title>{escape(f'{scene.title}: {scene.subtitle}')}</title>",
        f'<rect width="{width}" height="{height}" fill="{WHITE}"/>',
        label(MARGIN, MARGIN + TITLE - 3, scene.title, size=TITLE, bold=True),
        label(MARGIN, MARGIN + TITLE + 16, scene.subtitle, fill=MUTED),
    ]
    for line, reason in enumerate(scene.warnings, 1):
        parts.append(label(MARGIN, MARGIN + TITLE + 16 + line * LINE, f"not to be trusted: {reason}", fill=BAD))
    for wire in sorted(picture.wires, key=lambda wire: -wire.y):  # the nearest ones over those that pass below
        parts += _wire(wire, picture.floor)
    for box in picture.boxes:
        parts += _box(box)
    for wire in picture.wires:
        parts += _card(wire)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(box: Box) -> list[str]:
    rect, fabric, router = box.rect, box.fabric, box.router
    baseline = rect.y + PAD + TITLE - 4
    parts = [
        group(box.datacenter.name),
        rectangle(rect, BOX, BORDER, radius=12),
        label(rect.x + PAD, baseline, box.name, size=TITLE - 2, bold=True),
        label(rect.right - PAD, baseline, box.datacenter.subnet, fill=MUTED, anchor="end"),
    ]
    if not box.cards:
        parts.append(label(rect.x + PAD, fabric.y - 10, "no hosts", fill=MUTED))
    for card in box.cards:
        parts += _host(card)
    return [
        *parts,
        rectangle(fabric, STRIP, radius=5),
        label(fabric.middle, fabric.y + 14, box.datacenter.fabric, fill=MUTED, size=SMALL - 0.5, anchor="middle"),
        path(("M", fabric.middle, fabric.bottom, "V", router.y), STEM, 1.5),
        rectangle(router, WIRE, radius=router.height / 2),
        label(router.middle, router.y + 16, f"router {box.datacenter.router}", fill=WHITE, anchor="middle"),
        "</g>",
    ]


def _host(card: HostCard) -> list[str]:
    rect = card.rect
    stripe, ground = COLOURS[card.host.kind]
    kind, dot, address = card.lines[0].partition(DOT)
    left, baseline = rect.x + 13, rect.y + 18
    return [
        group("\n".join([card.host.name, *card.host.lines])),
        rectangle(rect, ground, radius=6),
        path(("M", rect.x + 2, rect.y + 5, "V", rect.bottom - 5), stripe, 4, cap="round"),
        label(left, baseline, card.name, size=NAME, bold=True),
        label_of(left, baseline + LINE - 0.5, [(kind, stripe), (dot + address, MUTED)]),
        *(label(left, baseline + LINE * row - 0.5, line, fill=MUTED) for row, line in enumerate(card.lines[1:], 2)),
        "</g>",
    ]


def _wire(wire: Wire, top: float) -> list[str]:
    """The line, over a white one that parts it from those that it crosses."""
    start, end, y = wire.start, wire.end, wire.y
    down = ("M", start, top, "V", y - CORNER, "Q", start, y, start + CORNER, y)
    up = ("H", end - CORNER, "Q", end, y, end, y - CORNER, "V", top)
    return [path((*down, *up), WHITE, HALO), path((*down, *up), WIRE if wire.link.ok else BAD, 2)]


def _card(wire: Wire) -> list[str]:
    rect = wire.card
    left, right, baseline = rect.x + CARD_PAD, rect.right - CARD_PAD, rect.y + 19
    parts = [
        group(wire.link.name),
        rectangle(rect, WHITE, WIRE if wire.link.ok else BAD, radius=8),
        label(left, baseline, wire.name, size=NAME, bold=True),
        label(right, baseline, DOT.join(wire.link.facts), fill=MUTED, anchor="end"),
    ]
    for row, line in enumerate(wire.lines, 1):
        parts += _card_line(left, baseline + 1 + LINE * row, line)
    return [*parts, "</g>"]


def _card_line(left: float, baseline: float, line: CardLine) -> list[str]:
    colour = VERDICTS[line.row.verdict]
    y, right = baseline - 4, left + 12
    heads: list[tuple[str | float, ...]] = []
    if line.arrow in ("right", "both"):
        heads.append(("M", right - 4, y - 3, "L", right, y, "L", right - 4, y + 3))
    if line.arrow in ("left", "both"):
        heads.append(("M", left + 4, y - 3, "L", left, y, "L", left + 4, y + 3))
    arrow = [path(("M", left, y, "H", right, *(step for head in heads for step in head)), colour, 1.3)] if heads else []
    return [*arrow, label(left + ARROW, baseline, line.text, fill=colour)]
