"""`pddbed graph` through the real command, with a real lab where one is asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Lab, run_pddbed

TWO = "topologies/two-dc-tiny.yaml"


def test_text_is_the_default_and_has_no_colours_in_a_pipe() -> None:
    result = run_pddbed("graph", TWO)
    assert (result.returncode, result.stderr) == (0, "")
    assert "├─ wan0 ─┐" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("name", "begins"), [("x.svg", b"<svg "), ("x.PNG", b"\x89PNG"), ("x.dot", b"graph "), ("x.txt", b"two-dc-tiny  ")]
)
def test_the_ending_of_the_output_says_what_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    result = run_pddbed("graph", TWO, "-o", str(tmp_path / name))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_another_ending_or_no_file_is_a_usage_error(tmp_path: Path) -> None:
    result = run_pddbed("graph", TWO, "-o", str(tmp_path / "x.pdf"))
    assert result.returncode == 2
    assert "use one of .svg, .png, .dot, .txt" in result.stderr
    assert run_pddbed("graph").returncode == 2


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    missing = run_pddbed("graph", "none.yaml")
    assert (missing.returncode, missing.stderr) == (1, "pddbed: none.yaml: there is no such file\n")
    blocked = run_pddbed("graph", TWO, "-o", str(tmp_path / "no" / "x.svg"))
    assert blocked.returncode == 1
    assert blocked.stderr == (
        f"pddbed: {tmp_path}/no/x.svg cannot be written (No such file or directory); choose another --output\n"
    )
    nowhere = run_pddbed("graph", TWO, "--lab", "not-there")
    assert nowhere.returncode == 1
    assert nowhere.stderr.startswith('pddbed: no lab "not-there" is up;')


@pytest.mark.root
def test_a_running_lab_shows_what_was_measured_and_what_has_changed_since(
    raise_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = raise_lab(TWO, "graph-live", "--no-workers")
    assert (
        run_pddbed("wan", "set", "-l", lab.name, "wan0", "--direction", "backward", "--delay", "30ms").returncode == 0
    )
    result = run_pddbed("graph", "--lab", lab.name)
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "main → remote 400mbit, 20ms, queue 2MB (40ms) measured" in text
    assert "remote → main 400mbit, 30ms, queue 2MB (40ms), changed measured" in text
    assert text.count("before the change") == 1
    drawing = tmp_path / "live.svg"
    assert run_pddbed("graph", TWO, "--lab", lab.name, "-o", str(drawing)).returncode == 0
    assert drawing.read_text().count(">measured ") == 2
    other = run_pddbed("graph", "topologies/three-dc.yaml", "--lab", lab.name)
    assert other.returncode == 1
    assert f'"{lab.name}" has other hosts or links than this file' in other.stderr
    assert str(ROOT / TWO) in other.stderr
