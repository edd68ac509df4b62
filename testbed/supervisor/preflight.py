"""Checks of this machine before a lab is built: every problem at once, each with its next step.

Owns the checks against the machine; the file itself has been checked before. Builds nothing.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from testbed.lab import cgroups
from testbed.lab.openvswitch import openvswitch_problem
from testbed.links import kernel
from testbed.model.drivers import refusal
from testbed.model.plan import LabPlan, WanPlan
from testbed.topology.checks.memory import machine_memory_bytes
from testbed.topology.timeline.conflicts import overloads
from testbed.topology.timeline.link_values import links_of_plan


@dataclass
class Readiness:
    """The plan as it will be built, every link's driver chosen, and what stands in the way."""

    plan: LabPlan
    driver: str = ""  # of the links, for people: `netem`, or both names where they differ
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
    if not Path("/etc/hosts").exists():
        problems.append(
            "there is no /etc/hosts, whose place the lab's own takes inside; make one with: touch /etc/hosts"
        )
    if os.geteuid() != 0 and not kernel.user_namespaces_work():
        problems.append("building namespaces needs root here (user namespaces are not allowed); use sudo pddbed up ...")
        return readiness
    _check_switches(readiness)
    _check_fabrics(readiness)
    _check_drivers(readiness)
    _check_congestion(readiness)
    _check_cpus(readiness)
    return readiness


def _check_switches(readiness: Readiness) -> None:
    chosen = [datacenter.name for datacenter in readiness.plan.datacenters if datacenter.switch == "ovs"]
    problem = openvswitch_problem() if chosen else None
    if problem is not None:
        readiness.problems.append(f'datacenter "{chosen[0]}": switch ovs: {problem}; or write linux-bridge')


def _check_fabrics(readiness: Readiness) -> None:
    for datacenter in readiness.plan.datacenters:
        missing = None if datacenter.fabric_rate_bps is None else kernel.qdisc_problem("tbf")
        if missing is not None:
            readiness.problems.append(f'datacenter "{datacenter.name}": fabric.rate: {missing}; leave it out')
        missing = kernel.qdisc_problem("netem") if datacenter.fabric_delay_ns else None
        if missing is not None:
            words = f'datacenter "{datacenter.name}": fabric.delay: {missing}'
            readiness.problems.append(f"{words}; leave it out, or use a kernel that has it (pddbed vm run)")


def _check_drivers(readiness: Readiness) -> None:
    missing = {"netem": kernel.netem_problem(), "userspace": kernel.tun_problem()}
    chosen = []
    for wan in readiness.plan.wans:
        driver, problem = choose_driver(wan, missing)
        chosen.append(replace(wan, driver=driver))
        if problem is not None:
            readiness.problems.append(f'wan "{wan.name}": {problem}')
    readiness.plan = replace(readiness.plan, wans=tuple(chosen))
    readiness.driver = ", ".join(sorted({wan.driver for wan in chosen})) or "none"


def choose_driver(wan: WanPlan, missing: Mapping[str, str | None]) -> tuple[str, str | None]:
    """The driver that will emulate a link, and why it cannot (None when it can).

    `missing` says of each driver, the preferred one first, why this machine lacks it. `auto` takes the first that
    is there and can do what the link asks.
    """
    reasons = {}
    for driver in missing if wan.driver == "auto" else (wan.driver,):
        lacking = missing[driver]
        problem = f"the {driver} driver does not work here: {lacking}" if lacking else refusal_of(wan, driver)
        if problem is None:
            return driver, None
        reasons[driver] = problem
    return list(reasons)[-1], "; ".join(reasons.values())


def refusal_of(wan: WanPlan, driver: str) -> str | None:
    """Reason why a driver cannot do what the file asks of a link; None when it can."""
    for impairment in (wan.forward, wan.backward):
        refused = refusal(driver, impairment, wan.mtu)
        if refused is not None:
            return refused
    return None


def _check_congestion(readiness: Readiness) -> None:
    """The file was checked for any driver; now it is known which."""
    plan = readiness.plan
    if plan.congestion is None or readiness.problems:
        return
    for conflict in overloads(plan.congestion.events, links_of_plan(plan.wans), machine_memory_bytes()):
        event = conflict.event
        readiness.problems.append(f"congestion[{event.number}].{event.kind}: {conflict.message}")


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
        problem = None if host.quota is None else cgroups.quota_problem()
        if problem is not None:
            readiness.problems.append(f'host "{host.name}": {problem}, so cpu.quota cannot hold; leave it out')
