"""`pddbed wan play`: congestion on the WAN links of a running lab, on a timeline."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli import CommandError
from testbed.cli.options import json_option, lab_errors, lab_option, lab_or_only, print_json
from testbed.cli.output import echo

if TYPE_CHECKING:
    from testbed.lab.messages import LinkState, Move, NextMove, TimelineState, Waiting

_READY_PATIENCE_S = 600.0
_POLL_S = 0.2


@click.command()
@lab_option
@json_option
@click.argument("file", required=False, metavar="FILE|-")
@click.option("--at-ready", is_flag=True, help="Begin when the lab is up and its workers serve.")
@click.option("--wait", is_flag=True, help="Return when the timeline is over.")
@click.option(
    "--stop",
    is_flag=True,
    help="End the timeline that plays: outages and cross traffic end, values of steps and ramps stay.",
)
@lab_errors
def play(lab: str | None, as_json: bool, file: str | None, at_ready: bool, wait: bool, stop: bool) -> None:
    """Play a timeline of congestion on the lab's WAN links, beginning now.

    FILE (- for standard input) holds a list as in a topology file's `congestion:`. It is checked completely before
    anything begins; every change is recorded in congestion.jsonl in the lab's records.
    """
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import WanPlay, WanShow, WanStop

    if stop == (file is not None):
        raise click.UsageError("name a FILE with a timeline, or --stop" if not stop else "--stop takes no FILE")
    if stop:
        record = lab_or_only(lab)
        state = ask_lab(record, WanStop(), timeout_s=60).congestion
    else:
        assert file is not None
        text, shown, folder = _read(file)
        record = _ready_record(lab) if at_ready else lab_or_only(lab)
        timeline = _timeline(text, shown, folder, ask_lab(record, WanShow()).links)
        state = ask_lab(record, WanPlay(timeline.to_dict()), timeout_s=60).congestion
        if wait:
            state = _wait(record, state)
    if as_json:
        print_json(state)
    else:
        echo("\n".join(describe_playing(state)))
    if state["errors"] and state["state"] != "playing":
        raise CommandError(f"{len(state['errors'])} changes failed; the first: {state['errors'][0]}")


def _read(file: str) -> tuple[str, str, Path]:
    """Text, its name for messages, and the folder that its traces are relative to."""
    from testbed.topology import TopologyErrors
    from testbed.topology.files import MAX_BYTES, read_text

    if file == "-":
        return sys.stdin.read(MAX_BYTES + 1), "<stdin>", Path.cwd()
    try:
        return read_text(file), file, Path(file).absolute().parent
    except TopologyErrors as errors:
        raise CommandError(str(errors)) from None


def _timeline(text: str, shown: str, folder: Path, links: "list[LinkState]") -> Any:
    from testbed.topology import TopologyErrors
    from testbed.topology.checks.memory import machine_memory_bytes
    from testbed.topology.timeline.file import timeline_from_text
    from testbed.topology.timeline.link_values import links_of_lab

    try:
        return timeline_from_text(text, shown, folder, links_of_lab(links), seed=0, memory_bytes=machine_memory_bytes())
    except TopologyErrors as errors:
        raise CommandError(str(errors)) from None


def _ready_record(lab: str | None) -> Any:
    """A lab that answers; it does once it is up."""
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import WanShow
    from testbed.lab.record import LabError, find_record

    deadline = time.monotonic() + _READY_PATIENCE_S
    while True:
        try:
            record = find_record(lab)
            ask_lab(record, WanShow())
        except LabError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
        else:
            return record


def _wait(record: Any, state: "TimelineState") -> "TimelineState":
    """Follow it to its end; Ctrl-C leaves it playing."""
    from rich.console import Console

    from testbed.lab.control import ask_lab
    from testbed.lab.messages import WanPlaying

    console = Console(stderr=True)
    with console.status("") as status:
        while state["state"] not in ("over", "stopped", "failed"):
            status.update(describe_playing(state)[0])
            time.sleep(_POLL_S)
            state = ask_lab(record, WanPlaying()).congestion or state
    return state


def describe_playing(state: "TimelineState") -> list[str]:
    """The timeline in lines: `two-dc.yaml: playing, 12.3 s of 60 s, 41 changes applied, at most 0.4 ms late`."""
    from testbed.model.units import format_duration

    source = os.path.relpath(state["source"]) if state["source"].startswith("/") else state["source"]
    elapsed = (state["elapsed_ns"] or 0) / 1e9
    length = "" if state["length_ns"] is None else f" of {format_duration(state['length_ns'])}"
    done = f"{state['applied']} changes applied"
    if state["applied"]:
        done += f", at most {state['latest_ns'] / 1e6:.1f} ms late"
    lines = [f"timeline {source}: {state['state']}, {elapsed:.1f} s{length}, {done}"]
    for item in state["playing"]:
        lines.append(f"  now: {item['kind']} on {_places(item)}")
    if state["next"] is not None:
        upcoming = state["next"]
        lines.append(f"  next: {upcoming['kind']} on {_places(upcoming)} at {upcoming['at_ns'] / 1e9:g} s")
    for waiting in state["waiting"]:
        share = "" if waiting["fraction"] is None else f" at {waiting['fraction']:.0%}"
        lines.append(f"  waits for {waiting['for']}{share}: {waiting['kind']} on {_places(waiting)}")
    lines += [f"  failed: {error}" for error in state["errors"]]
    return lines


def _places(item: "Move | NextMove | Waiting") -> str:
    links: dict[str, list[str]] = {}
    for link, direction in item["targets"]:
        links.setdefault(link, []).append(direction)
    return ", ".join(f"{link} {ways[0] if len(ways) == 1 else 'both ways'}" for link, ways in links.items())
