"""`make gpu-test` where it runs: on a machine without CUDA it says so and succeeds."""

import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT


def test_the_gpu_test_passes_or_says_in_one_sentence_that_there_is_no_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if not torch.cuda.is_available():
        assert done.stdout.startswith("gpu-test skipped: PyTorch")
        assert done.stdout.count("\n") == 1
        pytest.skip(done.stdout.strip())
