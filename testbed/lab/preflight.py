"""What must hold on this machine before a lab is built: every problem at once, each with its next step.

Owns the checks against the machine; the file itself has been checked before. Builds nothing.
"""

import os
import shutil
from dataclasses import dataclass, field, replace

from testbed.lab import cgroups
from testbed.links import kernel
from testbed.topology.plan import LabPlan


@dataclass
class Readiness:
    """The plan as it will be built, the driver that `auto` stands for, and what stands in the way."""

    plan: LabPlan
    driver: str = ""
    problems: list[str] = field(default_factory=list)


def check(plan: LabPlan, wan_driver: str, with_workers: bool) -> Readiness:
    """Check tools, privilege, drivers, CPUs and quotas. `wan_driver` other than auto overrides the file."""
    if wan_driver != "auto":
        plan = replace(plan, wans=tuple(replace(wan, driver=wan_driver) for wan in plan.wans))
    readiness = Readiness(plan)
    problems = readiness.problems
    if shutil.which("mnexec") is None:
        problems.append("Mininet's mnexec is not on PATH; install it with: apt-get install mininet")
    if shutil.which("bash") is None:
        problems.append(
            "bash is not on PATH, and Mininet's nodes are bash shells; install it with: apt-get install bash"
        )
    if os.geteuid() != 0 and not kernel.user_namespaces_work():
        problems.append("building namespaces needs root here (user namespaces are not allowed); use sudo pddbed up ...")
        return readiness
    _check_drivers(readiness)
    _check_cpus(readiness)
    return readiness


def _check_drivers(readiness: Readiness) -> None:
    available = {"netem": kernel.netem_problem(), "userspace": kernel.tun_problem()}
    readiness.driver = "netem" if available["netem"] is None else "userspace"
    for wan in readiness.plan.wans:
        driver = readiness.driver if wan.driver == "auto" else wan.driver
        problem = available[driver]
        if problem is not None:
            readiness.problems.append(f'wan "{wan.name}": the {driver} driver does not work here: {problem}')


def _check_cpus(readiness: Readiness) -> None:
    usable = os.sched_getaffinity(0)
    for host in readiness.plan.hosts:
        missing = sorted(set(host.affinity) - usable)
        if missing:
            numbers = ", ".join(map(str, missing))
            have = ", ".join(map(str, sorted(usable)))
            readiness.problems.append(
                f'host "{host.name}": CPU {numbers} is not available here (available: {have}); change cpu.affinity'
            )
        if host.quota is not None and cgroups.cpu_controller() is None:
            readiness.problems.append(
                f'host "{host.name}": no cpu cgroup controller is mounted, so cpu.quota cannot hold; leave it out'
            )
