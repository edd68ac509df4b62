"""A topology file as its lab needs it: with `scale:` every value is the deployment's, and here becomes the lab's. Pure.

Owns which values scale, and how (the arithmetic is in `testbed.model.scale`): rates, also fabrics', with bytes and
time, delays and times with time, buffers with bytes; cache blocks, and what else counts prompt tokens. Values keep
their places in the file, so that the checks that follow speak of the right lines.
"""

from collections.abc import Iterator
from typing import Any, get_args

from testbed.model.direction import DIRECTIONS
from testbed.model.scale import Scale
from testbed.model.units import DURATION, RATE, SIZE, Quantity, short_rate
from testbed.topology.checks.finding import Finding
from testbed.topology.directions import effective, rtt_ns
from testbed.topology.fields import MIN_RATE_BPS, Reads
from testbed.topology.problems import Path
from testbed.topology.salvage import hints, readable
from testbed.topology.schema import Serving, TopologyFile
from testbed.topology.section import Section
from testbed.topology.speeds import ScaleSection

FEWEST_PACKETS = 10
"""In a bandwidth-delay product: with fewer TCP sends packet by packet, whatever the deployment's does."""


def scale_of(section: ScaleSection) -> Scale:
    """The arithmetic's form of `scale:`."""
    return Scale(section.prompt_divisor, section.output_divisor, section.time_compression)


def byte_ratio(section: ScaleSection) -> float:
    """The deployment's bytes of a prompt over the lab's."""
    kv = section.kv_bytes_per_token
    return scale_of(section).byte_ratio(kv.deployment, kv.lab)


def scaled(file: TopologyFile) -> tuple[TopologyFile, list[Finding]]:
    """The file with the lab's values, and what cannot be scaled; unchanged without a scale, or with a wrong one."""
    section = file.scale
    if section is None:
        return file, []
    if not readable(section):
        return file, []
    if section.time_compression < 1:
        message = f"{section.time_compression:g} would slow everything down; write 1 or more"
        return file, [Finding(("scale", "time_compression"), message)]
    findings: list[Finding] = []
    scaler = _Scaler(scale_of(section), byte_ratio(section), findings)
    changes: dict[str, Any] = {}
    if readable(file.wan):
        changes["wan"] = tuple(scaler.section(wan, ("wan", index)) for index, wan in enumerate(file.wan))
    if readable(file.congestion):
        for index, entry in enumerate(file.congestion):
            if readable(entry.replay) and entry.replay is not None:
                message = "a recorded trace is not scaled; play it in the running lab: pddbed wan play"
                findings.append(Finding(("congestion", index, "replay"), message, at_key=True))
        changes["congestion"] = tuple(
            scaler.section(entry, ("congestion", index)) for index, entry in enumerate(file.congestion)
        )
    if readable(file.datacenters):
        changes["datacenters"] = {
            name: scaler.fabric_of(section, ("datacenters", name)) for name, section in file.datacenters.items()
        }
    changes["serving"] = _serving(file.serving, section, scaler, findings)
    lab = _changed(file, changes)
    findings += _packets(file, lab)
    return lab, findings


class _Scaler:
    """Walks sections and scales what is a rate, a time or a size by its type."""

    def __init__(self, scale: Scale, ratio: float, findings: list[Finding]) -> None:
        self._scale = scale
        self._ratio = ratio
        self._findings = findings

    def section(self, section: Any, path: Path) -> Any:
        changes = {}
        kind: type[Section] = type(section)
        for name, hint in hints(kind).items():
            value = section.__dict__.get(name)
            if value is not None and readable(value):
                changes[name] = self._value(value, _kind(hint), (*path, name))
        return _changed(section, changes)

    def fabric_of(self, datacenter: Any, path: Path) -> Any:
        """The datacenter with its fabric scaled; nothing else of it has a unit."""
        if not readable(datacenter.fabric):
            return datacenter
        return _changed(datacenter, {"fabric": self.section(datacenter.fabric, (*path, "fabric"))})

    def _value(self, value: Any, kind: Quantity | None, path: Path) -> Any:
        if isinstance(value, Section):
            return self.section(value, path)
        if isinstance(value, tuple) and kind is not None:
            return tuple(self._value(item, kind, path) for item in value)
        if kind is DURATION:
            return self._scale.time_ns(value)
        if kind is SIZE:
            return max(1, round(value / self._ratio))
        if kind is RATE:
            return self.rate(value, path)
        return value

    def rate(self, bps: int, path: Path) -> int:
        """0, which stands for no limit, stays."""
        lab_bps = round(self._scale.rate_bps(bps, self._ratio))
        if bps > 0 and lab_bps < MIN_RATE_BPS:
            message = (
                f"{short_rate(bps, 4)} is {lab_bps} bit/s in the lab (bytes 1:{self._ratio:.4g}, times "
                f"1:{self._scale.time_compression:g}), and no driver holds less than {MIN_RATE_BPS}; scale less"
            )
            self._findings.append(Finding(path, message))
        return lab_bps


def _kind(hint: Any) -> Quantity | None:
    """Kind of quantity of a field; of several, as in a pair, all are of that kind."""
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, Reads) and part.kind is not None:
            return part.kind
    return next(filter(None, map(_kind, get_args(hint))), None)


def _serving(serving: Serving, section: ScaleSection, scaler: _Scaler, findings: list[Finding]) -> Serving:
    divisor = section.prompt_divisor
    changes: dict[str, Any] = {}
    if "block_size" in serving.model_fields_set:
        message = "follows from scale.block_tokens and scale.prompt_divisor; remove it"
        findings.append(Finding(("serving", "block_size"), message, at_key=True))
    block, rest = divmod(section.block_tokens, divisor)
    if rest or not 1 <= block <= 1024:
        message = (
            f"{section.block_tokens} tokens, divided by prompt_divisor {divisor}, are no block of 1 to 1024 whole "
            "tokens; choose another divisor, or hit rates would change"
        )
        findings.append(Finding(("scale", "block_tokens"), message))
        block = max(1, min(block, 1024))
    changes["block_size"] = block
    if readable(serving.kv_chunk):
        changes["kv_chunk"] = max(block, serving.kv_chunk // divisor // block * block)
    if readable(serving.offload_threshold):
        changes["offload_threshold"] = serving.offload_threshold // divisor
    if readable(serving.busy_tokens) and serving.busy_tokens:
        changes["busy_tokens"] = max(1, round(serving.busy_tokens / divisor))
    pool = serving.kv_pool
    if readable(pool.wan_dtype) and pool.wan_dtype != "same":
        message = "changes how many bytes cross the WAN, which scale is made for; write same"
        findings.append(Finding(("serving", "kv_pool", "wan_dtype"), message))
    if readable(pool.rate) and pool.rate is not None:
        changes["kv_pool"] = _changed(pool, {"rate": scaler.rate(pool.rate, ("serving", "kv_pool", "rate"))})
    return _changed(serving, changes)  # type: ignore[no-any-return]


def _packets(file: TopologyFile, lab: TopologyFile) -> Iterator[Finding]:
    """Links whose bandwidth-delay product is a few packets here and was not there."""
    if not readable(file.wan):
        return
    for index, (real, here) in enumerate(zip(file.wan, lab.wan, strict=True)):
        same = here.forward is None and here.backward is None
        for name in DIRECTIONS[:1] if same else DIRECTIONS:
            there, now = (_packets_of(wan, index, name) for wan in (real, here))
            if there is not None and now is not None and now < FEWEST_PACKETS <= there:
                message = (
                    f"{'' if same else name + ': '}its bandwidth-delay product is {now:.1f} packets in the lab "
                    f"({there:,.0f} in the deployment), and TCP needs {FEWEST_PACKETS} to behave as there; scale "
                    "less, or lower the MTU"
                )
                yield Finding(("wan", index), message)


def _packets_of(wan: Any, index: int, name: Any) -> float | None:
    ways = {way: effective(wan, index, way) for way in DIRECTIONS}
    rtt, rate = rtt_ns(*ways.values()), ways[name]["rate"]
    if not rtt or rate is None or not readable(rate, wan.mtu):
        return None
    return float(rate * rtt / 8e9 / wan.mtu)


def _changed(section: Any, changes: dict[str, Any]) -> Any:
    """A copy; what was given in the file stays so marked."""
    return section.model_copy(update=changes)
