"""What `vagrant rsync` does to the guest's copy, by the arguments of the shipped Vagrantfile."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT


def words(name: str) -> list[str]:
    """A list of the synced folder's options, as Ruby's %w[] has it."""
    found = re.search(rf"{name}: %w\[(.*?)\]", (ROOT / "Vagrantfile").read_text())
    assert found is not None, f"the Vagrantfile leaves {name} to Vagrant, whose default deletes in the guest"
    return found.group(1).split()


def test_nothing_is_deleted_in_the_guest() -> None:
    assert not [word for word in words("rsync__args") if "delete" in word]
    assert {"runs/", "out/"} <= set(words("rsync__exclude"))


@pytest.mark.skipif(shutil.which("rsync") is None, reason="no rsync here to try the arguments with")
def test_what_a_run_wrote_in_the_guest_outlives_a_second_copy(tmp_path: Path) -> None:
    host, guest = tmp_path / "host", tmp_path / "guest"
    for place, text in ((host / "README.md", "1"), (host / "runs" / "skew" / "run.json", "the host's")):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    command = ["rsync", *words("rsync__args"), *(f"--exclude={word}" for word in words("rsync__exclude"))]
    copy = [*command, f"{host}/", f"{guest}/"]
    subprocess.run(copy, check=True, capture_output=True)
    written = [
        guest / "runs" / "skew" / "run.json",
        guest / "out" / "a.json",
        guest / "mine" / "bench" / "summary.json",
    ]
    for place in written:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("the guest's")
    (host / "README.md").write_text("22")
    subprocess.run(copy, check=True, capture_output=True)
    assert [place.read_text() for place in written] == ["the guest's"] * 3
    assert (guest / "README.md").read_text() == "22"
