"""The timeline: on one scale, within its width, readable without colour and without Unicode."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.cli.answer_timeline import (
    ASCII,
    DETAIL_CELLS,
    LABEL_CELLS,
    Marks,
    Row,
    bar,
    draw,
    handover_sentence,
    milliseconds,
    route_sentence,
    rows_of,
    size,
)

MS = 1_000_000
BLOCKS = Marks()


def record(**changes: Any) -> dict[str, Any]:
    def span(name: str, instance: str, start_ms: float, end_ms: float, **details: Any) -> dict[str, Any]:
        return {
            "name": name,
            "instance": instance,
            "start_ns": int(start_ms * MS),
            "end_ns": int(end_ms * MS),
            **details,
        }

    return {
        "pdd_start_ns": 0,
        "e2el": 1.0,
        "ttft": 0.25,
        "pdd_prefill": "p0",
        "pdd_relay": "rld0",
        "pdd_main": "md0",
        "pdd_handoff_pause_ms": 61.0,
        "pdd_spans": [
            span("prefill", "p0", 0, 200, tokens=36),
            span("fabric-transfer", "p0", 200, 240, peer="rld0", bytes=1_658_880),
            span("wan-transfer", "p0", 200, 500, peer="md0", bytes=1_658_880),
            span("relay-decode", "rld0", 245, 525, tokens=6),
            span("hand-over", "md0", 500, 546, peer="rld0", tokens=6),
            span("relay-stopped", "md0", 525, 525),
            span("extend", "md0", 546, 575, tokens=6),
            span("main-decode", "md0", 575, 995, tokens=20),
        ],
        **changes,
    }


def extent(line: str) -> tuple[int, int]:
    """First and last drawn cell of a line's bar."""
    cells = line[LABEL_CELLS + 1 : 80 - DETAIL_CELLS - 1].rstrip()
    return len(cells) - len(cells.lstrip()), len(cells) - 1


def lines_of(rows: list[Row], marks: Marks = BLOCKS, width: int = 80) -> list[str]:
    return [line.plain for line in draw(rows, width, marks)]


def test_a_worker_that_decodes_in_pieces_beside_another_has_the_tokens_that_the_answer_has_of_it() -> None:
    pieces = [(575, 600, 3), (610, 640, -1), (650, 995, 12)]
    spans = [span for span in record()["pdd_spans"] if span["name"] != "main-decode"]
    spans += [
        {"name": "main-decode", "instance": "md0", "start_ns": start * MS, "end_ns": end * MS, "tokens": tokens}
        for start, end, tokens in pieces
    ]
    overlapped = record(pdd_spans=spans, pdd_rld_tokens=8, pdd_md_tokens=11)
    (main,) = [row for row in rows_of(overlapped, {}, Marks()) if row.label.startswith("main ")]
    assert (main.start_ms, main.end_ms, main.detail) == (575, 995, "420 ms  11 tokens")
    (relay,) = [row for row in rows_of(overlapped, {}, Marks()) if row.label.startswith("relay ")]
    assert relay.detail == "280 ms  8 tokens"
    taken_over = [*spans, {**spans[-1], "instance": "md1", "tokens": 4}]
    rows = [row for row in rows_of(record(pdd_spans=taken_over, pdd_md_tokens=19), {}, Marks()) if "main" in row.label]
    assert [(row.label, row.detail) for row in rows] == [
        ("main md0", "420 ms  15 tokens"),
        ("main md1", "345 ms  4 tokens"),
    ]


def test_bars_stand_where_their_times_are() -> None:
    rows = rows_of(record(), {}, Marks())
    lines = lines_of(rows)
    cells = 80 - LABEL_CELLS - DETAIL_CELLS - 2
    assert [row.label for row in rows] == [
        "prefill p0",
        "fabric → rld0",
        "WAN → md0",
        "first token",
        "relay rld0",
        "hand-over",
        "main md0",
        "end",
    ]
    for row, line in zip(rows, lines[1:], strict=True):
        first, last = extent(line)
        assert first == pytest.approx(row.start_ms / 1000 * cells, abs=1.01)
        assert last == pytest.approx((row.end_ms or row.start_ms) / 1000 * cells, abs=1.01)
    assert max(map(len, lines)) <= 80
    assert "200 ms  36 tokens" in lines[1]
    assert "300 ms  1.7 MB" in lines[3]
    assert "at 250 ms" in lines[4]


@given(st.floats(0, 40, exclude_max=True), st.floats(0, 40))
def test_a_bar_is_as_long_as_its_time_to_half_a_cell(start: float, length: float) -> None:
    end = min(40.0, start + length)
    drawn = bar(start, end, Marks())
    values = {mark: (index + 1) / 8 for index, mark in enumerate(Marks().ends)} | {Marks().right_half: 0.5, " ": 0}
    assert sum(values[mark] for mark in drawn) == pytest.approx(end - start, abs=0.76)
    assert len(drawn) - len(drawn.lstrip()) == int(start)
    assert len(drawn) <= 40
    assert drawn.strip(), "however short, it is seen"


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.booleans()), min_size=1, max_size=9))
def test_no_line_is_wider_than_asked(spans: list[tuple[float, float, bool]]) -> None:
    rows = [Row("a long label indeed", a, max(a, b), "x" * 40, "", open_end=o) for a, b, o in spans]
    for width in (60, 80, 100):
        assert max(len(line) for line in lines_of(rows, width=width)) <= width


def test_plain_ascii_is_enough() -> None:
    text = "\n".join(lines_of(rows_of(record(), {}, ASCII), ASCII)) + (handover_sentence(record(), ASCII) or "")
    assert text.isascii()


def test_a_transfer_that_outlives_the_answer_is_drawn_open() -> None:
    short = record(e2el=0.4, pdd_spans=[s for s in record()["pdd_spans"] if s["name"] in ("prefill", "relay-decode")])
    rows = {row.label: row for row in rows_of(short, {}, Marks())}
    assert rows["WAN → md0"].open_end
    assert rows["WAN → md0"].detail == "still crossing"
    assert lines_of(list(rows.values()))[3].rstrip().endswith("░ still crossing")
    assert handover_sentence(short, Marks()) is None


def test_the_hand_over_is_told_in_one_line() -> None:
    sentence = handover_sentence(record(), Marks())
    assert sentence == "hand-over: stop 25 ms · ids 21 ms · recompute 6 29 ms · pause seen 61 ms"
    assert len(sentence) <= 80


def test_the_hand_over_names_its_mode_and_what_only_some_modes_have() -> None:
    spans = [span for span in record()["pdd_spans"] if span["name"] != "relay-stopped"]
    overlap = record(pdd_handoff_mode="overlap", pdd_handoff_pause_ms=3.0, pdd_spans=spans)
    assert handover_sentence(overlap, Marks()) == (
        "hand-over (overlap): caught up 46 ms · recompute 6 29 ms · pause seen 3.0 ms"
    )
    tail = {"name": "kv-tail", "instance": "md0", "start_ns": 546 * MS, "end_ns": 560 * MS, "tokens": 5}
    kv = record(pdd_handoff_mode="kv", pdd_spans=[*record()["pdd_spans"], tail])
    assert "(kv): stop 25 ms · ids 21 ms · KV of 5 14 ms · recompute" in (handover_sentence(kv, Marks()) or "")


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [milliseconds(v) for v in (0.04, 9.96, 12.4, 999, 1000, 61_234)] == [
        "0.0 ms",
        "10.0 ms",
        "12 ms",
        "999 ms",
        "1.00 s",
        "61.23 s",
    ]
    assert [size(v) for v in (12, 32_768, 1_658_880, 23_000_000)] == ["12 B", "33 kB", "1.7 MB", "23 MB"]


def test_what_caches_had_is_shown_and_an_empty_delta_is_no_hole() -> None:
    warm = record(pdd_relay=None, pdd_pipeline="p-md", pdd_route_reason="hit rate 98.0% is above 95.0%")
    warm["pdd_spans"] = [
        {"name": "prefill", "instance": "p0", "start_ns": 0, "end_ns": 200 * MS, "tokens": 800, "cached": 799},
        # details of zero are left out of a record
        {"name": "wan-transfer", "instance": "p0", "start_ns": 200 * MS, "end_ns": 500 * MS, "peer": "md0"}
        | {"tokens": 800, "cached": 800},
        {"name": "main-decode", "instance": "md0", "start_ns": 500 * MS, "end_ns": 995 * MS, "tokens": 20},
    ]
    prefill, wan, *_ = rows_of(warm, {}, BLOCKS)
    assert prefill.detail == "200 ms  1 of 800 tokens"
    assert wan.detail == "300 ms  0 B  100% hit"
    assert len("1.24 s  1.7 MB  100% hit") <= DETAIL_CELLS
    assert route_sentence(warm) == "pipeline P-MD: hit rate 98.0% is above 95.0%"


def test_a_policy_is_a_reason_too() -> None:
    fixed = record(pdd_pipeline="p-rld", pdd_route_reason="policy idc-pd")
    assert route_sentence(fixed) == "pipeline P-RLD: policy idc-pd"
