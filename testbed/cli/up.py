"""`pddbed up`: build a lab from a topology file and start its workers."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli import CommandError, Interrupted
from testbed.cli.options import json_option, lab_errors, print_json
from testbed.cli.output import echo, harmless

if TYPE_CHECKING:
    from testbed.lab.record import Record


def _parse_api(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    if value == "auto":
        return ("127.0.0.1", 0)
    address, colon, port = value.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise click.BadParameter(f"{value!r} is not HOST:PORT (127.0.0.1:8000, say) and not auto")
    return (address or "127.0.0.1", int(port))


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", metavar="LAB", help="Name of the lab. [default: the file's name:]")
@click.option(
    "--wan-driver",
    type=click.Choice(["auto", "netem", "userspace"]),
    default="auto",
    show_default=True,
    help="Emulator of the WAN links; overrides the file.",
)
@click.option("--no-workers", is_flag=True, help="Build the network only.")
@click.option(
    "--api",
    callback=_parse_api,
    metavar="HOST:PORT|auto",
    help="Address on this machine where the gateway listens; overrides the file.",
)
@click.option("--verify/--no-verify", default=True, help="Measure each link's delay and rate at the end.")
@click.option("--foreground", is_flag=True, help="Stay until Ctrl-C, then take the lab down.")
@json_option
@lab_errors
def up(
    file: Path,
    name: str | None,
    wan_driver: str,
    no_workers: bool,
    api: tuple[str, int] | None,
    verify: bool,
    foreground: bool,
    as_json: bool,
) -> None:
    """Build the lab described by FILE and start its workers.

    On any failure, or on Ctrl-C, everything that was built is taken down again.
    """
    from testbed.cli.options import load_or_fail
    from testbed.supervisor.preflight import check
    from testbed.supervisor.start import UpOptions
    from testbed.supervisor.start import up as start_lab

    plan = load_or_fail(file, name)
    readiness = check(plan, wan_driver, with_workers=not no_workers)
    if readiness.problems:
        raise CommandError("\n".join([f"{file}: this machine cannot raise the lab:", *readiness.problems]))
    serves = any(host.role == "gateway" for host in plan.hosts) and not no_workers
    options = UpOptions(
        driver=readiness.driver,
        with_workers=not no_workers,
        verify=verify,
        api=(api or (plan.api_address, plan.api_port)) if serves else None,
        tethered=foreground,
    )
    began = time.monotonic()
    with _Progress(quiet=as_json) as progress:
        try:
            state = start_lab(readiness.plan, options, progress.on_event)
        except KeyboardInterrupt:
            raise Interrupted(f'interrupted; nothing of lab "{plan.name}" is left') from None
    try:
        if as_json:
            print_json(state)
        else:
            _summary(state, time.monotonic() - began)
    except BrokenPipeError:  # the lab is up, whoever reads this
        pass
    except OSError as error:
        raise CommandError(f'lab "{plan.name}" is up, but that cannot be written here ({error.strerror})') from None
    if foreground:
        _stay(plan.name, state["started"])
        _end_own(plan.name, state["started"])


def _own(name: str, started: float) -> "Record | None":
    """The lab that this command raised, while it lives: another of its name may have come after it."""
    from testbed.lab.record import live_records

    return next((r for r in live_records() if r.name == name and r.state().get("started") == started), None)


def _end_own(name: str, started: float) -> None:
    from testbed.supervisor.start import down

    record = _own(name, started)
    if record is not None:
        down(record)


def _stay(name: str, started: float) -> None:
    """Wait for Ctrl-C, SIGTERM or the end of the terminal. Raises CommandError when the lab ends by itself."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        with suppress(OSError):
            echo("Ctrl-C takes the lab down.", err=True)
        while _own(name, started) is not None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        return
    raise CommandError(f'lab "{name}" ended by itself')


def _summary(state: dict[str, Any], seconds: float) -> None:
    from testbed.cli.wan import notes_of

    echo(f'lab "{state["name"]}" is up after {seconds:.1f} s: {state["hosts"]} hosts, WAN driver {state["driver"]}')
    _links(state)
    for name, applied in state["applied"].items():
        for note in notes_of(name, applied):
            echo(f"  {note}", fg="yellow")
    if state["api"]:
        echo(f"  OpenAI API at {state['api']}/v1 (model {state['model']})")
        echo('  try: pddbed ask "Why is the sky blue?"')
    echo(f"  end it with: {'sudo ' if os.environ.get('SUDO_USER') else ''}pddbed down {state['name']}")


def _links(state: dict[str, Any]) -> None:
    """Print a line per direction with the figures of the quick verification, or the round trip where there was none."""
    from testbed.verify.words import shown

    verified = state["verified"]
    if verified is None:
        for link in state["measured"]:
            echo(f"  {link['name']}: round trip {link['rtt_ms']:.2f} ms, asked {link['asked_rtt_ms']:g} ms")
        return
    for link in verified["links"]:
        for direction, figures in link["directions"].items():
            words = [
                f"{f['figure']} {shown(f['measured'], f['unit'])} (asked {shown(f['asked'], f['unit'])})"
                for f in figures
                if f["measured"] is not None and (f["asked"] or not f["ok"])
            ]
            failed = "" if all(figure["ok"] for figure in figures) else click.style("  OUT OF TOLERANCE", fg="red")
            click.echo(harmless(f"  {link['name']} {direction}: {', '.join(words)}") + failed)
    for reason in verified["reasons"]:
        echo(f"  not to be trusted: {reason}", fg="red")


class _Progress:
    """The steps of `up` on stderr: a spinner on a terminal, plain lines elsewhere."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._quiet = quiet
        self._status = console.status("starting") if console.is_terminal and not quiet else None

    def __enter__(self) -> "_Progress":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def on_event(self, event: dict[str, Any]) -> None:
        if event["event"] != "step" or self._quiet:
            return
        if self._status:
            self._status.update(event["text"].replace("[", r"\["))  # no markup
        else:
            with suppress(OSError):  # nobody reads it
                echo(f"{event['text']} ...", err=True)
