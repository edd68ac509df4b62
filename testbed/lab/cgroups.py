"""CPU quotas through cgroups (v1 or v2). Owns the directories `pddbed/lab-<lab>/host-<host>` below the cpu controller.

Only hosts that ask for a quota get a directory: real-time scheduling is refused inside a cpu cgroup. The prefixes keep
names of labs and hosts (`tasks`, `cpu.max`) apart from the files that the kernel puts beside them.
"""

import errno
import os
import time
from pathlib import Path

PERIOD_US = 100_000


def cpu_controller() -> tuple[Path, int] | None:
    """Place where the cpu controller is mounted and its version (1 or 2); None when this machine has none."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, tail = line.partition(" - ")
        directory = Path(mount.split()[4])
        kind, _, options = tail.split(" ", 2)
        if kind == "cgroup" and "cpu" in options.split()[-1].split(","):
            return directory, 1
        if kind == "cgroup2":
            try:
                controllers = (directory / "cgroup.controllers").read_text().split()
            except OSError:
                continue
            if "cpu" in controllers:
                return directory, 2
    return None


def quota_problem() -> str | None:
    """Reason why a quota cannot hold here; None when it can."""
    found = cpu_controller()
    if found is None:
        return "no cpu cgroup controller is mounted"
    if not os.access(found[0], os.W_OK):
        return f"this user cannot write to the cpu cgroups ({found[0]})"
    return None


def create(lab: str, host: str, cpus: float) -> Path:
    """Make the cgroup of a host limited to `cpus` CPUs (0.5 is half of one). Raises OSError where not allowed."""
    found = cpu_controller()
    if found is None:
        raise OSError("no cpu cgroup controller is mounted")
    root, version = found
    directory = _lab_directory(root, lab) / f"host-{host}"
    directory.mkdir(parents=True, exist_ok=True)
    quota_us = max(1000, int(cpus * PERIOD_US))
    if version == 1:
        (directory / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (directory / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        for parent in (root, root / "pddbed", _lab_directory(root, lab)):
            (parent / "cgroup.subtree_control").write_text("+cpu")
        (directory / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    return directory


def remove_lab(lab: str) -> None:
    """Remove a lab's directories. Processes that are still exiting keep them busy for a moment."""
    found = cpu_controller()
    if found is None:
        return
    top = _lab_directory(found[0], lab)
    for directory, _, _ in list(os.walk(top, topdown=False)):
        _remove(Path(directory))
    if top.parent.exists() and not any(child.is_dir() for child in top.parent.iterdir()):
        _remove(top.parent)


def _lab_directory(root: Path, lab: str) -> Path:
    return root / "pddbed" / f"lab-{lab}"


def _remove(directory: Path) -> None:
    for _ in range(50):
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY:  # not ours to remove
                return
            time.sleep(0.02)
