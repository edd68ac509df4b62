"""Checks of hosts: a worker, a command or neither, with the settings that fit."""

import re
from collections.abc import Iterator

from testbed.model.units import quote
from testbed.topology.checks.finding import Finding
from testbed.topology.fields import SETTABLE
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import Host, TopologyFile

# Linux: BR_MAX_PORTS with port 0 reserved (net/bridge/br_if.c). Open vSwitch: DP_MAX_PORTS with the bridge's own port.
SWITCH_PORTS = {"linux-bridge": 1023, "ovs": 65_279}


def hosts_of(file: TopologyFile) -> Iterator[tuple[Path, str, Host]]:
    """(path, datacenter, host) of every host that the file lists."""
    if not readable(file.datacenters):
        return
    for datacenter, section in file.datacenters.items():
        if readable(section.hosts):
            for name, host in section.hosts.items():
                yield ("datacenters", datacenter, "hosts", name), datacenter, host


def check_hosts(file: TopologyFile) -> Iterator[Finding]:
    yield from _ports(file)
    for path, _, host in hosts_of(file):
        yield from _kind(path, host)
        yield from _settings(path, host)
        affinity = host.cpu.affinity
        if readable(affinity) and affinity and len(set(affinity)) < len(affinity):
            yield Finding((*path, "cpu", "affinity"), "names a CPU twice; name each once")


def _settings(path: Path, host: Host) -> Iterator[Finding]:
    """Checks of the lab's own variables that a host sets, by the workers' bounds (workers/environment.py)."""
    if not readable(host.environment):
        return
    for name in SETTABLE & host.environment.keys():
        text = host.environment[name]
        if readable(text) and not (re.fullmatch("[0-9]{1,18}", text, re.ASCII) and int(text) >= 1):
            message = f"{quote(text)} is not a whole number of bytes, at least 1"
            yield Finding((*path, "environment", name), message)


def _ports(file: TopologyFile) -> Iterator[Finding]:
    """Each host takes a port of its datacenter's switch, and so does the border router."""
    if not readable(file.datacenters):
        return
    for datacenter, section in file.datacenters.items():
        if not readable(section.hosts, section.switch):
            continue
        most = SWITCH_PORTS[section.switch] - 1
        if len(section.hosts) > most:
            way_out = ", or write switch: ovs" if most < len(section.hosts) < SWITCH_PORTS["ovs"] else ""
            message = (
                f"{len(section.hosts):,} hosts are more than the {most:,} that one {section.switch} has ports for; "
                f"spread them over several datacenters{way_out}"
            )
            yield Finding(("datacenters", datacenter, "hosts"), message, at_key=True)


def _kind(path: Path, host: Host) -> Iterator[Finding]:
    if not readable(host.role, host.command):
        return
    if host.role is not None and host.command is not None:
        message = "a host has a role or a command, not both; remove one, or run the command on a host of its own"
        yield Finding((*path, "command"), message, at_key=True)
        return
    if host.role is None:
        for key in ("device", "profile"):
            if getattr(host, key) is not None:
                yield Finding((*path, key), f"{key} is for hosts with a role; remove it", at_key=True)
    if host.role is None and host.command is None:
        unused = {"cpu": host.cpu.affinity or host.cpu.quota, "environment": host.environment}
        for key, value in unused.items():
            if value:
                message = f"{key} is for hosts with a role or a command; remove it"
                yield Finding((*path, key), message, at_key=True)
