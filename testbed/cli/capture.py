"""`pddbed capture`: packets of a WAN link or a host as a pcapng file."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli import CommandError
from testbed.cli.options import json_option, lab_errors, lab_option, lab_or_only, print_json
from testbed.cli.output import echo

if TYPE_CHECKING:
    from testbed.capture.run import Outcome

HEADERS_RING, FULL_RING = 16 << 20, 64 << 20


@click.command()
@click.argument("name", metavar="LINK|HOST")
@lab_option
@json_option
@click.option("-w", "--write", "file", metavar="FILE", required=True, help="The file to write; - is standard output.")
@click.option("--force", "-f", is_flag=True, help="Overwrite FILE.")
@click.option("--headers-only", is_flag=True, help="Keep headers (IP, TCP, UDP) and no payload.")
@click.option("--snaplen", type=click.IntRange(1, 262144), metavar="N", help="Keep the first N bytes of a packet.")
@click.option("--duration", metavar="TIME", help="End after this time (10s, 2min).")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N packets.")
@click.option("--at", metavar="DATACENTER", help="Record both directions at this end of the link.")
@click.option(
    "--settle",
    metavar="TIME",
    default="3s",
    show_default=True,
    help="Wait up to this time, at the end, for a moment when no frame is on its way: audits are exact then.",
)
@click.option("--ring", metavar="SIZE", help="Buffer for packets not yet written [64MiB; 16MiB for headers].")
@click.option("--allow-drops", is_flag=True, help="Succeed even if packets are missing from the file.")
@lab_errors
def capture(lab: str | None, as_json: bool, name: str, file: str, force: bool, **options: Any) -> None:
    """Record the packets of a WAN link, or of a host's interface, until Ctrl-C.

    A link's packets are recorded where they leave their border router, before the link delays or loses them. TCP
    super-packets (up to 64 KiB) are recorded as they pass. With --json, a summary is printed at the end.
    """
    from testbed.capture.run import capture as run
    from testbed.capture.run import open_output
    from testbed.lab.record import LabError

    parameters = _parameters(name, options)
    created: list[Path] = []

    def open_out() -> int:
        if file == "-":
            return os.dup(sys.stdout.fileno())
        fd = open_output(Path(file), overwrite=force)
        created.append(Path(file))
        return fd

    if file == "-" and (as_json or sys.stdout.isatty()):
        raise click.UsageError("-w - writes packets to standard output; send it to a program, and leave --json out")
    record = lab_or_only(lab)
    try:
        outcome = run(record, parameters, open_out, _progress(name, file))
    except LabError:
        for path in created:
            if path.is_file():
                with suppress(OSError):
                    path.unlink()
        raise
    if as_json:
        print_json(_account(outcome, name, file))
    else:
        echo(_sentence(outcome, file), err=True)
    if outcome.error is not None:
        raise CommandError(f"{outcome.error}; {file} is readable up to there")
    if outcome.dropped and not options["allow_drops"]:
        raise CommandError(
            f"{outcome.dropped} packets are missing from {file}: the ring was full. Capture less (--headers-only), "
            "give it a larger --ring, or accept it with --allow-drops"
        )


def _parameters(name: str, options: dict[str, Any]) -> Any:
    """The parameters of the capture. Raises UsageError."""
    from testbed.capture.ring import BLOCK_BYTES, Selection
    from testbed.capture.run import Parameters
    from testbed.model.units import UnitError, parse_duration, parse_size

    headers_only, snaplen = options["headers_only"], options["snaplen"]
    if headers_only and snaplen is not None:
        raise click.UsageError("--headers-only and --snaplen exclude each other")
    ring_bytes = HEADERS_RING if headers_only else FULL_RING
    duration_s = None
    try:
        settle_s = parse_duration(options["settle"]) / 1e9
        if options["ring"] is not None:
            ring_bytes = parse_size(options["ring"])
        if options["duration"] is not None:
            duration_s = parse_duration(options["duration"]) / 1e9
    except UnitError as error:
        raise click.UsageError(str(error)) from None
    if not 4 * BLOCK_BYTES <= ring_bytes <= 1 << 30:
        raise click.UsageError(f"--ring {options['ring']}: from 4MiB to 1GiB")
    return Parameters(
        name, options["at"], Selection(headers_only, snaplen, ring_bytes), duration_s, options["count"], settle_s
    )


def _progress(name: str, file: str) -> Any:
    """Said on standard error: that recording has begun, and on a terminal how much there is."""
    from testbed.model.units import short_size

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "started":
            echo(f"capturing {name} to {file}; Ctrl-C ends", err=True)
        elif event["event"] == "settling" and sys.stderr.isatty():
            click.echo("\r\033[Kwaiting until no frame is on its way; Ctrl-C again ends now", err=True)
        elif event["event"] == "progress" and sys.stderr.isatty():
            size = short_size(event["offset"])
            click.echo(f"\r{event['packets']} packets, {size}, {event['dropped']} dropped \033[K", err=True, nl=False)
        elif event["event"] in ("ended", "failed") and sys.stderr.isatty():
            click.echo("\r\033[K", err=True, nl=False)

    return show


def _account(outcome: "Outcome", name: str, file: str) -> dict[str, Any]:
    return {
        "point": name,
        "file": file,
        "packets": outcome.packets,
        "dropped": outcome.dropped,
        "file_bytes": outcome.file_bytes,
        "seconds": round(outcome.seconds, 3),
        "counted": list(outcome.counted),
        "error": outcome.error,
    }


def _sentence(outcome: "Outcome", file: str) -> str:
    dropped = "an unknown number" if outcome.dropped is None else str(outcome.dropped)
    return f"{outcome.packets} packets in {file} ({outcome.file_bytes} bytes), {dropped} dropped"
