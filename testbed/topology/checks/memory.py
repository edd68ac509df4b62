"""Check that the packets which the WAN can hold fit into this machine's memory."""

from collections.abc import Iterator
from pathlib import Path as FilePath

from testbed.model.direction import DIRECTIONS
from testbed.model.units import short_duration, short_rate, short_size
from testbed.topology.checks.finding import Finding
from testbed.topology.directions import effective, impairment, rtt_ns
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile, Wan

# Of all memory; the rest is for workers, their KV and the page cache. A packet in the kernel takes about
# twice its bytes (skb truesize), so links at the limit take half of the memory.
SHARE = 4


def machine_memory_bytes(meminfo: FilePath = FilePath("/proc/meminfo")) -> int:
    """All memory of this machine."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no line MemTotal")


def check_memory(file: TopologyFile, memory_bytes: int) -> Iterator[Finding]:
    """Each link alone, then all together; the sum is shown."""
    if not readable(file.wan):
        return
    budget = memory_bytes // SHARE
    total = 0
    for index, wan in enumerate(file.wan):
        held, sums = _held(index, wan)
        if held > budget:
            message = (
                f"may hold {short_size(held)} of packets ({', '.join(sums)}), more than the {short_size(budget)} that "
                f"links may take here (a quarter of {short_size(memory_bytes)}); lower the rate, the delay or the queue"
            )
            yield Finding(("wan", index), message)
        else:
            total += held
    if total > budget:
        message = (
            f"all links together may hold {short_size(total)} of packets, more than the {short_size(budget)} that "
            f"links may take here (a quarter of {short_size(memory_bytes)}); lower rates, delays or queues"
        )
        yield Finding(("wan",), message, at_key=True)


def _held(index: int, wan: Wan) -> tuple[int, list[str]]:
    """Bytes in the queues and on the delay lines of both directions, and how each comes about."""
    directions = [effective(wan, index, name) for name in DIRECTIONS]
    rtt = rtt_ns(*directions)
    held, sums = 0, []
    for direction in directions:
        if rtt is None or not readable(*direction.values.values(), wan.mtu) or direction["rate"] is None:
            continue
        try:
            value = impairment(direction, rtt, wan.mtu)
        except ValueError:
            continue
        line, buffer = value.delay_line_bytes() or 0, value.queue_bytes or 0
        held += line + buffer
        rate, delay = short_rate(direction["rate"], 4), short_duration(value.longest_delay_ns(), 4)
        sums.append(f"{direction.name} {rate} x {delay} = {short_size(line)} and a queue of {short_size(buffer)}")
    return held, sums
