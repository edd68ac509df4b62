"""Checks between the values of a topology file: one module per subject, each a generator of findings.

Checks run on whatever could be read (`salvage`), and stay silent about what depends on the unreadable.
"""

from collections.abc import Iterator

from testbed.topology.checks.drivers import check_drivers
from testbed.topology.checks.finding import Finding
from testbed.topology.checks.hosts import check_hosts
from testbed.topology.checks.memory import check_memory
from testbed.topology.checks.names import check_names
from testbed.topology.checks.ports import check_ports
from testbed.topology.checks.profiles import check_profiles
from testbed.topology.checks.roles import check_roles
from testbed.topology.checks.subnets import check_subnets
from testbed.topology.checks.wan import check_wan
from testbed.topology.schema import TopologyFile

__all__ = ["Finding", "run_checks"]


def run_checks(file: TopologyFile, memory_bytes: int) -> Iterator[Finding]:
    """Every mistake between values; `memory_bytes` is what this machine has."""
    for check in (check_names, check_subnets, check_hosts, check_roles, check_ports, check_profiles, check_wan):
        yield from check(file)
    yield from check_drivers(file)
    yield from check_memory(file, memory_bytes)
