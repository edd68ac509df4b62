"""Hand-over from relay to main decode, as times: the live roles' messages, steps and rounds. Pure.

The relay emits token k (from 1) at `start_s + (k - 1) x relay_itl`; a step in flight when it is told to stop still
delivers its token. Ids reach main decode half a round trip later. `workers.handover` decides; this adds the times.
"""

import math
from dataclasses import dataclass

from experiments.sim.deployment import Deployment
from workers.handover import close_enough


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay that began at `start_s` and would make `tokens` tokens in all."""

    start_s: float
    tokens: int
    itl_s: float

    def emitted(self, now_s: float) -> int:
        """Tokens that are out at that time."""
        if now_s < self.start_s:
            return 0
        return min(self.tokens, 1 + math.floor((now_s - self.start_s) / self.itl_s + 1e-9))

    def emitted_at(self, token: int) -> float:
        """Time when token number `token`, from 1, is out."""
        return self.start_s + (token - 1) * self.itl_s

    def stopped(self, told_s: float) -> int:
        """Tokens there are when it has stopped, told at that time."""
        return min(self.tokens, self.emitted(told_s) + 1)


@dataclass(frozen=True, slots=True)
class HandedOver:
    """`relayed` tokens are the relay's; it is free at `free_s`. None of main decode's when the answer ended there;
    else its first is made at `first_s`."""

    relayed: int
    free_s: float
    first_s: float | None
    rounds: int


def hand_over(mode: str, asked_s: float, relay: Relay, deployment: Deployment) -> HandedOver:
    """The relay hears at `asked_s` that main decode has the prompt's KV."""
    half_s = deployment.rtt_s / 2

    def extend_s(ids: int) -> float:
        """A pass of decode, which others share, and each id's own cost: as the engine is paced."""
        return deployment.main_itl_s + ids / deployment.main_prefill_tokens_per_s

    if mode == "one-shot":
        relayed = relay.stopped(asked_s)
        free_s = relay.emitted_at(relayed)
        if relayed == relay.tokens:
            return HandedOver(relayed, free_s, None, 0)
        free_s = max(free_s, asked_s)
        return HandedOver(relayed, free_s, free_s + half_s + extend_s(relayed), 1)
    now_s, followed, rounds = asked_s + half_s, 0, list[int]()
    while True:  # rounds of main decode: extend what has come, until little has come meanwhile
        heard = relay.emitted(now_s - half_s)
        if heard == followed:
            now_s = relay.emitted_at(heard + 1) + half_s
            continue
        rounds.append(heard - followed)
        now_s += extend_s(rounds[-1])
        followed = heard
        come = relay.emitted(now_s - half_s)
        if come == relay.tokens or close_enough(rounds, come - followed):
            break
    relayed = relay.stopped(now_s + half_s)
    free_s = relay.emitted_at(relayed)
    if relayed == relay.tokens:
        return HandedOver(relayed, free_s, None, len(rounds))
    # while it is told, main decode guesses on: when the last ids come nothing is left to compute
    return HandedOver(relayed, free_s, free_s + half_s, len(rounds))
