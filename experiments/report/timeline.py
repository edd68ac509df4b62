"""timeline.json: a run's requests as slices, for Perfetto and chrome://tracing. Pure."""

import heapq
from collections.abc import Mapping
from typing import Any

from experiments.framework.base import Part, PartResult


def timeline(results: Mapping[str, tuple[Part, PartResult]]) -> dict[str, Any]:
    """A process per part, a thread per request that is under way at once; a slice per span of a record.

    Records name their spans in `pdd_spans` (start_ns, end_ns, name); times are each part's own clock.
    """
    events: list[dict[str, Any]] = []
    for number, (name, (_, result)) in enumerate(results.items(), 1):
        events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}})
        spans = [(record, record.get("pdd_spans") or []) for record in result.records]
        timed = [
            (min(s["start_ns"] for s in rows), max(s["end_ns"] for s in rows), r, rows) for r, rows in spans if rows
        ]
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        lanes = 0
        for start_ns, end_ns, record, rows in sorted(timed, key=lambda entry: entry[0]):
            while busy and busy[0][0] <= start_ns:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                lane = heapq.heappop(free)
            else:
                lanes += 1
                lane = lanes
            heapq.heappush(busy, (end_ns, lane))
            events += [_slice(number, lane, record, span) for span in rows]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _slice(process: int, lane: int, record: Mapping[str, Any], span: Mapping[str, Any]) -> dict[str, Any]:
    details = {key: value for key, value in span.items() if key not in ("name", "start_ns", "end_ns")}
    return {
        "name": span["name"],
        "cat": str(record.get("row", "request")),
        "ph": "X",
        "ts": span["start_ns"] / 1000,
        "dur": max(0, span["end_ns"] - span["start_ns"]) / 1000,
        "pid": process,
        "tid": lane,
        "args": {"request": record.get("request_id"), **details},
    }
