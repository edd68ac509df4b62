"""Whoever installs hears before it starts that a CUDA build of PyTorch would come, and the way out."""

import pytest

from testbed.doctor.torch_build import needs_cuda_packages, notice


@pytest.mark.parametrize(
    ("requires", "expected"),
    [(["filelock", "nvidia-cublas==13.1; sys_platform == 'linux'"], True), (["filelock", "sympy"], False), ([], False)],
)
def test_a_cuda_build_is_known_by_what_it_requires(requires: list[str], expected: bool) -> None:
    assert needs_cuda_packages({"install": [{"metadata": {"requires_dist": requires}}]}) is expected


def test_only_a_machine_without_a_gpu_is_told_the_way_out() -> None:
    assert "PIP_EXTRA_INDEX_URL" in notice(cuda=True, gpu=False)
    assert "may have" in notice(cuda=None, gpu=False)
    assert "PIP_EXTRA_INDEX_URL" not in notice(cuda=True, gpu=True) + notice(cuda=False, gpu=False)
