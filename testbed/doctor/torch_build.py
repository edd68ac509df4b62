"""A notice, before anything is installed, where this package index has only a large CUDA build of PyTorch.

Runs with an interpreter that has nothing but pip. Prints at most one paragraph, and never fails.
"""

import json
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 60  # pip reads the build's metadata alone; an index without metadata files would send the whole build
CPU_SIZE, CUDA_SIZE = "1.5 GB", "5.2 GB"


def needs_cuda_packages(report: dict) -> bool:
    """True when pip would install a build of torch that requires NVIDIA's packages (`pip install --report`)."""
    return any(
        requirement.startswith(("nvidia-", "cuda-"))
        for found in report["install"]
        for requirement in found["metadata"].get("requires_dist", [])
    )


def notice(cuda: bool | None, gpu: bool) -> str:
    """The notice for whoever waits for the installation; `cuda` is None where pip could not tell in time."""
    if cuda is False or gpu:
        return f"PyTorch and the rest take {CUDA_SIZE if cuda else CPU_SIZE}"
    sure = "has a CUDA build of PyTorch only" if cuda else "may have a CUDA build of PyTorch only"
    return (
        f"this package index {sure}: the environment takes {CUDA_SIZE} then, {CPU_SIZE} with a CPU build, and this\n"
        "  machine has no GPU. The way out: Ctrl-C, and again with PIP_EXTRA_INDEX_URL set to PyTorch's index of CPU\n"
        "  builds, or PIP_FIND_LINKS to a folder that has its wheel."
    )


def main() -> None:
    project = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "-q"]
    cuda: bool | None = None
    try:
        done = subprocess.run(
            [*command, "--report", "-", "-c", str(project / "constraints.txt"), "torch"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        cuda = needs_cuda_packages(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        pass
    print(notice(cuda, gpu=Path("/dev/nvidia0").exists()), flush=True)


if __name__ == "__main__":
    main()
