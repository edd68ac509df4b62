"""Elements of an SVG drawing as text. Numbers have one decimal, so that every machine writes the same bytes."""

from xml.sax.saxutils import escape, quoteattr

from testbed.graph.metrics import SMALL, Rect

INK = "#1e293b"  # of text that asks for no colour


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
