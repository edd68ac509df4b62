"""Environment of a host's process: its own address, its peers, the model and the WAN, as PDDBED_* variables.

This is the whole interface between the lab and whatever runs inside it; docs/environment.md describes it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.lab.link_table import paths_from
from testbed.lab.record import Record
from testbed.model.plan import HostPlan, LabPlan
from testbed.topology.names import resolvable_name

MAX_VARIABLE = 128 * 1024  # MAX_ARG_STRLEN of the kernel (32 pages), the end's NUL included: some 1,000 peers


def peers(plan: LabPlan) -> list[dict[str, Any]]:
    """Every host of the lab, as PDDBED_PEERS lists them."""
    return [
        {
            "name": host.name,
            "role": host.role,
            "datacenter": host.datacenter,
            "address": str(host.address.ip),
            "port": host.port,
        }
        for host in plan.hosts
    ]


def host_environment(plan: LabPlan, host: HostPlan, secret: str, records: str) -> dict[str, str]:
    """The PDDBED_* variables of one host."""
    record = Record(Path(records).parent)
    return {
        "PDDBED_LAB": plan.name,
        "PDDBED_HOST": host.name,
        "PDDBED_ROLE": host.role or "",
        "PDDBED_DATACENTER": host.datacenter,
        "PDDBED_ADDRESS": str(host.address.ip),
        "PDDBED_PORT": str(host.port),
        "PDDBED_PEERS": json.dumps(peers(plan)),
        "PDDBED_WAN": json.dumps(paths_from(plan, host.datacenter)),
        "PDDBED_LINKS": str(record.links_file),
        "PDDBED_UNWRITTEN": f"{plan.hosts.index(host)}:{record.unwritten_file}",
        "PDDBED_MODEL": json.dumps({**plan.model, "device": host.device}),
        "PDDBED_SERVING": json.dumps(plan.serving),
        "PDDBED_API": json.dumps(plan.api),
        "PDDBED_SECRET": secret,
        "PDDBED_RECORDS": records,
        "PDDBED_EVENTS": str(record.events_socket),
        "PDDBED_SEED": str(plan.seed),
        **({"PDDBED_PROFILE": json.dumps(dict(host.pace))} if host.pace else {}),
        **dict(host.environment),
    }


def fitting(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Those of `variables` that a program can start with, and the names of those that are too long for the kernel."""
    too_long = [name for name, value in variables.items() if len(os.fsencode(f"{name}={value}")) >= MAX_VARIABLE]
    return {name: value for name, value in variables.items() if name not in too_long}, too_long


def _names(host: HostPlan) -> list[str]:
    """As typed, and as the resolver accepts it where the two differ (a colon, say)."""
    return [host.name, resolvable_name(host.name)]


def hosts_file(plan: LabPlan) -> str:
    """/etc/hosts of the lab: every host and router by name."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{host.address.ip} {' '.join(dict.fromkeys(_names(host)))}" for host in plan.hosts]
    lines += [f"{datacenter.router_address.ip} router.{datacenter.name}" for datacenter in plan.datacenters]
    return "\n".join(lines) + "\n"
