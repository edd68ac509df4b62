"""The VM as a real command, run from outside, and one image for all tests."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.vm.image import VmImage, default_cache, ensure_image

PDDBED = Path(sys.executable).with_name("pddbed")


@pytest.fixture(scope="session")
def image() -> VmImage:
    """The image that every `pddbed vm run` here uses; built when this machine has none."""
    return ensure_image(default_cache(), print)


@pytest.fixture
def private_cache(image: VmImage, tmp_path: Path) -> Path:
    """A cache of this test alone, with a copy of the good image."""
    cache = tmp_path / "cache"
    shutil.copytree(image.directory, cache / image.directory.name)
    return cache


@pytest.fixture
def vm_run(image: VmImage) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run `pddbed vm run OPTIONS -- COMMAND` and wait for it."""

    def run(
        *command: str, options: tuple[str, ...] = (), environment: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [PDDBED, "vm", "run", *options, "--", *command],
            env=os.environ | (environment or {}),
            cwd=cwd,
            capture_output=True,
            timeout=200,
        )

    return run
