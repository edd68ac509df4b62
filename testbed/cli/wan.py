"""`pddbed wan`: the state of the WAN links, and changes of it while the lab runs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import click

from testbed.cli.options import json_option, lab_errors, lab_option, lab_or_only, print_json, table_console
from testbed.cli.output import echo
from testbed.cli.wan_play import describe_playing, play

if TYPE_CHECKING:
    from testbed.lab.messages import Direction, LinkState
    from testbed.links.base import LinkCounters


@click.group()
def wan() -> None:
    """Show and change WAN links of a running lab."""


wan.add_command(play)


@wan.command()
@lab_option
@json_option
@lab_errors
def show(lab: str | None, as_json: bool) -> None:
    """Show each link's requested and applied values, its counters, and the timeline that plays."""
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import WanShow
    from testbed.lab.record import find_record

    reply = ask_lab(find_record(lab), WanShow())
    links, playing = reply.links, reply.congestion
    if as_json:
        print_json([{**link, "congestion": playing} for link in links])
        return
    print_links(links)
    if playing is not None:
        echo("\n".join(describe_playing(playing)))


@wan.command("set")
@lab_option
@json_option
@click.argument("link")
@click.option(
    "--direction",
    type=click.Choice(["both", "forward", "backward"]),
    default="both",
    show_default=True,
    help="Direction of the link to change.",
)
@click.option("--rate", metavar="RATE", help="Bottleneck rate in IP bytes (400mbit; none: unlimited).")
@click.option("--delay", metavar="TIME", help="One-way delay (20ms).")
@click.option("--jitter", metavar="STD[,DISTRIBUTION]", help="Standard deviation of the delay (1ms; 5ms,pareto; none).")
@click.option("--loss", metavar="P|p,r[,bad[,good]]", help="Random loss (1%), or Gilbert-Elliott (1%,10%,70%,0.1%).")
@click.option("--duplicate", metavar="P", help="Share of packets that arrive twice.")
@click.option("--corrupt", metavar="P", help="Share of packets with a flipped bit.")
@click.option("--reorder", metavar="P", help="Share of packets that overtake others.")
@click.option("--queue", metavar="SIZE|bdp:X", help="Bottleneck buffer (8MiB, bdp:1.5; none: the default).")
@lab_errors
def set_link(lab: str | None, as_json: bool, link: str, direction: str, **values: str | None) -> None:
    """Change the named values of a link and keep the others. No packet in flight is dropped."""
    given = {key: _spelled(key, value) for key, value in values.items() if value is not None}
    if not given:
        raise click.UsageError("name at least one value to change, such as --delay 2s")
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import WanSet

    chosen = cast("Direction | None", None if direction == "both" else direction)
    state = ask_lab(lab_or_only(lab), WanSet(link, chosen, given)).link
    if as_json:
        print_json(state)
    else:
        print_links([state])


@wan.command()
@lab_option
@json_option
@click.argument("link", required=False)
@lab_errors
def reset(lab: str | None, as_json: bool, link: str | None) -> None:
    """Set LINK, or every link, back to the topology file's values, and forget what made the lab unfaithful."""
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import WanReset

    links = ask_lab(lab_or_only(lab), WanReset(link)).links
    if as_json:
        print_json(links)
    else:
        print_links(links)


def _spelled(key: str, value: str) -> Any:
    """A command-line value as the topology file spells it."""
    parts = value.split(",")
    if value == "none":
        return value
    if key == "jitter":
        return {"std": parts[0]} | ({"distribution": parts[1]} if len(parts) > 1 else {})
    if key == "loss" and len(parts) > 1:
        return dict(zip(("good_to_bad", "bad_to_good", "loss_bad", "loss_good"), parts, strict=False))
    if key == "queue":
        return {"bdp": value[4:]} if value.startswith("bdp:") else {"bytes": value}
    return value


def print_links(links: "list[LinkState]") -> None:
    """Print a row per direction: requested values, marked where they differ from the file, and counters."""
    from rich.table import Table

    from testbed.model.direction import DIRECTIONS
    from testbed.model.impairment import Impairment
    from testbed.topology.describe import describe_direction

    table = Table(box=None, pad_edge=False)
    for title in ("LINK", "FROM > TO", "DRIVER", "ASKED", "LATE", "BUSY", "PACKETS", "DROPPED", "UNASKED"):
        table.add_column(title, overflow="fold")
    for link in links:
        ends = link["between"]
        for direction, (source, target) in zip(DIRECTIONS, (ends, ends[::-1]), strict=True):
            asked, counters = link["asked"][direction], link["counters"].get(direction)
            changed = "" if asked == link["file"][direction] else " [yellow](changed)[/]"
            table.add_row(
                link["name"],
                f"{source} > {target}",
                link["driver"],
                describe_direction(Impairment.from_dict(asked)) + changed,
                *_punctual(link.get("punctuality"), direction),
                *(("[red]broken[/]", "", "") if counters is None else _counted(counters)),
            )
    table_console().print(table)
    for link in links:
        if link["problem"]:
            echo(link["problem"], fg="red")
        for note in notes_of(link["name"], link["applied"]):
            echo(note, fg="yellow")
        own = sum(counters.get("dropped_by_verify", 0) for counters in link["counters"].values())
        if own:
            echo(f"{link['name']}: verify's own load made the queues drop {own} packets more", dim=True)


def notes_of(name: str, link_applied: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """Limits of a link's driver on this machine, though it works."""
    refused = {applied.get("realtime_refused") for applied in link_applied.values()} - {None, ""}
    return [f'wan "{name}": no real-time priority ({reason}); the relay may be late' for reason in refused]


def _counted(counters: "LinkCounters") -> tuple[str, str, str]:
    """The counts of packets, of those dropped as asked, and of those dropped unasked."""
    dropped = counters["dropped_queue"] + counters["lost"] - counters.get("dropped_by_verify", 0)
    unasked = f"[red]{counters['dropped_unasked']}[/]" if counters["dropped_unasked"] else "0"
    return str(counters["packets"]), str(dropped), unasked


def _punctual(figures: Mapping[str, Any] | None, direction: str) -> tuple[str, str]:
    """The emulator's lateness (p99 and worst), and its load (in the last second and at most)."""
    if figures is None:  # the kernel's driver has no process, a broken link none any more
        return "-", "-"
    late, health = figures["lateness"][direction], figures["health"]
    times = f"{late['p99_ns'] / 1e6:.2f}, {late['max_ns'] / 1e6:.1f} ms"
    return times if late["count"] else "-", f"{health['busy_last']:.0%}, {health['busy_max']:.0%}"
