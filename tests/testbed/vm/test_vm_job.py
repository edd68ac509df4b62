"""A job's directory: swept when its run is gone, kept while it lives; its output copied as far as it can be."""

import os
from pathlib import Path

from testbed.machine import owned
from testbed.vm.job import KIND, VmJob, copy_output, guest_environment, job_directory


def test_sweeping_spares_the_job_of_a_living_run(tmp_path: Path) -> None:
    (tmp_path / "job-left").mkdir()
    (tmp_path / "job-left" / "argv").write_text("")
    owned.mark(tmp_path / "job-left", "VM job")
    with job_directory(VmJob(("true",), Path("/")), Path("/lib"), tmp_path) as (directory, _):
        owned.sweep(tmp_path, KIND)
        assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    (tmp_path / "out" / "below").mkdir(parents=True)
    os.mkfifo(tmp_path / "out" / "below" / "pipe")
    (tmp_path / "out" / "file").write_text("kept")
    (tmp_path / "out" / "dangling").symlink_to("nowhere")
    assert copy_output(tmp_path, tmp_path / "target") == ["pipe"]
    assert (tmp_path / "target" / "file").read_text() == "kept"
    assert (tmp_path / "target" / "dangling").is_symlink()


def test_only_a_named_part_of_the_environment_is_passed() -> None:
    caller = {"PATH": "/bin", "HOME": "/h", "AWS_SECRET_ACCESS_KEY": "s", "PDDBED_X": "1", "EXTRA": "2", "MORE": "3"}
    passed = guest_environment(caller, ["EXTRA", "ABSENT"])
    assert passed.keys() == {
        "PATH",
        "HOME",
        "PDDBED_X",
        "EXTRA",
        "PDDBED_VM",
        "PDDBED_VM_OUTPUT",
        "PDDBED_TIMER_LATENESS_NS",
    }
    assert passed["PATH"].split(":")[1] == "/bin"
