"""A fresh machine has every external program that code and tests call, or can say what is optional."""

import shutil
import subprocess

import pytest

from tests import programs
from tests.programs import ROOT

pytestmark = pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="this is not Debian: packages differ")


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_every_program_that_python_code_calls_is_installed_by_the_project_or_optional() -> None:
    called: dict[str, str] = {}
    for file in tracked("*.py"):
        for program in programs.in_python((ROOT / file).read_text()):
            called.setdefault(program, file)
    assert len(called) > 20
    lacking = programs.unprovided(called)
    assert {name: (why, called[name]) for name, why in lacking.items() if not name.startswith("no-such")} == {}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('subprocess.run(["tcpdump", "-i", x])', {"tcpdump"}),
        ('subprocess.Popen(("nice", "-n", "5", "iperf3"))', {"nice", "iperf3"}),
        ('lab.exec("md0", "sh", "-c", "ss -l | grep -q . && exec jq .")', {"sh", "ss", "grep", "jq"}),
        ('shutil.which("socat")', {"socat"}),
        ('run(["env", "A=1", "timeout", "5", "nc"])', {"env"}),
        ("f(['not-a-program'])", set()),
    ],
)
def test_calls_are_found(code: str, expected: set[str]) -> None:
    assert programs.in_python(code) == expected


def test_a_program_that_nothing_installs_is_named() -> None:
    assert programs.unprovided(["ip", "sh", "surely-not-there"]) == {"surely-not-there": "not on this machine"}
