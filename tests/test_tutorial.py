"""Every command of docs/tutorial.md, run in order as a reader would; its output holds the lines shown there."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]
TUTORIAL = ROOT / "docs" / "tutorial.md"
LABS = ("two-dc-tiny", "byo-engine", "mine")
MAY_SAY_NO = ("pddbed verify", "pddbed bench", "pddbed compare")  # status 1 on a machine too busy to be trusted


class Step(NamedTuple):
    """A command, and the lines of its output that the tutorial shows."""

    command: str
    shown: list[str]


def steps(markdown: str) -> list[Step]:
    """Commands (behind `$`, continued behind `>`) and output of the blocks marked `console`; `...` leaves lines out."""
    found: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:], []))
            elif line.startswith("> ") and not found[-1].shown:
                found[-1] = Step(f"{found[-1].command}\n{line[2:]}", [])
            elif line.strip(" .…"):
                found[-1].shown.append(line)
    return found


def words(line: str) -> list[str]:
    """The words of a line that do not depend on the machine: no figures, no units, no bars, no generated text."""
    return re.findall(r"(?<![\w-])[a-z][a-z-]{2,}[a-z](?![\w-])", re.sub(r"«.*»?.*", "", line.lower()))


def has_words_in_order(wanted: list[str], output: str) -> bool:
    """True when one line of `output` has all of them, in this order, maybe with others between."""
    return any(all(word in rest for word in wanted) for rest in (iter(words(line)) for line in output.splitlines()))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """The folder in which the commands run: this checkout's topologies, at ports of this machine that are free."""
    shutil.copytree(ROOT / "topologies", tmp_path / "topologies")
    yield tmp_path
    for name in LABS:
        run_pddbed("down", name)


@pytest.mark.nightly
def test_every_command_of_the_tutorial_does_what_the_tutorial_shows(checkout: Path) -> None:
    ports = {port: str(free_port()) for port in ("127.0.0.1:8000", "127.0.0.1:18100", "127.0.0.1:18200")}

    def moved(text: str) -> str:
        for port, free in ports.items():
            text = text.replace(port, f"127.0.0.1:{free}")
        return text.replace("pddbed up ", "pddbed up --wan-driver userspace ")  # as the output that is shown

    for file in (checkout / "topologies").glob("*.yaml"):
        file.write_text(moved(file.read_text()))
    tiny = checkout / "topologies" / "two-dc-tiny.yaml"
    tiny.write_text(tiny.read_text() + moved("\napi: {listen: 127.0.0.1:8000}\n"))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    for command, shown in steps(TUTORIAL.read_text()):
        ran = subprocess.run(
            ["bash", "-c", moved(command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=60,
            cwd=checkout,
            env=environment,
        )
        said = f"$ {command}\n{ran.stdout}"
        assert ran.returncode == 0 or (ran.returncode == 1 and command.startswith(MAY_SAY_NO)), said
        for line in shown:
            assert has_words_in_order(words(line), ran.stdout), f"the tutorial shows {line!r}, but\n{said}"
