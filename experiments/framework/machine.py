"""Machine and versions that a result was measured with: for run.json, so that it can be cited."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("pddbed", "mininet", "pyroute2", "numpy", "msgspec", "xxhash", "scapy", "torch")


def machine() -> dict[str, Any]:
    """CPU, memory, kernel and load."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory_kb = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_kb * 1024,
        "kernel": platform.release(),
        "load": os.getloadavg(),
    }


def versions() -> dict[str, Any]:
    """Versions of Python, the packages that matter, and this project's commit (with + where files differ from it)."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["commit"] = _commit()
    return found


def _commit() -> str | None:
    try:
        commit = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "experiments", "testbed", "workers")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
