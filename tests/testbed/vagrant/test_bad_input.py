"""What `make vagrant-test` says, in one sentence with status 1, before it starts anything."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.vagrant import box, machine
from testbed.vagrant.machine import Guest, VagrantError
from testbed.vagrant.vagrant import Vagrant
from tests.conftest import ROOT


def vagrant_test(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "testbed.vagrant", *arguments],
        cwd=ROOT,
        env=os.environ | {"PDDBED_CACHE": str(tmp_path / "cache")} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with a box of this project's key, small, its manifest right."""
    boxes = tmp_path / f"box-{box.key_of(ROOT)}" / "boxes"
    boxes.mkdir(parents=True)
    (boxes / "box.img").write_bytes(b"image" * 1000)
    (boxes / "vmlinuz").write_bytes(b"kernel")
    (boxes.parent / box.MANIFEST).write_text(json.dumps(box.digests(boxes.parent)))
    return tmp_path


@pytest.mark.root
def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = vagrant_test(tmp_path, "--port", str(port))
    assert result.returncode == 1
    assert f"port {port} of 127.0.0.1" in result.stderr
    assert "PDDBED_VM_PORT=" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.root
def test_missing_programs_are_named_all_at_once(tmp_path: Path) -> None:
    result = vagrant_test(tmp_path, "--port", str(machine.free_port()), PATH=str(tmp_path))
    assert result.returncode == 1
    assert "run: apt-get install --no-install-recommends " in result.stderr
    for package in ("libvirt-clients", "vagrant", "mmdebstrap"):
        assert package in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_room_it_says_how_much_there_is(tmp_path: Path) -> None:
    with pytest.raises(VagrantError, match=r"building the box needs 1000000 GB in .*, where [\d.]+ GB are free"):
        machine.require_room(tmp_path, 10**15, "building the box")
    machine.require_room(tmp_path, 1, "building the box")


def test_a_whole_box_is_found_and_one_of_another_project_is_not(cache: Path, tmp_path: Path) -> None:
    found = box.find(cache, ROOT)
    assert found is not None
    assert (found.boxes / "box.img").exists()
    assert box.find(tmp_path / "elsewhere", ROOT) is None


@pytest.mark.parametrize("mistake", ["changed", "missing", "added", "no manifest", "no JSON"])
def test_a_damaged_box_is_refused_with_what_to_remove(cache: Path, mistake: str) -> None:
    directory = cache / f"box-{box.key_of(ROOT)}"
    if mistake == "changed":
        content = bytearray((directory / "boxes" / "box.img").read_bytes())
        content[2500] ^= 1
        (directory / "boxes" / "box.img").write_bytes(content)
    elif mistake == "missing":
        (directory / "boxes" / "vmlinuz").unlink()
    elif mistake == "added":
        (directory / "boxes" / "more").touch()
    elif mistake == "no manifest":
        (directory / box.MANIFEST).unlink()
    else:
        (directory / box.MANIFEST).write_text("{")
    with pytest.raises(VagrantError, match=f"rm -r {directory}"):
        box.find(cache, ROOT)


def test_the_boxs_key_follows_what_pip_installs_and_no_other_setting(tmp_path: Path) -> None:
    def key(project: str, constraints: str) -> str:
        (tmp_path / "pyproject.toml").write_text(project)
        (tmp_path / "constraints.txt").write_text(constraints)
        return box.key_of(tmp_path)

    first = key('[project]\ndependencies = ["torch"]', "torch==2.13.0")
    assert key('[project]\ndependencies = ["torch"]\n[tool.ruff]\nline-length = 99', "torch==2.13.0") == first
    assert key('[project]\ndependencies = ["torch", "numpy"]', "torch==2.13.0") != first
    assert key('[project]\ndependencies = ["torch"]', "torch==2.14.0") != first


@pytest.mark.parametrize("uid", [0, 64900])
def test_vagrant_is_not_started_where_it_would_put_a_bridge_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    """Without the Vagrantfile of its home that chooses the session, or as root, whose libvirt is the system's."""
    monkeypatch.setattr(Vagrant, "vagrant_home", tmp_path)
    if uid == 0:
        (tmp_path / "Vagrantfile").write_bytes((ROOT / "testbed" / "vagrant" / "home.Vagrantfile").read_bytes())
    with pytest.raises(VagrantError, match="would put a bridge"):
        Vagrant(Guest(uid, ()), 8000, 2222, kvm=False).up(print)
