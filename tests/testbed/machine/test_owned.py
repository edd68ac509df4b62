"""What pddbed did not make is never removed: whole commands over a cache that also holds somebody's own files."""

import os
import shutil
from pathlib import Path

import pytest

from testbed.machine import owned
from testbed.vagrant import __main__ as vagrant
from testbed.vagrant import box
from testbed.vm.image import KIND, VmImage, default_cache, ensure_image
from testbed.vm.job import VmJob, job_directory

KINDS = (
    "job-1",
    "job-of-mine",
    "notes+drafts",
    "6.1.0+0123456789ab",
    "run-2",
    "box-3",
    "kernel",
    ".x+y.z",
    "vm",
    "vagrant",
)


def littered(place: Path) -> set[Path]:
    """Somebody's directories and links by every name that a command of ours looks for; returns all that lies there."""
    place.mkdir(parents=True, exist_ok=True)
    outside = place.parent / f"outside-{place.name}"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "kept").write_text("of somebody")
    (outside / owned.MARK).write_text("VM job\njob-link\n")
    for name in KINDS:
        (place / name).mkdir(exist_ok=True)
        (place / name / "kept").write_text("of somebody")
    (place / "job-link").symlink_to(outside)
    (place / "a+link").symlink_to(outside)
    (place / "job-file").write_text("of somebody")
    return {path for root in (place, outside) for path in root.rglob("*")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDDBED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_vm_run_spares_everything_that_lies_in_the_cache_that_was_named(cache: Path) -> None:
    theirs = littered(cache) | littered(default_cache())
    with job_directory(VmJob(("true",), Path("/")), Path("/lib"), default_cache()) as (directory, _):
        assert directory.parent == default_cache()
        assert cache in directory.parents
    owned.sweep(default_cache(), KIND)
    assert not directory.exists()
    assert {path for path in theirs if not os.path.lexists(path)} == set()


def test_a_vagrant_run_spares_everything_that_lies_in_the_cache_that_was_named(cache: Path) -> None:
    theirs = littered(cache) | littered(vagrant.cache_directory())
    vagrant.sweep(vagrant.cache_directory())
    owned.sweep(vagrant.cache_directory(), box.KIND)
    assert {path for path in theirs if not os.path.lexists(path)} == set()


def test_what_we_made_is_removed_when_its_time_has_come(cache: Path) -> None:
    place = default_cache()
    owned.make_cache(place)
    old, new, cut_short = (owned.make_aside(place, name, KIND) for name in ("6.1+a", "6.1+b", "6.1+c"))
    for directory in (old, new):
        (directory / "lib").mkdir()
        (directory / "lib" / "module").touch()
    old, new = old.rename(place / "6.1+a"), new.rename(place / "6.1+b")
    owned.sweep(place, KIND, new)
    assert sorted(place.iterdir()) == [new]
    assert not cut_short.exists()


def test_a_copy_of_our_directory_under_another_name_is_the_users(cache: Path) -> None:
    owned.make_cache(cache)
    made = owned.make_aside(cache, "6.1+a", KIND).rename(cache / "6.1+a")
    shutil.copytree(made, cache / "6.1+a.saved")
    assert list(owned.ours(cache, KIND)) == [made]
    assert not owned.remove(cache / "6.1+a.saved", KIND)
    assert not owned.remove(made, "VM job")


def test_a_marked_link_and_a_mark_that_is_a_link_or_a_pipe_are_nothing_of_ours(tmp_path: Path) -> None:
    made = owned.make_aside(tmp_path, "it", KIND).rename(tmp_path / "it")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "it").symlink_to(made)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / owned.MARK).symlink_to(made / owned.MARK)
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / owned.MARK)
    for directory in (tmp_path / "elsewhere" / "it", tmp_path / "linked", tmp_path / "piped"):
        assert not owned.is_ours(directory, KIND), directory
    assert owned.is_ours(made, KIND)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the directory belongs to another user")
def test_a_cache_of_another_user_is_refused(cache: Path) -> None:
    default_cache().mkdir(parents=True)
    os.chown(default_cache(), 65534, 65534)
    with pytest.raises(PermissionError, match="another user"):
        owned.make_cache(default_cache())
    os.chown(default_cache(), 0, 0)
    default_cache().chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        owned.make_cache(default_cache())


def test_something_of_the_users_in_the_place_of_an_image_is_named_and_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from testbed.vm import image, kernel, tools

    monkeypatch.setattr(tools, "require", lambda *_: None)
    monkeypatch.setattr(tools, "static_busybox", lambda: Path("/bin/busybox"))
    monkeypatch.setattr(kernel, "candidate_packages", lambda: ["linux-image-6.1.0-1-amd64"])
    place = default_cache() / f"6.1.0-1-amd64+{image.harness_version()}"
    place.mkdir(parents=True)
    (place / "kept").write_text("of somebody")
    with pytest.raises(image.VmError, match="move it away"):
        ensure_image(default_cache(), lambda _: None)
    assert (place / "kept").exists()
    assert VmImage(place, "").directory == place
