"""Memory that one link's packets may take: derived from the link, refused where the machine is smaller.

Pure arithmetic, apart from reading how much memory there is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from testbed.links.emulator.delayline import OVERHEAD_BYTES
from testbed.links.emulator.packet import VNET_BYTES
from testbed.model.impairment import NS_PER_S, SMALLEST_PACKET_BYTES, Impairment

# More small packets a second than the emulator can carry on any machine: bounds the per-packet overhead.
PACKETS_PER_S_CEILING = 500_000
# A link without a rate limit is as fast as the emulator: no machine has shown more.
UNLIMITED_BPS = 20_000_000_000
SHARE_OF_AVAILABLE = 0.5
_SLACK_BYTES = 16 << 20

Name = TypeVar("Name", bound=str)


class MemoryLimitError(Exception):
    """The packets in flight do not fit; the message holds the arithmetic."""


def available_bytes() -> int:
    """MemAvailable of this machine. Raises OSError where /proc is missing."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def in_flight_bytes(impairment: Impairment) -> int:
    """Memory for everything that one direction can hold, in MTU packets or in the smallest ones."""
    rate_bps = UNLIMITED_BPS if impairment.rate_bps is None else impairment.rate_bps
    ip_bytes = rate_bps * impairment.longest_delay_ns() // (8 * NS_PER_S) + (impairment.queue_bytes or 0)
    packets_per_s = min(PACKETS_PER_S_CEILING, rate_bps // (8 * SMALLEST_PACKET_BYTES))
    packets = packets_per_s * impairment.longest_delay_ns() // NS_PER_S
    return ip_bytes + packets * (OVERHEAD_BYTES + VNET_BYTES) + _SLACK_BYTES


def line_limit_bytes(asked: Mapping[Name, Impairment], machine_bytes: int) -> dict[Name, int]:
    """Limit of each direction's delay line. Raises MemoryLimitError.

    Without a rate limit there is no largest amount in flight: the limit is then what the emulator could carry
    at 20 Gbit/s, or this direction's share of the memory where that is less (`dropped_line` counts the rest).
    """
    for name, impairment in asked.items():
        if impairment.rate_bps is not None and impairment.queue_bytes is None:
            raise MemoryLimitError(f'{name}: a rate of {impairment.rate_bps} bit/s without a queue; give "queue" bytes')
    budget = int(machine_bytes * SHARE_OF_AVAILABLE)
    limits = {name: in_flight_bytes(impairment) for name, impairment in asked.items()}
    fixed = sum(limits[name] for name, impairment in asked.items() if impairment.rate_bps is not None)
    if fixed > budget:
        raise MemoryLimitError(_arithmetic(asked, limits, budget))
    unlimited = [name for name, impairment in asked.items() if impairment.rate_bps is None]
    for name in unlimited:
        share = (budget - fixed) // len(unlimited)
        if share < _SLACK_BYTES:
            raise MemoryLimitError(_arithmetic(asked, limits, budget))
        limits[name] = min(limits[name], share)
    return limits


def _arithmetic(asked: Mapping[Name, Impairment], limits: Mapping[Name, int], budget: int) -> str:
    terms = ", ".join(
        f"{name} {_gigabytes(limits[name])} for "
        f"{'no rate limit' if impairment.rate_bps is None else f'{impairment.rate_bps / 1e6:g} Mbit/s'} x "
        f"{impairment.longest_delay_ns() / 1e6:g} ms + queue {_gigabytes(impairment.queue_bytes or 0)}"
        for name, impairment in asked.items()
    )
    return (
        f"packets in flight need more than the {_gigabytes(budget)} that this machine can give ({terms}); "
        'lower the rate, the delay or "queue"'
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
