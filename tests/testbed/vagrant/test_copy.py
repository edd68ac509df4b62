"""The part of the working tree that gets into the VM."""

import subprocess
from pathlib import Path

import pytest

from testbed.vagrant import run


def test_the_copy_is_the_working_tree_without_what_git_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    (tree / "below").mkdir(parents=True)
    for name in ("kept", "deleted", "below/script.sh"):
        (tree / name).write_text("committed")
    (tree / "below/script.sh").chmod(0o755)
    (tree / ".gitignore").write_text(".venv/\n")
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *words], check=True)
    (tree / "kept").write_text("changed since")
    (tree / "deleted").unlink()
    (tree / "new file").write_text("not yet added")
    (tree / ".venv").mkdir()
    (tree / ".venv" / "python").touch()
    monkeypatch.setattr(run, "PROJECT", tree)
    run.copy_project(copy)
    assert {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()} == {
        ".gitignore", "kept", "below/script.sh", "new file"
    }  # fmt: skip
    assert (copy / "kept").read_text() == "changed since"
    assert (copy / "below/script.sh").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mtime for path in copy.rglob("*") if path.is_file()} == {run.OLD}
