"""`pddbed logs` shows what each host wrote, whatever the host is called."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]
# Names of the lab's own logs (the relay's is wan-<link>.relay), and one that is nobody's.
NAMES = ["guardian", "supervisor", "forkserver", "wan-w0.relay", "ordinary"]


def logs(lab: Lab, *arguments: str) -> str:
    result = run_pddbed("logs", "-l", lab.name, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_hosts_named_like_the_labs_own_processes_have_logs_of_their_own(
    raise_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    file = tmp_path / "names.yaml"
    hosts = "\n".join(f"      {name}: {{command: 'echo I am {name}; exec sleep 600'}}" for name in NAMES)
    file.write_text(
        f"""\
datacenters:
  main:
    subnet: 10.1.0.0/24
    hosts:
{hosts}
  remote: {{subnet: 10.2.0.0/24}}
wan: [{{name: w0, driver: userspace, between: [main, remote]}}]
"""
    )
    lab = raise_lab(file, "log-names", "--no-verify")
    for name in NAMES:
        assert logs(lab, name) == f"I am {name}\n"
    assert "I am" not in logs(lab, "lab/guardian")
    assert "I am" not in logs(lab, "lab/wan-w0.relay")
    everything = logs(lab).splitlines()
    assert {f"{name:<12} I am {name}" for name in NAMES} <= set(everything)
    assert sum("I am" in line for line in everything) == len(NAMES)


def test_the_labs_own_logs_need_no_prefix_where_no_host_has_their_name(
    raise_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text("datacenters: {main: {subnet: 10.1.0.0/24, hosts: {a: {}}}}\n")
    lab = raise_lab(file, "log-plain", "--no-verify")
    assert logs(lab, "guardian") == logs(lab, "lab/guardian")
    missing = run_pddbed("logs", "-l", lab.name, "b")
    assert missing.returncode == 1
    assert missing.stderr == 'pddbed: no log of "b"; there are: lab/guardian\n'
