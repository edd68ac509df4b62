"""Charts as inline SVG: lines, steps and marks over two axes, readable without the text around them. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 760, 380
_LEAST_SPAN = 1e-290
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 46, 58  # of a chart whose legend is one row
_ROW = 16  # of the legend
COLOURS = ("#1f6fb4", "#d1571b", "#2b8a3e", "#8a3ea8", "#a8862b", "#555555")  # told apart by dash as well
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")


@dataclass(frozen=True, slots=True)
class Series:
    """Points in data units. `style` is line, step (holds its value to the next point) or dots."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "line"


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical or horizontal line at a value, with its words: a target, say."""

    value: float
    text: str
    horizontal: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """`x_log`: a logarithmic x axis. `caption` says what to see."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[Mark] = field(default_factory=tuple)
    x_log: bool = False
    caption: str = ""
    y_from_zero: bool = True


def cdf(name: str, values: Sequence[float]) -> Series:
    """Share of values at or below each value, in percent, as a step."""
    ordered = sorted(values)
    count = len(ordered)
    points = [(ordered[0], 0.0)] if ordered else []
    points += [(value, 100 * (index + 1) / count) for index, value in enumerate(ordered)]
    return Series(name, points, "step")


# currentColor: as the page's ink, and black where the picture stands alone
STYLE = (
    "<style>text{font:12px DejaVu Sans,system-ui,sans-serif;fill:currentColor}.title{font-size:14px;font-weight:600}"
    ".grid{stroke:currentColor;stroke-opacity:.15}.series{fill:none;stroke-width:2}"
    "line.mark{stroke:currentColor;stroke-opacity:.6;stroke-dasharray:3 3}text.mark{fill-opacity:.75}</style>"
)


class _Axis:
    """From data to pixels, and where the ticks are."""

    def __init__(self, low: float, high: float, begin_px: float, end_px: float, log: bool = False) -> None:
        if high - low <= max(abs(low), abs(high), _LEAST_SPAN) * 1e-9:  # one value, as far as a picture can tell
            high = low + max(1.0, abs(low) * 1e-3)
        self.log = log and low > 0
        if self.log:
            self.low, self.high = low, high
            self.ticks = _log_ticks(low, high)
        else:
            step = _nice((high - low) / 6)
            self.low, self.high = math.floor(low / step) * step, math.ceil(high / step) * step
            count = round((self.high - self.low) / step)
            self.ticks = [self.low + index * step for index in range(count + 1)]
        self._begin_px, self._end_px = begin_px, end_px

    def px(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self._begin_px + share * (self._end_px - self._begin_px)


def _nice(raw: float) -> float:
    """The next of 1, 2, 5 x 10^n."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def number(value: float) -> str:
    """As short as an axis needs it."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def figure(chart: Chart) -> str:
    """The chart and its caption for a page. An empty one says so."""
    if not any(series.points for series in chart.series):
        return f'<p class="dim">{escape(chart.title)}: nothing was recorded</p>'
    caption = f"<figcaption>{escape(chart.caption)}</figcaption>" if chart.caption else ""
    return f"<figure>{svg(chart)}{caption}</figure>"


def svg(chart: Chart) -> str:
    """The picture alone; at least one point."""
    points = [point for series in chart.series for point in series.points]
    xs = [x for x, _ in points] + [mark.value for mark in chart.marks if not mark.horizontal]
    ys = [y for _, y in points] + [mark.value for mark in chart.marks if mark.horizontal]
    if chart.y_from_zero:
        ys.append(0.0)
    legend, rows = _legend(chart.series)
    top = _TOP + _ROW * (rows - 1)
    bottom = top + HEIGHT - _TOP - _BOTTOM
    x_axis = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, chart.x_log)
    y_axis = _Axis(min(ys), max(ys), bottom, top)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {bottom + _BOTTOM}" role="img" xmlns="http://www.w3.org/2000/svg">{STYLE}',
        f"<title>{escape(chart.title)}</title>",
        f'<text class="title" x="{_LEFT}" y="17">{escape(chart.title)}</text>',
        *_grid(x_axis, y_axis, chart, top, bottom),
    ]
    for index, series in enumerate(chart.series):
        parts.append(_drawn(series, x_axis, y_axis, index))
    parts += _marks(chart.marks, x_axis, y_axis, top, bottom)
    parts += legend
    parts.append("</svg>")
    return "".join(parts)


def _grid(x_axis: _Axis, y_axis: _Axis, chart: Chart, top: float, bottom: float) -> list[str]:
    right = WIDTH - _RIGHT
    parts = []
    for tick in x_axis.ticks:
        at = x_axis.px(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
    for tick in y_axis.ticks:
        at = y_axis.px(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    middle_x, middle_y = (_LEFT + right) / 2, (top + bottom) / 2
    parts.append(f'<text x="{middle_x}" y="{bottom + 36}" text-anchor="middle">{escape(chart.x_label)}</text>')
    turned = f'transform="rotate(-90 14 {middle_y})"'
    parts.append(f'<text x="14" y="{middle_y}" text-anchor="middle" {turned}>{escape(chart.y_label)}</text>')
    return parts


def _drawn(series: Series, x_axis: _Axis, y_axis: _Axis, index: int) -> str:
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
    pixels = [(x_axis.px(x), y_axis.px(y)) for x, y in series.points]
    if series.style == "dots":
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in pixels)
        return f'<g fill="{colour}" fill-opacity="0.6">{dots}</g>'
    path = [f"M{pixels[0][0]:.1f} {pixels[0][1]:.1f}"] if pixels else []
    for x, y in pixels[1:]:
        path.append(f"H{x:.1f}V{y:.1f}" if series.style == "step" else f"L{x:.1f} {y:.1f}")
    style = f'stroke="{colour}" stroke-dasharray="{dash}"'
    return f'<path class="series" d="{"".join(path)}" {style}/>'


def _marks(marks: Sequence[Mark], x_axis: _Axis, y_axis: _Axis, top: float, bottom: float) -> list[str]:
    parts = []
    for index, mark in enumerate(marks):
        if mark.horizontal:
            at = y_axis.px(mark.value)
            parts.append(f'<line class="mark" x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"/>')
            parts.append(f'<text class="mark" x="{WIDTH - _RIGHT - 4}" y="{at - 4:.1f}" text-anchor="end">')
        else:
            at = x_axis.px(mark.value)
            parts.append(f'<line class="mark" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}"/>')
            left = at > (WIDTH + _LEFT) / 2
            anchor, shift = ("end", -5) if left else ("start", 5)
            height = bottom - 10 - 15 * (index % 4)
            parts.append(f'<text class="mark" x="{at + shift:.1f}" y="{height}" text-anchor="{anchor}">')
        parts.append(f"{escape(mark.text)}</text>")
    return parts


def _legend(series: Sequence[Series]) -> tuple[list[str], int]:
    """Names with their lines, in as many rows as they take."""
    parts, at, row = [], float(_LEFT), 0
    for index, one in enumerate(series):
        width = 31 + 7.2 * len(one.name) + 22
        if at > _LEFT and at + width > WIDTH:
            at, row = float(_LEFT), row + 1
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
        y = 32 + _ROW * row
        line = f'x1="{at:.0f}" y1="{y}" x2="{at + 26:.0f}" y2="{y}" stroke="{colour}" stroke-dasharray="{dash}"'
        parts.append(f'<line class="series" {line}/>')
        parts.append(f'<text x="{at + 31:.0f}" y="{y + 4}">{escape(one.name)}</text>')
        at += width
    return parts, row + 1
