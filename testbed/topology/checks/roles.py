"""Roles that a lab needs for its pipeline, and their places. Labs without any role need none."""

from collections.abc import Iterator, Sequence

from testbed.topology.checks.finding import Finding
from testbed.topology.checks.hosts import hosts_of
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import Host, TopologyFile

# What a pipeline cannot do without, and what to do about it.
NEEDED: dict[str, tuple[str, ...]] = {
    "pdd": ("gateway", "prefill", "relay-decode", "main-decode"),
    "cdc-pd": ("gateway", "prefill", "main-decode"),
    "idc-pd": ("gateway", "prefill", "relay-decode"),
    "prfaas": ("gateway", "prefill", "main-decode"),
    "single": ("gateway", "prefill"),
}


def check_roles(file: TopologyFile) -> Iterator[Finding]:
    hosts = list(hosts_of(file))
    if not readable(file.datacenters, *(host.role for _, _, host in hosts)):
        return
    if not all(readable(section.hosts) for section in file.datacenters.values()):
        return
    present = {host.role for _, _, host in hosts if host.role is not None}
    if not present:
        return
    if readable(file.serving.pipeline):
        pipeline = file.serving.pipeline
        for role in NEEDED[pipeline]:
            if role not in present:
                message = f"no host has the role {role}, which pipeline {pipeline} needs; add a host with role: {role}"
                if role == "relay-decode" and pipeline == "pdd":
                    message += ", or set serving.pipeline: cdc-pd"
                yield Finding(("datacenters",), message, at_key=True)
        if "relay-decode" in NEEDED[pipeline] and "relay-decode" in present:
            yield from _prefills_without_relay(hosts, pipeline)
    prefilling = {datacenter for _, datacenter, host in hosts if host.role == "prefill"}
    for path, datacenter, host in hosts:
        if host.role == "relay-decode" and prefilling and datacenter not in prefilling:
            where = " or ".join(f'"{name}"' for name in file.datacenters if name in prefilling)
            message = f"a relay-decode must share a datacenter with a prefill; move it to {where}"
            yield Finding((*path, "role"), message)


def _prefills_without_relay(hosts: Sequence[tuple[Path, str, Host]], pipeline: str) -> Iterator[Finding]:
    """KV goes from a prefill to a relay over their datacenter's fabric: requests never take another's relay."""
    relaying = {datacenter for _, datacenter, host in hosts if host.role == "relay-decode"}
    if not any(host.role == "prefill" and datacenter in relaying for _, datacenter, host in hosts):
        return  # said of the relays
    for path, datacenter, host in hosts:
        if host.role == "prefill" and datacenter not in relaying:
            message = (
                f'no relay-decode is in its datacenter "{datacenter}", so pipeline {pipeline} could never use it; '
                f"add a host with role: relay-decode there, or move this one"
            )
            yield Finding((*path, "role"), message)
