"""From what the file says to what is built: every default filled in, every address assigned.

Owns the meaning of what a file leaves out. Reads only files without mistakes; `load` sees to that.
"""

from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

from testbed.model.direction import DIRECTIONS
from testbed.model.plan import DatacenterPlan, HostPlan, LabPlan, ScalePlan, WanPlan
from testbed.topology.addresses import assign_hosts, router_address, wan_addresses
from testbed.topology.checks.names import wan_name
from testbed.topology.directions import effective, impairment, rtt_ns
from testbed.topology.profiles import NATIVE, pace_of, speeds_of
from testbed.topology.routes import routes
from testbed.topology.scaling import scale_of
from testbed.topology.schema import Api, Host, TopologyFile

WORKER_PORT = 7000  # the same everywhere: every host has an address of its own


def resolve(file: TopologyFile, name: str, path: Path | None) -> LabPlan:
    """The plan of a valid file. `name` is the lab's; `path` is where the file is, for paths in it."""
    wans = tuple(_wan(file, index) for index in range(len(file.wan)))
    api_address, api_port = file.api.listen
    return LabPlan(
        name=name,
        seed=file.seed,
        file=path,
        datacenters=tuple(_datacenter(file, key) for key in file.datacenters),
        wans=wans,
        routes=routes(tuple(file.datacenters), wans),
        model=_model(file, path),
        serving=_serving(file),
        api_address=api_address,
        api_port=api_port,
        api=_api(file.api),
        scale=_scale(file),
    )


API_LIMITS = {
    "connections": "connections",
    "keep_alive": "keep_alive_ns",
    "head_timeout": "head_ns",
    "body_timeout": "body_ns",
    "unread_timeout": "unread_ns",
    "max_body": "body_bytes",
    "max_answer": "answer_bytes",
}


def _api(section: Api) -> dict[str, Any]:
    """Contents of PDDBED_API: what the file says; the defaults are the gateway's own."""
    limits = {name: getattr(section, key) for key, name in API_LIMITS.items()}
    return {"names": list(section.names), **{name: limit for name, limit in limits.items() if limit is not None}}


def _datacenter(file: TopologyFile, name: str) -> DatacenterPlan:
    section = file.datacenters[name]
    subnet = section.subnet
    addresses = assign_hosts(subnet, {key: host.address for key, host in section.hosts.items()})
    return DatacenterPlan(
        name=name,
        subnet=subnet,
        router_address=IPv4Interface((router_address(subnet), subnet.prefixlen)),
        hosts=tuple(_host(file, key, name, host, addresses[key]) for key, host in section.hosts.items()),
        switch=section.switch,
        fabric_mtu=section.fabric.mtu,
        fabric_rate_bps=section.fabric.rate,
        fabric_delay_ns=section.fabric.delay or 0,
    )


def _host(file: TopologyFile, name: str, datacenter: str, host: Host, address: IPv4Interface) -> HostPlan:
    # A program of the user's listens where it likes; what it publishes is the best that is known.
    published = host.publish[0].host_port if host.publish and host.role is None else WORKER_PORT
    return HostPlan(
        name=name,
        datacenter=datacenter,
        address=address,
        port=published,
        role=host.role,
        command=host.command,
        device=host.device or "cpu",
        profile=host.profile or NATIVE,
        pace=_pace(file, host.profile),
        affinity=host.cpu.affinity or (),
        quota=host.cpu.quota,
        publish=host.publish,
        environment=tuple(host.environment.items()),
    )


def _pace(file: TopologyFile, profile: str | None) -> tuple[tuple[str, Any], ...]:
    if profile in (None, NATIVE):
        return ()
    scale = scale_of(file.scale) if file.scale is not None else None
    return tuple(pace_of(profile, speeds_of(file.profiles, profile), scale).items())


def _serving(file: TopologyFile) -> dict[str, Any]:
    """As the workers read it; with a scale they check that their model's KV is what it is made for."""
    serving = file.serving.model_dump(mode="json")
    if file.scale is not None:
        serving["kv_bytes_per_token"] = file.scale.kv_bytes_per_token.lab
    return serving


def _scale(file: TopologyFile) -> ScalePlan | None:
    if file.scale is None:
        return None
    kv = file.scale.kv_bytes_per_token
    return ScalePlan(scale_of(file.scale), kv.deployment, kv.lab, file.scale.block_tokens)


def _wan(file: TopologyFile, index: int) -> WanPlan:
    wan = file.wan[index]
    forward, backward = (effective(wan, index, name) for name in DIRECTIONS)
    rtt = rtt_ns(forward, backward)
    assert rtt is not None  # both delays were read
    address_a, address_b = wan_addresses(index)
    return WanPlan(
        name=wan_name(file, index),
        a=wan.between[0],
        b=wan.between[1],
        address_a=address_a,
        address_b=address_b,
        forward=impairment(forward, rtt, wan.mtu),
        backward=impairment(backward, rtt, wan.mtu),
        driver=wan.driver,
        mtu=wan.mtu,
        congestion=wan.tcp.congestion,
        initial_window=wan.tcp.initial_window,
        cost=wan.cost,
    )


def _model(file: TopologyFile, path: Path | None) -> dict[str, Any]:
    """As the workers read it; a relative path to a checkpoint is relative to the topology file."""
    model = file.model.model_dump(mode="json")
    name = Path(file.model.name).expanduser()
    if "/" in file.model.name or name.suffix.lower() == ".gguf":
        model["name"] = str((path.parent if path is not None else Path.cwd()) / name)
    return model
