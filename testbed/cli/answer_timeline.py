"""A request's record as a timeline drawn to scale. Pure: from a record to lines of text with styles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

LABEL_CELLS = 15
DETAIL_CELLS = 24
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the timeline. `end_ms` None: an instant. `open_end`: it went on after the answer."""

    label: str
    start_ms: float
    end_ms: float | None
    detail: str
    style: str
    open_end: bool = False


@dataclass(frozen=True, slots=True)
class Marks:
    """The characters of bars: blocks, or ASCII where the terminal's encoding has nothing better.

    `ends` fill a cell from the left, by growing parts; `right_half` is the cell where a bar begins in its middle.
    """

    bar: str = "█"
    ends: str = "▏▎▍▌▋▊▉█"
    right_half: str = "▐"
    fade: str = "░"
    instant: str = "◆"
    arrow: str = "→"
    dot: str = "·"


ASCII = Marks("#", "#", "#", ".", "*", "->", "-")


def milliseconds(value_ms: float) -> str:
    """`0.4 ms`, `12 ms`, `1.24 s`: three digits are enough for a reader."""
    if value_ms >= 1000:
        return f"{value_ms / 1000:.2f} s"
    return f"{value_ms:.0f} ms" if value_ms >= 10 else f"{value_ms:.1f} ms"


def size(value: int) -> str:
    """`512 B`, `34 kB`, `1.2 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            scaled = value / scale
            return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:.0f} {unit}"
    return f"{value} B"


def rows_of(record: Mapping[str, Any], styles: Mapping[str, str], marks: Marks) -> list[Row]:
    """The events, in order: prefill, transfers, first token, relay, hand-over, main decode, end."""
    origin = record["pdd_start_ns"]
    spans: dict[str, Mapping[str, Any]] = {}
    for span in record["pdd_spans"]:
        spans.setdefault(span["name"], span)

    def ms(at_ns: int) -> float:
        return (at_ns - origin) / NS_PER_MS

    end_ms = record["e2el"] * 1000
    rows: list[Row] = []

    def stretch(name: str, label: str, style: str, detail: str = "") -> None:
        span = spans.get(name)
        if span is not None:
            start, end = ms(span["start_ns"]), ms(span["end_ns"])
            took = f"{milliseconds(end - start)}{'  ' + detail if detail else ''}"
            rows.append(Row(label, start, min(end, end_ms), took, style, open_end=end > end_ms))

    def tokens(name: str) -> str:
        return _tokens(spans.get(name, {}).get("tokens", 0))

    def decoded(name: str, label: str, emitted: int | None) -> None:
        """A row for each worker that decoded. It may do so in pieces, and while another does: what counts then is whose
        tokens the answer has, `emitted` of all of the role's workers.
        """
        by_worker: dict[str, list[Mapping[str, Any]]] = {}
        for span in record["pdd_spans"]:
            if span["name"] == name:
                by_worker.setdefault(span["instance"], []).append(span)
        for worker, pieces in by_worker.items():
            start, end = ms(min(one["start_ns"] for one in pieces)), ms(max(one["end_ns"] for one in pieces))
            made = sum(max(0, one.get("tokens", 0)) for one in pieces)
            count = emitted if emitted is not None and len(by_worker) == 1 else made
            detail = f"{milliseconds(end - start)}  {_tokens(count)}"
            style = styles.get(worker, "")
            rows.append(Row(f"{label} {worker}", start, min(end, end_ms), detail, style, open_end=end > end_ms))

    cached = spans.get("prefill", {}).get("cached", 0)
    computed = f"{spans['prefill']['tokens'] - cached} of " if cached else ""
    stretch("prefill", f"prefill {record['pdd_prefill']}", "magenta", computed + tokens("prefill"))
    for name, label in (("fabric-transfer", "fabric"), ("wan-transfer", "WAN")):
        span = spans.get(name)
        target = record["pdd_relay"] if label == "fabric" else record["pdd_main"]
        if span is not None:
            stretch(name, f"{label} {marks.arrow} {span['peer']}", "yellow", size(span.get("bytes", 0)) + _hit(span))
        elif target is not None and "prefill" in spans:
            sent = ms(spans["prefill"]["end_ns"])
            rows.append(Row(f"{label} {marks.arrow} {target}", sent, end_ms, "still crossing", "yellow", open_end=True))
    if record["ttft"] is not None:
        first = record["ttft"] * 1000
        rows.append(Row("first token", first, None, f"at {milliseconds(first)}", "bold"))
    decoded("decode", "decode", None)
    decoded("relay-decode", "relay", record.get("pdd_rld_tokens"))
    if "hand-over" in spans and "extend" in spans:
        start, end = ms(spans["hand-over"]["start_ns"]), ms(spans["extend"]["end_ns"])
        rows.append(Row("hand-over", start, end, milliseconds(end - start), "cyan"))
    decoded("main-decode", "main", record.get("pdd_md_tokens"))
    rows.append(Row("end", end_ms, None, f"at {milliseconds(end_ms)}", "bold"))
    return rows


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _hit(span: Mapping[str, Any]) -> str:
    """The share that the receiver's cache held, where it held any."""
    cached = span.get("cached", 0)
    return f"  {cached / span['tokens']:.0%} hit" if cached else ""


def route_sentence(record: Mapping[str, Any]) -> str:
    """The pipeline, and the reason for it."""
    return f"pipeline {record['pdd_pipeline'].upper()}: {record['pdd_route_reason']}"


def handover_sentence(record: Mapping[str, Any], marks: Marks) -> str | None:
    """The hand-over's parts in words; None when there was none."""
    spans = {span["name"]: span for span in record["pdd_spans"]}
    if not {"hand-over", "extend"} <= spans.keys():
        return None
    ready, ids = spans["hand-over"]["start_ns"], spans["hand-over"]["end_ns"]
    extend = spans["extend"]
    if "relay-stopped" in spans:
        stopped = spans["relay-stopped"]["start_ns"]
        parts = [
            f"stop {milliseconds((stopped - ready) / NS_PER_MS)}",
            f"ids {milliseconds((ids - stopped) / NS_PER_MS)}",
        ]
    else:  # both went on
        parts = [f"caught up {milliseconds((ids - ready) / NS_PER_MS)}"]
    if "kv-tail" in spans:
        tail = spans["kv-tail"]
        parts.append(f"KV of {tail.get('tokens', 0)} {milliseconds((tail['end_ns'] - tail['start_ns']) / NS_PER_MS)}")
    took = milliseconds((extend["end_ns"] - extend["start_ns"]) / NS_PER_MS)
    parts.append(f"recompute {extend.get('tokens', 0)} {took}")
    pause = record.get("pdd_handoff_pause_ms")
    if pause is not None:
        parts.append(f"pause seen {milliseconds(pause)}")
    mode = record.get("pdd_handoff_mode")
    return f"hand-over{f' ({mode})' if mode else ''}: {f' {marks.dot} '.join(parts)}"


def bar(start: float, end: float, marks: Marks) -> str:
    """A bar between two positions in cells, as fine as the marks allow: eighths at its end, halves at its start."""
    first = int(start)
    parts = len(marks.ends)
    last_part = max(int(start * parts) + 1, round(end * parts))  # at least the thinnest mark
    last, rest = divmod(last_part, parts)
    if last == first or (last == first + 1 and rest == 0):
        if start - first >= 0.5:
            return " " * first + marks.right_half
        return " " * first + marks.ends[(last_part - first * parts) - 1]
    head = marks.right_half if start - first >= 0.5 else marks.bar
    return " " * first + head + marks.bar * (last - first - 1) + (marks.ends[rest - 1] if rest else "")


def draw(rows: Sequence[Row], width: int, marks: Marks) -> list[Text]:
    """Lines of at most `width` cells, all bars on one scale from 0 to the last end."""
    cells = max(10, width - LABEL_CELLS - DETAIL_CELLS - 2)
    total_ms = max([row.end_ms if row.end_ms is not None else row.start_ms for row in rows] + [1e-6])

    scale = Text(" " * LABEL_CELLS + " 0" + milliseconds(total_ms).rjust(cells - 1), style="dim")
    lines = [scale]
    for row in rows:
        start = max(0.0, min(row.start_ms / total_ms, 1.0)) * cells
        if row.end_ms is None:
            drawn = " " * min(int(start), cells - 1) + marks.instant
        else:
            drawn = bar(min(start, cells - 1 / len(marks.ends)), row.end_ms / total_ms * cells, marks)
            if row.open_end:
                drawn = drawn[: cells - 1].rstrip() + marks.fade
        line = Text(f"{row.label:<{LABEL_CELLS}.{LABEL_CELLS}} ")
        line.append(f"{drawn:<{cells}.{cells}}", style=row.style)
        line.append(f" {row.detail:<.{DETAIL_CELLS}}")
        line.rstrip()
        lines.append(line)
    return lines
