"""A plan as a person reads it, and as JSON: what a file means once every default is filled in.

Owns the words and the units on the screen; decides nothing.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from testbed.model.impairment import BernoulliLoss, Impairment
from testbed.model.plan import DatacenterPlan, HostPlan, LabPlan, RoutePlan, ScalePlan, WanPlan
from testbed.model.units import format_percent, short_duration, short_percent, short_rate, short_size
from testbed.topology.timeline.describe import describe_timeline


def describe(plan: LabPlan) -> list[str]:
    """Lines: datacenters with their hosts, WAN links with both directions, routes of more than one link, the API."""
    lines = [f'lab "{plan.name}"']
    width = max((len(host.name) for host in plan.hosts), default=0)
    for datacenter in plan.datacenters:
        router, parts = datacenter.router_address.ip, fabric_parts(datacenter)
        lines.append(f"  {datacenter.name}: {datacenter.subnet}, router {router}, fabric {', '.join(parts)}")
        for host in datacenter.hosts:
            lines.append(f"    {host.name:<{width}}  {host.address.ip!s:<15}  {_host(host)}".rstrip())
    for wan in plan.wans:
        lines += [f"  {line}" for line in _wan(wan)]
    if plan.scale is not None:
        lines += [f"  {line}" for line in _scale(plan, plan.scale)]
    lines += [f"  {line}" for line in _paces(plan)]
    lines += [f"  {_route(route)}" for route in plan.routes if len(route.links) > 1]
    if plan.congestion is not None:
        lines += [f"  congestion {line}" for line in describe_timeline(plan.congestion)]
    if any(host.role == "gateway" for host in plan.hosts):
        lines.append(f"  OpenAI API on http://{plan.api_address}:{plan.api_port}/v1, model {plan.model['name']}")
    return lines


def fabric_parts(datacenter: DatacenterPlan) -> list[str]:
    """In human units: `MTU 9000`, and rate and delay where the fabric is limited."""
    parts = [f"MTU {datacenter.fabric_mtu}"]
    if datacenter.fabric_rate_bps is not None:
        parts.append(short_rate(datacenter.fabric_rate_bps, 4))
    if datacenter.fabric_delay_ns:
        parts.append(short_duration(datacenter.fabric_delay_ns, 4))
    return parts


def _scale(plan: LabPlan, scale: ScalePlan) -> Iterator[str]:
    factors, block = scale.scale, plan.serving["block_size"]
    yield (
        f"scale: prompt tokens 1:{factors.prompt_scale}, answer tokens 1:{factors.output_scale}, times "
        f"1:{factors.time_compression:g}; all numbers here are the lab's"
    )
    yield (
        f"  bytes 1:{scale.byte_ratio:.4g}: KV of a token has {scale.lab_kv_bytes:,} bytes, "
        f"{scale.deployment_kv_bytes:,} in the deployment"
    )
    rate = plan.serving["kv_pool"]["rate"]
    each = f"; {short_rate(rate, 4)} for each KV connection" if rate is not None else ""
    yield f"  KV blocks of {block} token{'' if block == 1 else 's'} ({scale.block_tokens} of the deployment's){each}"


def _paces(plan: LabPlan) -> Iterator[str]:
    for name, pace in {host.profile: dict(host.pace) for host in plan.hosts if host.pace}.items():
        further = pace["decode_sequence_ns"]
        yield (
            f"profile {name}: prefill {1e9 / pace['prefill_token_ns']:.4g} tokens/s, decode "
            f"{short_duration(pace['decode_step_ns'], 4)} a step"
            + (f" and {short_duration(further)} for each further sequence" if further else "")
            + f", extend {1e9 / pace['extend_token_ns']:.4g} tokens/s"
        )


def describe_direction(impairment: Impairment) -> str:
    """One direction in human units: `400mbit, 20ms, queue 2MB (40ms)`."""
    return ", ".join(direction_parts(impairment))


def direction_parts(impairment: Impairment) -> list[str]:
    """The same, value by value."""
    parts = [short_rate(impairment.rate_bps, 4) if impairment.rate_bps is not None else "no rate limit"]
    parts.append(short_duration(impairment.delay_ns, 4))
    if impairment.jitter is not None:
        parts.append(f"jitter {short_duration(impairment.jitter.std_ns)} {impairment.jitter.distribution}")
    if isinstance(impairment.loss, BernoulliLoss):
        parts.append(f"loss {format_percent(impairment.loss.probability)}")
    elif impairment.loss is not None:
        parts.append(f"bursty loss, {short_percent(impairment.loss.mean)} on average")
    for word, share in (
        ("duplicated", impairment.duplication),
        ("corrupted", impairment.corruption),
        ("reordered", impairment.reordering),
    ):
        if share:
            parts.append(f"{format_percent(share)} {word}")
    if impairment.queue_bytes is not None:
        drain = short_duration(impairment.serialization_ns(impairment.queue_bytes))
        codel = ", CoDel" if impairment.codel is not None else ""
        parts.append(f"queue {short_size(impairment.queue_bytes)} ({drain}{codel})")
    return parts


def plan_as_dict(plan: LabPlan) -> dict[str, Any]:
    """The plan with plain values, for JSON; of a replay, what its trace comes to."""
    plain: dict[str, Any] = _plain(asdict(replace(plan, congestion=None)))
    timeline = plan.congestion
    return {**plain, "congestion": None if timeline is None else timeline.to_dict(whole=False)}


def _host(host: HostPlan) -> str:
    # A command may be several lines of YAML.
    parts = [host.role or (f"runs {' '.join(host.command.split())}" if host.command else "plain host")]
    if host.pace:
        parts.append(f"paced as {host.profile}")
    if host.affinity:
        parts.append(f"CPU {', '.join(map(str, host.affinity))}")
    if host.quota is not None:
        parts.append(f"{format_percent(host.quota)} of a CPU")
    for entry in host.publish:
        parts.append(f"port {entry.host_port} on {entry.listen_address}:{entry.listen_port}")
    return ", ".join(parts)


def _wan(wan: WanPlan) -> Iterator[str]:
    driver = "" if wan.driver == "auto" else f", driver {wan.driver}"
    tail = f"RTT {short_duration(wan.rtt_ns, 4)}, MTU {wan.mtu}, {wan.congestion}{driver}"
    if wan.forward == wan.backward:
        yield f"{wan.name}: {wan.a} <-> {wan.b}: {describe_direction(wan.forward)} each way; {tail}"
        return
    yield f"{wan.name}: {wan.a} <-> {wan.b}: {tail}"
    yield f"  {wan.a} -> {wan.b}: {describe_direction(wan.forward)}"
    yield f"  {wan.b} -> {wan.a}: {describe_direction(wan.backward)}"


def _route(route: RoutePlan) -> str:
    rate = "no rate limit" if route.rate_bps is None else short_rate(route.rate_bps, 4)
    path = " and ".join(route.links)
    return f"{route.datacenter} reaches {route.destination} by {path}: {rate}, RTT {short_duration(route.rtt_ns, 4)}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
