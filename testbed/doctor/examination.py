"""The examination of this machine: one finding for each thing that a lab uses, and a verdict.

Namespaces, bridges and the rest are really made, in namespaces that vanish with the process that made them.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from testbed.lab import cgroups
from testbed.links import kernel
from testbed.machine import programs as interpreter
from testbed.machine.programs import find_tool
from testbed.topology.checks.memory import machine_memory_bytes
from testbed.vm.tools import BUILD_TOOLS, RUN_TOOLS, VmError, missing_packages, static_busybox

State = Literal["ok", "missing", "limited"]
NAMESPACE_OPTIONS = ("--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
PATIENCE_S = 30
ENOUGH_MEMORY = 2 * 2**30  # four forked workers of the 135 M model in fp32 share 0.6 GB of weights
GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a lab uses. `missing` stops every lab, `limited` takes something away; both have a next step."""

    name: str
    state: State
    detail: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and the WAN driver that `auto` means here (None: neither works)."""

    findings: tuple[Finding, ...]
    driver: str | None
    driver_reason: str

    @property
    def can_raise_lab(self) -> bool:
        return self.driver is not None and all(finding.state != "missing" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The examination as `--json` prints it."""
        return {
            "can_raise_lab": self.can_raise_lab,
            "wan_driver": self.driver,
            "wan_driver_reason": self.driver_reason,
            "findings": [asdict(finding) for finding in self.findings],
        }


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def missing(name: str, detail: str, next_step: str) -> Finding:
    return Finding(name, "missing", detail, next_step)


def limited(name: str, detail: str, next_step: str) -> Finding:
    return Finding(name, "limited", detail, next_step)


def examine() -> Examination:
    """All findings, in the order in which a lab needs the things."""
    driver, reason = kernel.automatic_driver()
    findings = [
        *_privilege(),
        *_sandbox(),
        *_programs(),
        *_packages(),
        *_drivers(),
        _quota(),
        *_machine(),
        *_models(),
        _gpu(),
        _vm(),
    ]
    return Examination(tuple(findings), driver, reason)


def _privilege() -> Iterator[Finding]:
    if os.geteuid() == 0:
        yield ok("privilege", "root")
    elif kernel.user_namespaces_work():
        yield ok("privilege", "not root, but user namespaces are allowed")
    else:
        yield missing("privilege", "not root, and user namespaces are not allowed", "use sudo pddbed ...")


def _sandbox() -> Iterator[Finding]:
    """The findings about namespaces, tried from inside of some."""
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    try:
        done = subprocess.run(
            ["unshare", *as_root, *NAMESPACE_OPTIONS, "--", *interpreter.program("testbed.doctor.namespaces")],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=interpreter.environment(),
        )
    except FileNotFoundError:
        yield missing("namespaces", "there is no unshare program to try them with", _install("util-linux"))
        return
    except subprocess.TimeoutExpired:
        yield missing("namespaces", f"the trial did not end within {PATIENCE_S} s", "try again on an idle machine")
        return
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        remedy = "use sudo pddbed ..., or allow namespaces (in a container: run it with --privileged)"
        yield missing("namespaces", f"network, PID and mount namespaces cannot be made ({reason})", remedy)
        return
    yield ok("namespaces", "network, PID and mount namespaces can be made")
    yield from _inside(json.loads(done.stdout))


def _inside(results: dict[str, Any]) -> Iterator[Finding]:
    for name, what in (("bridge", "Linux bridges"), ("veth", "veth pairs")):
        if results[name] is None:
            yield ok(name, f"{what} can be made")
        else:
            yield missing(name, f"{what} cannot be made: {results[name]}", f"load it with: modprobe {name}")
    usable = [name for name, problem in results["congestion"].items() if problem is None]
    lacking = [name for name in results["congestion"] if name not in usable]
    detail = f"usable: {', '.join(usable) or 'none'}"
    if "cubic" in usable:
        yield ok("congestion control", detail + (f"; not here: {', '.join(lacking)}" if lacking else ""))
    else:
        remedy = "load it with: modprobe tcp_cubic, or write tcp: {congestion: ...} in the file"
        yield limited("congestion control", f"{detail}; cubic, the default, is not here", remedy)
    if results["real_time"] is None:
        yield ok("real-time priority", "allowed: the userspace WAN stays on time under load")
    else:
        detail = f"refused ({results['real_time']}): the userspace WAN runs late under load, and says so"
        yield limited("real-time priority", detail, "use sudo pddbed ..., or give this user rtprio in limits.conf")


def _programs() -> Iterator[Finding]:
    for program, package, use in (("mnexec", "mininet", "Mininet's helper"), ("bash", "bash", "Mininet's shells")):
        path = find_tool(program)
        if path is None:
            yield missing(program, f"{use} is not on PATH", _install(package))
        else:
            yield ok(program, path)


def _packages() -> Iterator[Finding]:
    """Found, not imported: importing torch takes seconds."""
    lacking = [name for name in ("mininet", "pyroute2", "torch", "fastapi", "h11") if find_spec(name) is None]
    if lacking:
        remedy = "in the project's folder: make, or pip install -c constraints.txt -e ."
        yield missing("Python packages", f"not installed: {', '.join(lacking)}", remedy)
    else:
        yield ok("Python packages", f"complete, Python {sys.version.split()[0]}")


def _drivers() -> Iterator[Finding]:
    without_netem, without_tun = kernel.netem_problem(), kernel.tun_problem()
    if without_netem is None:
        yield ok("netem driver", "this kernel has sch_netem and sch_tbf")
    else:
        remedy = "modprobe sch_netem, if this kernel has it; else pddbed vm run -- ... brings a kernel that does"
        yield limited("netem driver", without_netem, remedy)
    if without_tun is None:
        yield ok("userspace driver", "/dev/net/tun opens")
    else:
        make = limited if without_netem is None else missing
        remedy = "load it with: modprobe tun" if os.geteuid() == 0 else "use sudo pddbed ..."
        yield make("userspace driver", without_tun, remedy)


def _quota() -> Finding:
    found = cgroups.cpu_controller()
    if found is None:
        return limited("CPU quotas", "no cpu cgroup controller is mounted", "leave cpu: {quota: ...} out of files")
    directory, version = found
    if not os.access(directory, os.W_OK):
        return limited("CPU quotas", f"{directory} may not be written", "use sudo pddbed ..., or leave quotas out")
    return ok("CPU quotas", f"cgroup v{version} at {directory}")


def _machine() -> Iterator[Finding]:
    cpus = len(os.sched_getaffinity(0))
    if cpus == 1:
        yield limited("CPUs", "1 usable", "expect unfaithful runs: the WAN and the workers share it")
    else:
        yield ok("CPUs", f"{cpus} usable")
    memory = machine_memory_bytes()
    detail = f"{memory / 2**30:.1f} GiB"
    if memory < ENOUGH_MEMORY:
        yield limited("memory", detail, "keep to model tiny")
    else:
        yield ok("memory", detail)


def _models() -> Iterator[Finding]:
    from workers.models.fetch import FETCHABLE, model_path

    for name, entry in FETCHABLE.items():
        path = model_path(entry)
        if path.exists():
            yield ok(f"model {name}", str(path))
        else:
            yield limited(f"model {name}", "not fetched; model tiny needs no file", f"pddbed model get {name}")


def _gpu() -> Finding:
    found = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    if not found:
        return ok("GPU", "none: workers compute on the CPU")
    return ok("GPU", f"{found} NVIDIA, for hosts with device: cuda, if PyTorch here is built for it")


def _vm() -> Finding:
    lacking = missing_packages({**RUN_TOOLS, **BUILD_TOOLS})
    try:
        static_busybox()
    except VmError:
        lacking.append("busybox-static")
    if platform.machine() != "x86_64":
        return limited("netem VM", f"made for x86_64, not {platform.machine()}", "use a machine with sch_netem")
    if lacking:
        return limited("netem VM", "pddbed vm run needs more programs", _install(*lacking))
    return ok("netem VM", "pddbed vm run has its programs")


def _install(*packages: str) -> str:
    return f"apt-get install --no-install-recommends {' '.join(packages)}"
