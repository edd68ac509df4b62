"""What a host is: a worker, a command or neither, with the settings that fit."""

from collections.abc import Iterator

from testbed.topology.checks.finding import Finding
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import Host, TopologyFile


def hosts_of(file: TopologyFile) -> Iterator[tuple[Path, str, Host]]:
    """(path, datacenter, host) of every host that the file lists."""
    if not readable(file.datacenters):
        return
    for datacenter, section in file.datacenters.items():
        if readable(section.hosts):
            for name, host in section.hosts.items():
                yield ("datacenters", datacenter, "hosts", name), datacenter, host


def check_hosts(file: TopologyFile) -> Iterator[Finding]:
    for path, _, host in hosts_of(file):
        yield from _kind(path, host)
        affinity = host.cpu.affinity
        if readable(affinity) and affinity and len(set(affinity)) < len(affinity):
            yield Finding((*path, "cpu", "affinity"), "names a CPU twice; name each once")


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
