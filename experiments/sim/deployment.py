"""Deployment to simulate: nodes, speeds, links, and the variants of serving to compare. Immutable values."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from workers.policy import BUSY_TOKENS


@dataclass(frozen=True, slots=True)
class Variant:
    """`chunked`: KV leaves while prefill computes, not after. `end_on_rld`: what ends on the relay goes no further."""

    name: str
    policy: str
    chunked: bool = False
    end_on_rld: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("pdd", "pdd"),
        Variant("cdc-pd", "cdc-pd"),
        Variant("idc-pd", "idc-pd"),
        Variant("pdd-chunked", "pdd", chunked=True),
        Variant("cdc-pd-chunked", "cdc-pd", chunked=True),
        Variant("pdd-end-on-rld", "pdd", end_on_rld=True),
        Variant("prfaas", "prfaas"),
    )
}


SIMULATED_MODES = ("auto", "one-shot", "catch-up")  # of workers.handover.MODES


class BadDeployment(ValueError):
    """A value that no deployment can have, in one sentence."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Times in seconds, rates in bytes or tokens a second. The defaults are topologies/paper.yaml's, at full scale.

    A connection has a bandwidth of its own and the link room for all. A decode step takes the same time whatever the
    batch. Memory is large enough for whatever is used again, unless `cache_tokens` bounds each cache.
    """

    prefill_nodes: int = 6
    relay_nodes: int = 1
    main_nodes: int = 1
    prefill_tokens_per_s: float = 9_000.0
    main_prefill_tokens_per_s: float = 7_290.0  # chip E: 81 %; extends of main decode, and `prfaas`
    relay_itl_s: float = 0.075
    main_itl_s: float = 0.0357  # chip E: 210 % of the relay's speed
    kv_bytes_per_token: float = 4_400.0
    connections: int = 16  # of each prefill node to each main decode
    connection_bytes_per_s: float = 40e6
    rtt_s: float = 0.1
    fabric_bytes_per_s: float = 50e9
    relay_threshold: float = 0.95
    handoff: str = "auto"
    chunk_tokens: int = 2_048  # what leaves at once where KV is sent while prefill computes
    busy_tokens: int = BUSY_TOKENS  # of a prompt, that one more request on a worker weighs
    offload_tokens: int = 19_400  # of `prfaas`: uncached tokens up to which main decode prefills
    context_tokens: int = 128_000  # longer prompts are cut
    cache_tokens: int = 0  # of each worker's cache, least recently used go first; 0: no bound

    def __post_init__(self) -> None:
        for name in ("prefill_nodes", "relay_nodes", "main_nodes", "connections", "chunk_tokens", "context_tokens"):
            _check(name, getattr(self, name), 1)
        for name in ("busy_tokens", "offload_tokens", "cache_tokens", "rtt_s", "relay_threshold"):
            _check(name, getattr(self, name), 0)
        for name in (field.name for field in fields(self) if field.name.endswith(("_per_s", "_itl_s", "_per_token"))):
            if not getattr(self, name) > 0:
                raise BadDeployment(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.relay_threshold > 1:
            raise BadDeployment(f"relay_threshold is {self.relay_threshold}; it is a share from 0 to 1")
        if self.handoff not in SIMULATED_MODES:
            raise BadDeployment(f"handoff is {self.handoff!r}; simulated are: {', '.join(SIMULATED_MODES)}")

    def with_settings(self, settings: Iterable[str]) -> Self:
        """Changed by `key=value` texts. Raises BadDeployment."""
        kinds = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        changes: dict[str, Any] = {}
        for setting in settings:
            key, separator, text = setting.partition("=")
            if not separator or key not in kinds:
                raise BadDeployment(f"{setting!r} sets nothing; write KEY=VALUE with one of: {', '.join(kinds)}")
            changes[key] = _value(key, text, kinds[key])
        return replace(self, **changes)


def _check(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise BadDeployment(f"{name} is {value}; it must be at least {least}")


def _value(key: str, text: str, kind: type) -> Any:
    if kind is str:
        return text
    try:
        number = float(text)
        if not abs(number) < float("inf") or (kind is int and number != int(number)):
            raise ValueError
    except ValueError:
        raise BadDeployment(f"{key} is {text!r}; it is a {'whole ' if kind is int else ''}number") from None
    return kind(number)
