"""`pddbed audit`: the bytes in a capture, by class and direction, against the workers' own counters."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli.options import json_option, lab_errors, lab_option, print_json, table_console

if TYPE_CHECKING:
    from testbed.capture.audit import Audit, ClassRow
    from testbed.capture.context import Context


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@lab_option
@click.option(
    "--records",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory with the run's records (bytes-HOST.jsonl, requests.jsonl); needed when its lab is gone.",
)
@click.option("--captured-only", is_flag=True, help="Sort the bytes into classes and compare nothing.")
@click.option("--requests", "by_request", is_flag=True, help="Print a row for each request, too.")
@json_option
@lab_errors
def audit(
    file: Path, lab: str | None, records: Path | None, captured_only: bool, by_request: bool, as_json: bool
) -> None:
    """Compare a capture with the workers' own byte counters. Exit status 1 where they differ by more than 1 %.

    TCP payload counts once, however often it crossed. While the lab of the capture is up, the command finds it.
    """
    from testbed.capture.audit import audit as audit_capture
    from testbed.capture.counters import BadCounters
    from testbed.capture.packets import UnreadableCapture
    from testbed.lab.record import LabError

    context, records = _sources(file, lab, records, captured_only)
    try:
        result = audit_capture(file, context, records)
    except (UnreadableCapture, BadCounters) as error:
        raise LabError(str(error)) from None
    if as_json:
        print_json(_as_json(result, file))
    else:
        _print(result, compared=records is not None, by_request=by_request)
    if not result.ok:
        sys.exit(1)


def _sources(file: Path, lab: str | None, records: Path | None, captured_only: bool) -> tuple["Context", Path | None]:
    """The capture's context, and the directory with the counters (None: compare nothing). Raises LabError."""
    from testbed.capture.context import Context
    from testbed.capture.pcapng import read_comment
    from testbed.lab.record import LabError, find_record, live_records

    context = Context.from_comment(read_comment(file))
    if context is None and lab is None:
        raise LabError(f"{file} does not say which lab it is of (pddbed capture writes that); name it with --lab")
    record = None
    if lab is not None:
        record = find_record(lab)
    elif context is not None:
        ours = (r for r in live_records() if r.name == context.lab and r.state().get("started") == context.started)
        record = next(ours, None)
    if context is None:
        assert record is not None
        context = _context_of(record)
    elif record is not None and records is None and record.state().get("started") != context.started:
        raise LabError(f'{file} was not captured in the lab "{lab}" that is up now; give --records of its own run')
    if captured_only:
        return context, None
    if records is None and record is None:
        raise LabError(
            f'lab "{context.lab}" of this capture is down and its counters with it; name a copy of its records with '
            "--records, or compare nothing with --captured-only"
        )
    return context, records if records is not None else record.results if record is not None else None


def _context_of(record: Any) -> "Context":
    """The context of a file from another tool: the running lab's hosts, and no knowledge of which traffic passed."""
    from testbed.capture.context import Context, hosts_of
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import Status

    status = ask_lab(record, Status())
    return Context(
        lab=status["name"],
        started=status["started"],
        point="",
        host=None,
        hosts=hosts_of(status["hosts"]),
        passages=None,
    )


def _as_json(result: "Audit", file: Path) -> dict[str, Any]:
    return {
        "file": str(file),
        "lab": result.context.lab,
        "point": result.context.point,
        "packets": result.facts.packets,
        "dropped": result.dropped,
        "rows": [
            {**asdict(row), "difference": row.difference, "ok": row.ok, "undecided": row.undecided}
            for row in result.rows
        ],
        "directions": {name: asdict(facts) for name, facts in result.directions.items()},
        "connections": [asdict(connection) for connection in result.connections],
        "other_packets": result.other_packets,
        "requests": [{**asdict(row), "ok": row.ok} for row in result.requests],
        "problems": result.problems,
        "notes": result.notes,
        "ok": result.ok,
    }


def _print(result: "Audit", *, compared: bool, by_request: bool) -> None:
    console = table_console()
    console.print(_class_table(result, compared))
    for direction, facts in result.directions.items():
        if facts.retransmitted_bytes:
            console.print(f"{direction}: {facts.retransmitted_bytes} bytes of TCP payload crossed again, not counted")
    for direction, packets in result.other_packets.items():
        console.print(f"{direction}: {packets} packets that are not TCP")
    if by_request:
        console.print(_request_table(result))
    for note in result.notes:
        console.print(f"note: {note}")
    for problem in result.problems:
        console.print(f"[red]{problem}[/]")
    if compared:
        console.print(_verdict(result))


def _verdict(result: "Audit") -> str:
    wrong = sum(not row.ok for row in result.rows) + sum(not row.ok for row in result.requests)
    undecided = [row for row in result.rows if row.undecided]
    if result.ok:
        return "[green]capture and counters agree within 1 %[/]"
    if wrong and wrong == len(undecided) and not result.problems:
        most = max(row.at_edges for row in undecided)
        return (
            f"[red]it cannot be told whether they agree within 1 %[/]: up to {most} bytes were on their way while "
            "the counters were read; capture from one quiet moment to another, or for longer"
        )
    return "[red]they do not agree[/]" + (f": {wrong} rows differ by more than 1 %" if wrong else "")


def _class_table(result: "Audit", compared: bool) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("CLASS", "DIRECTION"):
        table.add_column(title)
    titles = ("IN FILE", "CAPTURED", "SENT", "RECEIVED", "DIFFERENCE") if compared else ("IN FILE",)
    for title in titles:
        table.add_column(title, justify="right")
    for row in result.rows:
        cells = [row.traffic, row.direction, str(row.in_file)]
        if compared and not row.judged and row.counted is not None:
            cells += ["-", _number(row.counted), _number(row.received), "[dim]not told[/]"]
        elif compared:
            cells += [_number(row.captured), _number(row.counted), _number(row.received), _difference(row)]
        table.add_row(*cells)
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _difference(row: "ClassRow") -> str:
    if row.difference is None:
        return "-"
    text = f"{row.difference:+.2%}"
    return text if row.ok else f"[red]{text}[/]"


def _request_table(result: "Audit") -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("REQUEST", overflow="fold")
    for title in ("KV OF BLOCKS", "RECORDED", "KV", "TOKEN-IDS", "CONTROL", "IDS"):
        table.add_column(title, justify="right")
    for row in result.requests:
        sizes = [str(sum(row.bytes.get(traffic, {}).values())) for traffic in ("kv", "token-ids", "control")]
        recorded = _number(row.recorded_kv_bytes)
        recorded = recorded if row.ok else f"[red]{recorded}[/]"
        table.add_row(row.request, str(row.kv_bytes), recorded, *sizes, str(sum(row.token_ids.values())))
    return table
