"""PNG through the optional renderer, and DOT for Graphviz."""

import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from testbed.graph.dot import draw_dot
from testbed.graph.scene import Scene
from testbed.graph.svg import FONTS, PngError, draw_png, draw_svg
from tests.conftest import ROOT
from tests.testbed.graph.scenes import scene_of, scenes

THREE = ROOT / "topologies" / "three-dc.yaml"


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_a_png_is_the_svg_at_twice_its_size() -> None:
    svg = draw_svg(scene_of(THREE))
    drawn = [float(text) for text in re.findall(r'<svg [^>]*width="([0-9.]+)" height="([0-9.]+)"', svg)[0]]
    assert size(draw_png(svg, FONTS)) == pytest.approx([2 * side for side in drawn], abs=1)


def test_without_the_renderer_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    """In a process of its own, where the package cannot be imported."""
    program = (
        "import sys; sys.modules['resvg_py'] = None; from testbed.cli import main; "
        f"sys.argv = ['pddbed', 'graph', '{THREE}', '-o', '{tmp_path / 'x.png'}']; main(prog_name='pddbed')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr == (
        "pddbed: PNG needs the package resvg-py, which is not installed; get it with: "
        f"{sys.executable} -m pip install resvg-py, or draw a .svg\n"
    )
    assert not (tmp_path / "x.png").exists()


def test_a_png_without_any_text_is_refused() -> None:
    with pytest.raises(PngError, match="would have no text; install one"):
        draw_png(draw_svg(scene_of(THREE)), "no font has this name")


@settings(max_examples=40)
@given(scenes())
def test_dot_strings_are_closed_whatever_is_in_them(drawn: Scene) -> None:
    text = draw_dot(drawn)
    inside, escaped, braces = False, False, 0
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\" and inside:
            escaped = True
        elif character == '"':
            inside = not inside
        elif not inside:
            braces += {"{": 1, "}": -1}.get(character, 0)
            assert character in ' \n\t"{}[]=,;-_#.' or character.isalnum()
    assert not inside
    assert braces == 0
    edges = re.findall(r"^  r(\d+) -- r(\d+) \[", text, re.M)
    assert [(int(a), int(b)) for a, b in edges] == list(drawn.ends)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_reads_it() -> None:
    result = subprocess.run(["dot", "-Tplain"], input=draw_dot(scene_of(THREE)), capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
