"""Flow steering: the mask as the kernel reads it, set in one namespace and seen in no other."""

import subprocess
from pathlib import Path

import pytest

from testbed.links.ordering import cpu_mask, keep_flows_in_order


@pytest.mark.parametrize(
    ("cpus", "mask"), [(1, "1"), (2, "3"), (32, "ffffffff"), (33, "1,ffffffff"), (64, "ffffffff,ffffffff")]
)
def test_masks_are_groups_of_32_bits(cpus: int, mask: str) -> None:
    assert cpu_mask(cpus) == mask


@pytest.mark.root
def test_only_the_named_namespace_is_changed() -> None:
    program = "ip link add one type veth peer name two; mount -t sysfs sysfs /sys; echo; read line; "
    program += "cat /sys/class/net/one/queues/rx-0/rps_cpus"
    mounts = Path("/proc/self/mountinfo").read_text()
    with subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        keep_flows_in_order(process.pid)
        output, _ = process.communicate("\n", timeout=10)
    assert int(output.replace(",", ""), 16) & 1
    assert Path("/proc/self/mountinfo").read_text() == mounts
