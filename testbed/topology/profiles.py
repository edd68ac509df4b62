"""Absolute speeds of `profiles:`, and the part of them that a lab's worker is told. Pure.

Reads only files without mistakes (`checks.profiles`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.model.scale import Scale
from testbed.topology.speeds import Profile, Share

NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of some hardware, in its own tokens and times."""

    prefill_per_s: float
    extend_per_s: float
    decode_ns: float
    decode_sequence_ns: float


def speeds_of(profiles: Mapping[str, Profile], name: str) -> Speeds:
    """A profile with everything that it takes over from the one it is relative to."""
    profile = profiles[name]
    if profile.relative_to is None:
        assert isinstance(profile.prefill, float)
        assert isinstance(profile.decode, int)
        extend = profile.prefill if profile.extend is None else profile.extend
        return Speeds(profile.prefill, extend, profile.decode, profile.decode_per_sequence or 0)
    base = speeds_of(profiles, profile.relative_to)
    prefill, extend = base.prefill_per_s, base.extend_per_s
    if isinstance(profile.prefill, Share):
        prefill, extend = prefill * profile.prefill.of, extend * profile.prefill.of
    elif profile.prefill is not None:
        prefill = extend = profile.prefill
    decode, sequence = base.decode_ns, base.decode_sequence_ns
    if isinstance(profile.decode, Share):
        decode, sequence = decode / profile.decode.of, sequence / profile.decode.of
    elif profile.decode is not None:
        decode = profile.decode
    return Speeds(
        prefill,
        extend if profile.extend is None else profile.extend,
        decode,
        sequence if profile.decode_per_sequence is None else profile.decode_per_sequence,
    )


def pace_of(name: str, speeds: Speeds, scale: Scale | None) -> dict[str, Any]:
    """PDDBED_PROFILE (docs/environment.md), in the lab's tokens and times."""
    scale = scale or Scale(1)
    return {
        "name": name,
        "prefill_token_ns": scale.prefill_token_ns(speeds.prefill_per_s),
        "decode_step_ns": scale.decode_step_ns(speeds.decode_ns),
        "extend_token_ns": scale.extend_token_ns(speeds.extend_per_s),
        "decode_sequence_ns": scale.decode_step_ns(speeds.decode_sequence_ns),
        "extend_pass_ns": speeds.decode_ns / scale.time_compression,
    }
