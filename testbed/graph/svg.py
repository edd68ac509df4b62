"""A topology as an SVG drawing, and as a PNG of it. Owns colours and elements; positions come from `layout`.

Plain SVG 1.1 without scripts, style sheets or outside references; numbers have one decimal, so that the same scene
gives the same bytes everywhere. Full names and commands are in tooltips (`title` elements) where the drawing shortens
them. A PNG needs the optional package resvg-py, which carries its renderer, and a font.
"""

import importlib
import sys
from types import ModuleType
from xml.sax.saxutils import escape, quoteattr

from testbed.graph.layout import ARROW, CARD_PAD, MARGIN, Box, CardLine, HostCard, LinkDrawing, lay_out
from testbed.graph.measure import LINE, NAME, PAD, SMALL, TITLE, Rect
from testbed.graph.scene import DOT, Kind, Scene, Verdict

# The widest comes last, see `measure`.
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
INK = "#1e293b"  # of text that asks for no colour
WHITE, BOX, BORDER, STRIP, STEM = "#ffffff", "#fbfcfd", "#cbd5e1", "#eef2f6", "#94a3b8"
MUTED, LINK, GOOD, BAD = "#64748b", "#475569", "#047857", "#c81e1e"
VERDICTS: dict[Verdict, str] = {"asked": INK, "ok": GOOD, "failed": BAD, "outdated": MUTED}
CORNER = 9.0  # where a link turns
HALO = 7.0  # what is left free around a link that crosses others
_PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{text}</svg>'
PIXELS_PER_UNIT = 2.0  # sharp on dense screens and in print


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
    for link in sorted(picture.links, key=lambda link: -link.y):  # the nearest ones over those that pass below
        parts += _link(link, picture.floor)
    for box in picture.boxes:
        parts += _box(box)
    for link in picture.links:
        parts += _card(link)
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
        rectangle(router, LINK, radius=router.height / 2),
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


def _link(link: LinkDrawing, top: float) -> list[str]:
    """The line, over a white one that parts it from those that it crosses."""
    start, end, y = link.start, link.end, link.y
    down = ("M", start, top, "V", y - CORNER, "Q", start, y, start + CORNER, y)
    up = ("H", end - CORNER, "Q", end, y, end, y - CORNER, "V", top)
    return [path((*down, *up), WHITE, HALO), path((*down, *up), LINK if link.link.ok else BAD, 2)]


def _card(link: LinkDrawing) -> list[str]:
    rect = link.card
    left, right, baseline = rect.x + CARD_PAD, rect.right - CARD_PAD, rect.y + 19
    parts = [
        group(link.link.name),
        rectangle(rect, WHITE, LINK if link.link.ok else BAD, radius=8),
        label(left, baseline, link.name, size=NAME, bold=True),
        label(right, baseline, DOT.join(link.link.facts), fill=MUTED, anchor="end"),
    ]
    for row, line in enumerate(link.lines, 1):
        parts += _card_line(left, baseline + 1 + LINE * row, line)
    return [*parts, "</g>"]


def _card_line(left: float, baseline: float, line: CardLine) -> list[str]:
    colour = VERDICTS[line.verdict]
    y, right = baseline - 4, left + 12
    heads: list[tuple[str | float, ...]] = []
    if line.arrow in ("right", "both"):
        heads.append(("M", right - 4, y - 3, "L", right, y, "L", right - 4, y + 3))
    if line.arrow in ("left", "both"):
        heads.append(("M", left + 4, y - 3, "L", left, y, "L", left + 4, y + 3))
    arrow = [path(("M", left, y, "H", right, *(step for head in heads for step in head)), colour, 1.3)] if heads else []
    return [*arrow, label(left + ARROW, baseline, line.text, fill=colour)]


def number(value: float) -> str:
    """`12.3`, and `12` for 12.0."""
    return f"{value:.1f}".removesuffix(".0")


def group(tooltip: str) -> str:
    """The beginning of a group of elements that share a tooltip."""
    return f"<g><title>{escape(tooltip)}</title>"


def rectangle(rect: Rect, fill: str, stroke: str | None = None, radius: float = 0) -> str:
    line = f' stroke="{stroke}" stroke-width="1.3"' if stroke else ""
    return (
        f'<rect x="{number(rect.x)}" y="{number(rect.y)}" width="{number(rect.width)}" '
        f'height="{number(rect.height)}" rx="{number(radius)}" fill="{fill}"{line}/>'
    )


def path(steps: tuple[str | float, ...], stroke: str, width: float, cap: str = "butt") -> str:
    """An open line; `steps` as in a path's `d`: letters and coordinates."""
    words = " ".join(step if isinstance(step, str) else number(step) for step in steps)
    end = "" if cap == "butt" else f' stroke-linecap="{cap}"'
    return f'<path d="{words}" fill="none" stroke="{stroke}" stroke-width="{number(width)}"{end}/>'


def label(
    x: float, y: float, text: str, *, fill: str = INK, size: float = SMALL, bold: bool = False, anchor: str = "start"
) -> str:
    """Text with its baseline at `y`."""
    return label_of(x, y, [(text, fill)], size=size, bold=bold, anchor=anchor)


def label_of(
    x: float, y: float, spans: list[tuple[str, str]], *, size: float = SMALL, bold: bool = False, anchor: str = "start"
) -> str:
    """Text of several (text, colour), one behind the other."""
    attributes = {"x": number(x), "y": number(y)}
    if size != SMALL:
        attributes["font-size"] = number(size)
    if bold:
        attributes["font-weight"] = "bold"
    if anchor != "start":
        attributes["text-anchor"] = anchor
    written = " ".join(f"{key}={quoteattr(value)}" for key, value in attributes.items())
    inside = "".join(
        escape(text) if fill == INK else f'<tspan fill="{fill}">{escape(text)}</tspan>' for text, fill in spans
    )
    return f"<text {written}>{inside}</text>"


class PngError(Exception):
    """A PNG cannot be drawn here; one sentence with the next step."""


def draw_png(svg: str, fonts: str) -> bytes:
    """The drawing as PNG; `fonts` is the list of font families that it asks for. Raises PngError."""
    try:
        resvg = importlib.import_module("resvg_py")
    except ImportError:
        raise PngError(
            f"PNG needs the package resvg-py, which is not installed; get it with: {sys.executable} -m pip install "
            "resvg-py, or draw a .svg"
        ) from None
    if not _draws_text(resvg, fonts):
        raise PngError(
            "this machine has none of the fonts that the picture asks for, and its PNG would have no text; install one "
            "(apt-get install fonts-dejavu-core), or draw a .svg"
        )
    return bytes(resvg.svg_to_bytes(svg_string=svg, zoom=PIXELS_PER_UNIT))


def _draws_text(resvg: ModuleType, fonts: str) -> bool:
    """True when text leaves a trace: without a font the renderer leaves it out and says nothing."""
    text = f'<text x="2" y="15" font-size="14" font-family="{fonts}">W</text>'
    with_text, without = (bytes(resvg.svg_to_bytes(svg_string=_PROBE.format(text=part))) for part in (text, ""))
    return with_text != without
