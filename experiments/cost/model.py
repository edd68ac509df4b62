"""What two clusters cost that serve requests under one SLA: a homogeneous one, and PDD's with cheap decode nodes. Pure.

The homogeneous cluster has N nodes of kind A, a share of them decoding. PDD's serves GOODPUT times as many requests
with as many times the prefill nodes; decode work grows as well, the relay's share of it on nodes of kind A, the rest on
kind E, which decodes 2.1 times as fast. Costs are in nodes of kind A.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

GOODPUT = 1.278
COST_LOW, COST_HIGH = 1 - 0.071, 1 - 0.035  # over the homogeneous cluster's
BCR = 1.375
RELAY_SHARE = 0.062
CHIP_E_DECODE = 2.10


@dataclass(frozen=True, slots=True)
class Cluster:
    """PDD's cluster in the place of `nodes` of kind A, `decode_share` of which decode; `price` is that of a node E."""

    nodes: int
    decode_share: float
    prefill: int
    relays: int
    chips: int

    def price(self, cost: float) -> float:
        """What a node of kind E may cost, in nodes of kind A, for the whole to cost `cost` times the other cluster."""
        return (cost * self.nodes - self.prefill - self.relays) / self.chips

    def cost(self, price: float) -> float:
        """Over the homogeneous cluster's."""
        return (self.prefill + self.relays + price * self.chips) / self.nodes


def cluster(nodes: int, decode_share: float, relays: int, prefill_for: Callable[[int], int] | None = None) -> Cluster:
    """At least `relays` relays: one alone would be a single point of failure.

    `prefill_for`: prefill nodes of PDD that serve GOODPUT times what so many of the homogeneous cluster do; left out:
    in proportion.
    """
    decode = max(1, round(nodes * decode_share))
    prefill = max(1, nodes - decode)
    more = prefill_for(prefill) if prefill_for is not None else math.ceil(prefill * GOODPUT - 1e-9)
    work = decode * GOODPUT
    return Cluster(
        nodes,
        decode_share,
        more,
        max(relays, math.ceil(work * RELAY_SHARE - 1e-9)),
        math.ceil(work * (1 - RELAY_SHARE) / CHIP_E_DECODE - 1e-9),
    )


def feasible(of: Cluster, cost: float) -> bool:
    """Whether a node of kind E could have that price: above nothing and no dearer than one of kind A."""
    return 0 < of.price(cost) <= 1
