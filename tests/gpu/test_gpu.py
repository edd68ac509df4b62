"""`make gpu-test` where it runs: on a machine without CUDA it says so and succeeds."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from workers.local import ClusterError, Layout, LocalCluster


def test_the_gpu_test_passes_or_says_in_one_sentence_that_there_is_no_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if not torch.cuda.is_available():
        assert done.stdout.startswith("gpu-test skipped: PyTorch")
        assert done.stdout.count("\n") == 1
        pytest.skip(done.stdout.strip())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_workers_for_a_device_that_is_not_there_are_refused_before_any_starts(tmp_path: Path) -> None:
    cluster = LocalCluster(Layout(model={"name": "tiny", "device": "cuda"}), tmp_path)
    with pytest.raises(ClusterError, match='model "tiny": this machine has no device "cuda"; use cpu'):
        cluster.__enter__()
    assert cluster.pids == {}
