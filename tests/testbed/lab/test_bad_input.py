"""What a person gets wrong gives one clear sentence with the next step, status 1 (usage 2), and builds nothing."""

import os
import socket
from pathlib import Path

import pytest
import torch

from testbed.topology.overlay import laid_over
from tests.conftest import ROOT, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]
TINY = ROOT / "topologies" / "two-dc-tiny.yaml"


def fails(*arguments: str, status: int = 1, **options: str) -> str:
    result = run_pddbed(*arguments, env={**os.environ, **options})
    assert result.returncode == status, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def with_model(tmp_path: Path, name: str) -> str:
    file = tmp_path / "lab.yaml"
    file.write_text(laid_over(TINY, {"model.name": name}))
    return str(file)


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = fails("up", str(TINY), "--name", "port", "--api", f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in error
    assert "--api" in error


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    error = fails("up", with_model(tmp_path, "gpt-7"), "--name", "model", "--api", "auto")
    assert "gpt-7" in error
    assert "tiny" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_told_before_any_worker_starts(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(laid_over(TINY, {"datacenters.remote.hosts.md0.device": "cuda"}))
    error = fails("up", str(file), "--name", "device", "--api", "auto")
    assert 'this machine has no device "cuda"; use cpu' in error


def test_a_model_that_was_not_fetched_says_how_to_get_it(tmp_path: Path) -> None:
    file = with_model(tmp_path, "smollm2-135m")
    error = fails("up", file, "--name", "model", "--api", "auto", PDDBED_MODELS=str(tmp_path))
    assert "pddbed model get smollm2-135m" in error


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"GGUF" + bytes(100)])
def test_a_broken_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.gguf").write_bytes(content)
    error = fails("up", with_model(tmp_path, "./broken.gguf"), "--name", "model", "--api", "auto")
    assert "broken.gguf" in error
    assert "Traceback" not in error


def test_a_missing_tool_is_named_with_its_package(tmp_path: Path) -> None:
    for tool in ("bash", "unshare"):
        found = next(Path(folder) / tool for folder in os.environ["PATH"].split(":") if (Path(folder) / tool).exists())
        (tmp_path / tool).symlink_to(found)
    error = fails("up", str(TINY), "--name", "tool", "--api", "auto", PATH=str(tmp_path))
    assert "mnexec" in error
    assert "apt-get install mininet" in error


def test_a_cpu_that_this_machine_lacks_is_refused_with_the_others(tmp_path: Path) -> None:
    file = tmp_path / "cpus.yaml"
    hosts = "datacenters.main.hosts"
    cpus = {f"{hosts}.p0.cpu": {"affinity": [4000]}, f"{hosts}.rld0.cpu": {"affinity": [4001]}}
    file.write_text(laid_over(TINY, cpus))
    error = fails("up", str(file), "--name", "cpus", "--api", "auto")
    assert "4000" in error
    assert "4001" in error


def test_a_driver_that_does_not_work_here_is_refused_with_the_reason() -> None:
    result = run_pddbed("doctor", "--json")
    if '"netem"' in result.stdout and "no sch_netem" not in result.stdout + result.stderr:
        pytest.skip("this kernel has netem, so nothing is missing")
    error = fails("up", str(TINY), "--name", "driver", "--api", "auto", "--wan-driver", "netem")
    assert 'wan "wan0"' in error
    assert "netem" in error


def test_usage_errors_have_status_2() -> None:
    fails("up", status=2)
    fails("up", str(TINY), "--api", "nonsense", status=2)
    fails("up", str(TINY), "--wan-driver", "tc", status=2)
    fails("wan", "set", "wan0", status=2)
    fails("no-such-command", status=2)


@pytest.mark.parametrize("command", ["status", "exec md0 true", "logs", "verify", "wan show", "ask Hello"])
def test_commands_for_a_lab_that_is_not_up_say_so(command: str) -> None:
    *group, last = command.split()[: 2 if command.startswith("wan") else 1]
    rest = command.split()[len(group) + 1 :]
    assert 'no lab "absent" is up' in fails(*group, last, "-l", "absent", *rest)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    error = fails("up", str(tmp_path / "none.yaml"))
    assert "none.yaml" in error
