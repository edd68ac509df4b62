"""Labs of an ordinary user: raised where user namespaces allow it, apart from root's, and nobody else's to end.

This checkout and its interpreter may lie below a home directory that others cannot enter: a system's python3 of the
same version runs a view of them at /mnt, in a mount namespace of each command's own, where everybody may open
/dev/net/tun.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.links import kernel
from testbed.topology.overlay import laid_over
from tests.conftest import ROOT, Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]
TINY = ROOT / "topologies" / "two-dc-tiny.yaml"
SEEN_TINY = "/mnt/checkout/topologies/two-dc-tiny.yaml"
UID = 65534
RECORDS = Path(f"/tmp/pddbed-{UID}")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
OPEN_TUN = (
    "mount --make-rprivate /; mount -t tmpfs none /mnt; mknod -m 666 /mnt/tun c 10 200;"
    " mount --bind /mnt/tun /dev/net/tun; mkdir /mnt/checkout /mnt/packages;"
    ' mount --bind "$1" /mnt/checkout; mount --bind "$2" /mnt/packages; shift 2'
)


@pytest.fixture
def user() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """`user(*arguments)` runs pddbed as an ordinary user; their labs are down afterwards."""
    python = shutil.which(f"python{VERSION}", path="/usr/bin")
    if python is None:
        pytest.skip(f"no /usr/bin/python{VERSION} that an ordinary user could run")
    packages = next(path for path in sys.path if path.endswith("site-packages"))

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        code = "from testbed.cli import main; main(prog_name='pddbed')"
        drop = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", python, "-c", code, *arguments]
        command = ["unshare", "--mount", "sh", "-c", f'set -e; {OPEN_TUN}; exec "$@"', "sh", str(ROOT), packages, *drop]
        environment = {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": "/mnt/checkout:/mnt/packages",
            **variables,
        }
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", env=environment)
        assert "Traceback" not in done.stderr
        return done

    if run("doctor").returncode:
        pytest.skip("an ordinary user cannot raise labs here")
    yield run
    assert run("down", "--all").returncode == 0
    shutil.rmtree(RECORDS, ignore_errors=True)


def test_an_ordinary_user_raises_a_lab_with_workers_beside_roots_of_the_same_name(
    user: Callable[..., subprocess.CompletedProcess[str]], raise_lab: Callable[..., Lab]
) -> None:
    raise_lab(TINY, "same-name", "--no-workers", "--no-verify")
    raised = user("up", SEEN_TINY, "--name", "same-name", "--api", "auto", "--no-verify")
    assert raised.returncode == 0, raised.stderr
    if kernel.netem_problem() is not None:
        assert "no real-time priority" in raised.stdout
    assert user("ask", "--max-tokens", "5", "hello").returncode == 0  # with one lab of their own, no need to name it
    assert user("exec", "-l", "same-name", "md0", "--", "id", "-u").stdout == "0\n"
    assert [lab["name"] for lab in json.loads(user("ps", "--json").stdout)].count("same-name") == 2
    assert user("down", "same-name").returncode == 0
    assert run_pddbed("exec", "-l", "same-name", "gw0", "--", "true").returncode == 0


@pytest.mark.parametrize("command", ["status", "exec gw0 true", "wan show", "verify --quick", "down"])
def test_roots_lab_is_seen_by_others_and_is_not_theirs(
    user: Callable[..., subprocess.CompletedProcess[str]], raise_lab: Callable[..., Lab], command: str
) -> None:
    raise_lab(TINY, "of-root", "--no-workers", "--no-verify")
    assert "of-root" in user("ps").stdout
    words = command.split()
    place = 2 if words[0] == "wan" else 1
    refused = user(*words[:place], "-l", "of-root", *words[place:])
    assert refused.returncode == 1
    assert refused.stderr == 'pddbed: lab "of-root" belongs to another user; use sudo\n'
    assert run_pddbed("exec", "-l", "of-root", "gw0", "--", "true").returncode == 0


@pytest.mark.parametrize("trap", ["open to all", "link"])
def test_a_place_for_records_that_others_could_change_is_refused(
    user: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, trap: str
) -> None:
    shutil.rmtree(RECORDS, ignore_errors=True)
    if trap == "link":
        RECORDS.symlink_to(tmp_path)
    else:
        RECORDS.mkdir()
        RECORDS.chmod(0o777)
    try:
        refused = user("up", SEEN_TINY, "--name", "trapped", "--no-workers")
        assert refused.returncode == 1
        assert str(RECORDS) in refused.stderr
    finally:
        RECORDS.unlink() if RECORDS.is_symlink() else RECORDS.rmdir()


def test_a_runtime_directory_of_somebody_else_is_not_used(
    user: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    raised = user("up", SEEN_TINY, "--name", "su", "--no-workers", "--no-verify", XDG_RUNTIME_DIR=str(tmp_path))
    assert raised.returncode == 0, raised.stderr
    assert not list(tmp_path.iterdir())


def test_a_runtime_directory_too_deep_for_a_socket_is_refused_with_the_way_out(
    user: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    deep = Path("/tmp") / f"pddbed-test-{'x' * 90}"
    deep.mkdir()
    os.chown(deep, UID, UID)
    try:
        refused = user("up", SEEN_TINY, "--name", "deep", "--no-workers", XDG_RUNTIME_DIR=str(deep))
        assert refused.returncode == 1
        assert "shorter" in refused.stderr
    finally:
        shutil.rmtree(deep)


def test_a_quota_that_this_user_cannot_set_is_refused_before_anything_is_built(
    user: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    file = Path("/tmp") / f"pddbed-test-{os.getpid()}.yaml"
    file.write_text(laid_over(TINY, {"datacenters.main.hosts.p0.cpu": {"quota": "50%"}}))
    try:
        refused = user("up", str(file), "--name", "quota", "--api", "auto")
        assert refused.returncode == 1
        assert 'host "p0"' in refused.stderr
        assert "cpu.quota cannot hold" in refused.stderr
    finally:
        file.unlink()
