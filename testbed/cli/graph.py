"""`pddbed graph`: a picture of a topology, as text or in a file."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli import CommandError
from testbed.cli.options import lab_errors

if TYPE_CHECKING:
    from testbed.graph.scene import Scene

FORMATS = (".svg", ".png", ".dot", ".txt")
WIDEST = 120  # columns; beyond that text is hard to follow
STYLES: dict[str, dict[str, Any]] = {
    "title": {"bold": True},
    "dim": {"dim": True},
    "ok": {"fg": "green"},
    "failed": {"fg": "red"},
    "gateway": {"bold": True},
    "prefill": {"fg": "blue", "bold": True},
    "relay-decode": {"fg": "yellow", "bold": True},
    "main-decode": {"fg": "green", "bold": True},
    "command": {"fg": "magenta", "bold": True},
    "host": {},
}


def _parse_output(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix.lower() not in FORMATS:
        raise click.BadParameter(f"{str(value)!r}: its ending says what is drawn; use one of {', '.join(FORMATS)}")
    return value


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    callback=_parse_output,
    metavar="FILE",
    help=f"File to draw into ({', '.join(FORMATS)}); without it, text is printed.",
)
@click.option("--lab", "-l", metavar="NAME", help="A running lab of this file; adds what was measured of its links.")
@lab_errors
def graph(file: Path | None, output: Path | None, lab: str | None) -> None:
    """Draw the topology in FILE, or that of a running lab.

    The picture has the datacenters with their hosts, and the WAN links with their requested values. With --lab it also
    has the values that the lab's last verification measured; FILE may be left out then and is the file that the lab
    was raised from.
    """
    scene = _scene(file, lab)
    if output is None:
        click.echo(_text(scene, sys.stdout.isatty() and not os.environ.get("NO_COLOR")), nl=False)
        return
    content = _drawing(output.suffix.lower())(scene)
    try:
        output.write_bytes(content)
    except OSError as error:
        raise CommandError(f"{output} cannot be written ({error.strerror}); choose another --output") from None


def _scene(file: Path | None, lab: str | None) -> "Scene":
    from testbed.cli.options import load_or_fail
    from testbed.graph.scene import SceneError, scene

    if lab is None:
        if file is None:
            raise click.UsageError("name a topology file, or a running lab with --lab")
        return scene(load_or_fail(file))
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import Status
    from testbed.lab.record import find_record

    status = ask_lab(find_record(lab), Status())
    source = file or (Path(status["file"]) if status["file"] else None)
    if source is None:
        raise CommandError(f'lab "{lab}" was raised without a file; name the topology file')
    try:
        return scene(load_or_fail(source), status)
    except SceneError as error:
        raise CommandError(str(error)) from None


def _text(scene: "Scene", coloured: bool) -> str:
    """The drawing as text, as wide as the terminal; 80 columns where there is none."""
    from testbed.graph.text import WIDTH, draw_text

    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDEST) if sys.stdout.isatty() else WIDTH
    if not coloured:
        return draw_text(scene, width)
    return draw_text(scene, width, lambda text, style: click.style(text, **STYLES[style]))


def _drawing(ending: str) -> Callable[["Scene"], bytes]:
    """The function that draws a file with this ending."""
    from testbed.graph.dot import draw_dot
    from testbed.graph.svg import draw_svg
    from testbed.graph.text import draw_text

    if ending == ".png":
        return _png
    draw: Callable[[Scene], str] = {".svg": draw_svg, ".dot": draw_dot, ".txt": draw_text}[ending]
    return lambda scene: draw(scene).encode()


def _png(scene: "Scene") -> bytes:
    from testbed.graph.svg import FONTS, PngError, draw_png, draw_svg

    try:
        return draw_png(draw_svg(scene), FONTS)
    except PngError as error:
        raise CommandError(str(error)) from None
