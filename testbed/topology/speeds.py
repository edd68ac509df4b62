"""The sections `profiles:` and `scale:`: how fast named hardware is, and the deployment that a lab stands for.

Owns names, types and descriptions, as `schema` does; what they come to is `profiles`' and `scaling`'s.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from testbed.model.units import DURATION, quote
from testbed.topology.fields import Duration, Factor, Name, Reads, Size, quantity, text_of, whole
from testbed.topology.section import Section

_NUMBER = r"[0-9]{1,12}(\.[0-9]{1,6})?"
MOST_TIMES = 1000  # as fast as another profile: 100000%


@dataclass(frozen=True, slots=True)
class Share:
    """So many times the speed of another profile."""

    of: float


def _read_tokens_per_s(value: Any) -> float:
    accepted = "a speed such as 9000 tokens/s"
    text = text_of(value, accepted)
    found = re.fullmatch(rf"({_NUMBER}) tokens/s", text, re.ASCII)
    if found is None:
        raise ValueError(f"{quote(text)} is not {accepted}")
    if float(found.group(1)) <= 0:
        raise ValueError(f"{quote(text)} is nothing at all; write more than 0 tokens/s")
    return float(found.group(1))


def _share_or(value: Any, read: Any, accepted: str) -> Any:
    text = text_of(value, accepted)
    if not re.fullmatch(rf"{_NUMBER}%", text, re.ASCII):
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"{error}, or a share of another profile's such as 81%") from None
    share = float(text[:-1]) / 100
    if not 0 < share <= MOST_TIMES:
        raise ValueError(f"{quote(text)} is not above 0% and at most {MOST_TIMES * 100}%")
    return Share(share)


_step = quantity(DURATION, least=1)

TokenRate = Annotated[
    float, Reads(_read_tokens_per_s, type="string", pattern=rf"^{_NUMBER} tokens/s$", examples=["9000 tokens/s"])
]
Prefill = Annotated[
    float | Share,
    Reads(
        lambda value: _share_or(value, _read_tokens_per_s, "a speed such as 9000 tokens/s, or 81%"),
        type="string",
        pattern=rf"^{_NUMBER}( tokens/s|%)$",
        examples=["9000 tokens/s", "81%"],
    ),
]
DecodeStep = Annotated[
    int | Share,
    Reads(
        lambda value: _share_or(value, _step.read, "a duration such as 30ms, or 210%"),
        type="string",
        pattern=rf"{DURATION.pattern}|^{_NUMBER}%$",
        examples=["30ms", "210%"],
    ),
]


class Profile(Section):
    """Speed of some hardware: absolute, or relative to another profile."""

    relative_to: Name | None = Field(default=None, description="The profile that percentages are of.")
    prefill: Prefill | None = Field(default=None, description="Prompt tokens a second, or a share of the other's.")
    decode: DecodeStep | None = Field(
        default=None, description="A decode step; or the share of the other's speed (200%: in half the time)."
    )
    decode_per_sequence: Duration | None = Field(
        default=None, description="Time that each further sequence adds to a decode step. Default: none."
    )
    extend: TokenRate | None = Field(
        default=None, description="Answer tokens a second that are computed with others. Default: as prefill."
    )


class KvBytes(Section):
    """KV of a token, all layers."""

    deployment: Size = Field(description="The deployment's.")
    lab: Size = Field(description="The lab's model's; workers check it.")


class ScaleSection(Section):
    """The deployment that the lab stands for: every other value of the file is the deployment's."""

    kv_bytes_per_token: KvBytes = Field(description="KV of a token: {deployment: 4400B, lab: 2KiB}.")
    block_tokens: Annotated[int, whole(1, 65_536)] = Field(
        default=64, description="Tokens in a KV block of the deployment. The lab's has prompt_divisor times fewer."
    )
    prompt_divisor: Annotated[int, whole(1, 65_536)] = Field(description="Prompts have so many times fewer tokens.")
    output_divisor: Annotated[int, whole(1, 65_536)] = Field(
        default=1, description="Answers have so many times fewer tokens, and a decode step takes so much longer."
    )
    time_compression: Factor = Field(default=1.0, description="Everything is so many times faster.")
