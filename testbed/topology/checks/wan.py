"""WAN links: between which datacenters, that these can all reach each other, and settings that contradict."""

from collections.abc import Iterator

from testbed.model.direction import DIRECTIONS
from testbed.model.units import quote, short_rate
from testbed.topology.checks.finding import Finding
from testbed.topology.directions import Effective, effective, loss_of, queue_bytes, rtt_ns
from testbed.topology.explain import did_you_mean
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile, Wan


def check_wan(file: TopologyFile) -> Iterator[Finding]:
    if not readable(file.wan):
        return
    for index, wan in enumerate(file.wan):
        yield from _ends(file, index, wan)
        yield from _delays(index, wan)
        yield from _directions(index, wan)
    yield from _connected(file)


def _ends(file: TopologyFile, index: int, wan: Wan) -> Iterator[Finding]:
    if not readable(file.datacenters, wan.between):
        return
    known = list(file.datacenters)
    for position, name in enumerate(wan.between):
        if name not in file.datacenters:
            guess = did_you_mean(name, known) or f"; datacenters are {', '.join(known)}"
            yield Finding(("wan", index, "between", position), f"{quote(name)} is no datacenter of this file{guess}")
    if wan.between[0] == wan.between[1]:
        message = f"joins {quote(wan.between[0])} to itself; name two different datacenters"
        yield Finding(("wan", index, "between"), message)


def _delays(index: int, wan: Wan) -> Iterator[Finding]:
    if "rtt" not in wan.model_fields_set or wan.rtt is None:
        return
    if "delay" in wan.model_fields_set:
        message = "delay (one way) and rtt (both ways) are given; keep one of them"
        yield Finding(("wan", index, "rtt"), message, at_key=True)
    for name in DIRECTIONS:
        override = getattr(wan, name)
        if override is not None and "delay" in override.model_fields_set:
            message = "a direction's delay does not go with rtt; write delay: in both directions instead"
            yield Finding(("wan", index, name, "delay"), message, at_key=True)


def _directions(index: int, wan: Wan) -> Iterator[Finding]:
    forward, backward = (effective(wan, index, name) for name in DIRECTIONS)
    rtt = rtt_ns(forward, backward)
    for direction in (forward, backward):
        label = f"{direction.name}: " if wan.forward is not None or wan.backward is not None else ""
        for path, message in (*_queue(direction, wan, rtt), *_loss(direction)):
            yield Finding(path, label + message)


def _queue(direction: Effective, wan: Wan, rtt: int | None) -> Iterator[tuple[Path, str]]:
    queue, rate, path = direction["queue"], direction["rate"], direction.paths["queue"]
    if queue is None or not readable(queue):
        return
    if queue.bdp is not None and queue.bytes is not None:
        yield path, "bdp and bytes are given; keep one of them"
        return
    if queue.bdp is None and queue.bytes is None and not queue.codel:
        yield path, "has no size; write {bdp: 1.5} or {bytes: 8MiB}"
        return
    if rate is None:
        yield path, "there is no queue without a rate; give the link a rate, or remove the queue"
        return
    if queue.bdp is not None and rtt == 0:
        yield path, "without a delay the BDP is 0 bytes; write the queue as {bytes: 1MiB}, say"
        return
    if not readable(rate, wan.mtu) or rtt is None:
        return
    size = queue_bytes(rate, rtt, queue, wan.mtu)
    if size < wan.mtu:
        sum_ = f" ({queue.bdp:g} x {short_rate(rate, 4)} x RTT / 8)" if queue.bdp is not None else ""
        yield path, f"{size:,} bytes{sum_} cannot hold one packet of {wan.mtu:,} bytes; make it larger"


def _loss(direction: Effective) -> Iterator[tuple[Path, str]]:
    if readable(direction["loss"]):
        try:
            loss_of(direction["loss"])
        except ValueError as error:
            yield direction.paths["loss"], str(error).removeprefix("loss: ")


def _connected(file: TopologyFile) -> Iterator[Finding]:
    """Every datacenter must be reachable from the first; not judged while any link's ends are unknown."""
    if not readable(file.datacenters, *(wan.between for wan in file.wan)) or not file.datacenters:
        return
    if any(name not in file.datacenters for wan in file.wan for name in wan.between):
        return
    first = next(iter(file.datacenters))
    reached = {first}
    while True:
        more = {name for wan in file.wan if reached & set(wan.between) for name in wan.between} - reached
        if not more:
            break
        reached |= more
    for name in file.datacenters:
        if name not in reached:
            message = (
                f"no WAN link leads from here to {quote(first)}; add one under wan: with between: [{first}, {name}]"
            )
            yield Finding(("datacenters", name), message, at_key=True)
