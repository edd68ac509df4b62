"""From logits to a token, with penalties of tokens that have occurred as vLLM's `apply_penalties` has them. Pure.

A choice depends on seed, position, logits and, with penalties, the tokens before. So a request that moves to another
instance in mid-answer goes on as it would have gone on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_LIMITS = torch.finfo(torch.float32)


class TokenCounts:
    """The tokens that a sequence has up to `length`, and how often its answer has each. Grows with it: what was counted
    is not counted again.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.length = 0
        self.tokens = torch.zeros(0, dtype=torch.long, device=device)
        """Each once."""
        self.answered = torch.zeros(vocab, device=device)
        self._known: set[int] = set()

    def extend(self, tokens: List[int], answer_from: int) -> None:
        """Counts the next tokens; those from position `answer_from` of the sequence on are of the answer."""
        if fresh := [token for token in dict.fromkeys(tokens) if token not in self._known]:
            self._known |= set(fresh)
            self.tokens = torch.cat([self.tokens, self.tokens.new_tensor(fresh)])
        answer = self.tokens.new_tensor(tokens[max(0, answer_from - self.length) :])
        self.answered.index_add_(0, answer, self.answered.new_ones(len(answer)))
        self.length += len(tokens)

    def followed_by(self, draft: List[int]) -> TokenCounts:
        """As if the answer went on with a guess; itself where there is none."""
        if not draft:
            return self
        guessed = copy(self)
        guessed.answered, guessed._known = self.answered.clone(), set(self._known)
        guessed.extend(draft, self.length)
        return guessed


def penalise(logits: Tensor, counts: TokenCounts, repetition: float, presence: float, frequency: float) -> None:
    """Lowers (or raises) in one row of logits, in place, the tokens that have occurred.

    `repetition` is of prompt and answer: a logit above 0 is divided by it, another one multiplied. The others are of
    the answer: `frequency` is taken off for each occurrence, `presence` once. What a repetition penalty takes beyond
    float32 ends at its limit, where a choice is possible still.
    """
    row, answered = logits[counts.tokens], counts.answered[counts.tokens]
    if repetition != 1:
        factor = row.new_tensor(repetition).clamp(_LIMITS.tiny, _LIMITS.max)
        row = (row * torch.where(row > 0, 1 / factor, factor)).clamp(_LIMITS.min, _LIMITS.max)
    logits[counts.tokens] = row - frequency * answered - presence * (answered > 0)


_MASK = (1 << 64) - 1
MAX_LOGPROBS = 64


@dataclass(frozen=True)
class Sampling:
    """The way to choose tokens, and the end of an answer. `max_tokens` counts all generated tokens, wherever they were
    made.

    Temperature 0 is greedy. `seed` None counts as 0: whoever wants different answers gives different seeds.
    `logprobs` asks for that many of the likeliest tokens beside each chosen one; None asks for none. `top_k` 0 is all.
    `barred` ids are not chosen at positions before `barred_until`. Penalties and `logit_bias` (id, what is added) are
    vLLM's; `answer_from`: the position where the answer begins that they count (None: behind the prompt).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    barred: tuple[int, ...] = ()
    barred_until: int = 0
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    answer_from: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0 or not 0 <= self.min_p <= 1:
            raise ValueError(f"top_k is {self.top_k} and min_p {self.min_p}; they must be 0 or more, and from 0 to 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs is {self.logprobs}; it must be from 0 to {MAX_LOGPROBS}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0")

    @property
    def penalises(self) -> bool:
        """True if a choice depends on which tokens there are already."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Row(NamedTuple):
    """The way one token is chosen, and which position it will have in its sequence.

    With penalties `counts` has the sequence's tokens, behind which those of `draft` are guessed.
    """

    sampling: Sampling
    position: int
    counts: TokenCounts | None = None
    draft: tuple[int, ...] = ()


class Choice(NamedTuple):
    """A token and its log probability, and the likeliest tokens with theirs, likeliest first (None: not asked for).

    Log probabilities are the model's own, at temperature 1 and before top_p, in float32.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] | None = None


class BadLogits(ArithmeticError):
    """The model's logits of one row are not numbers: nothing can be chosen from them."""


Sampled = Choice | Exception
"""The outcome of a row: a choice, or why there is none."""


def choose(logits: Tensor, requests: List[Row]) -> list[Sampled]:
    """A choice for each row of `logits [rows, vocab]`, or why this row has none: no row touches another."""
    logits = logits.float()
    normalisers = torch.logsumexp(logits, dim=-1).tolist()
    permitted = _adjusted(logits, requests)
    tokens = permitted.argmax(dim=-1).tolist()
    chosen: list[Sampled] = []
    for row, asked in enumerate(requests):
        try:
            chosen.append(
                _choice(logits[row], permitted[row], asked.sampling, asked.position, tokens[row], normalisers[row])
            )
        except Exception as error:
            chosen.append(error)
    return chosen


def _adjusted(logits: Tensor, requests: List[Row]) -> Tensor:
    """The logits with biases, penalties and without barred tokens, in vLLM's order; the very same where nothing of
    this is asked for.
    """
    rows = [row for row, asked in enumerate(requests) if _adjusts(asked)]
    if rows:
        logits = logits.clone()
        for row in rows:
            _adjust(logits[row], requests[row])
    return logits


def _adjusts(asked: Row) -> bool:
    return asked.counts is not None or bool(asked.sampling.logit_bias) or asked.position < asked.sampling.barred_until


def _adjust(logits: Tensor, asked: Row) -> None:
    """One row, in place. Barred tokens come last: they are out whatever the others make of them."""
    sampling = asked.sampling
    biases = [(token, bias) for token, bias in sampling.logit_bias if token < len(logits)]
    if biases:
        tokens, values = zip(*biases, strict=True)
        logits[list(tokens)] += logits.new_tensor(values)
    if asked.counts is not None:
        counts = asked.counts.followed_by(asked.draft)
        penalise(logits, counts, sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if asked.position < sampling.barred_until:
        logits[[token for token in sampling.barred if token < len(logits)]] = -torch.inf


def _choice(
    logits: Tensor, permitted: Tensor, sampling: Sampling, position: int, likeliest: int, normaliser: float
) -> Choice:
    """From one row. Raises BadLogits when the largest logit is not a finite number (not-a-number counts as largest)."""
    peak = float(permitted[likeliest])
    if not (math.isfinite(peak) and math.isfinite(normaliser)):
        raise BadLogits(
            f"the model's largest logit for position {position} is {peak}, from which no token can be chosen"
        )
    token = likeliest
    if sampling.temperature > 0:
        token = _draw(permitted, sampling, peak, uniform(sampling.seed or 0, position))
    top = None if sampling.logprobs is None else _top(logits, sampling.logprobs, normaliser)
    return Choice(token, float(logits[token]) - normaliser, top)


def _top(logits: Tensor, count: int, normaliser: float) -> tuple[tuple[int, float], ...]:
    peaks, tokens = logits.topk(min(count, len(logits)))
    return tuple((token, peak - normaliser) for token, peak in zip(tokens.tolist(), peaks.tolist(), strict=True))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position (splitmix64, Steele et al. 2014), the same on every
    machine.
    """
    state = (_mix(seed & _MASK) + position * 0x9E3779B97F4A7C15) & _MASK
    return (_mix(state) >> 11) / (1 << 53)


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _draw(logits: Tensor, sampling: Sampling, peak: float, point: float) -> int:
    """Inverts the cumulative distribution at `point`, in vocabulary order.

    That order, unlike descending probability, does not flip when rounding swaps two near-equal candidates. `peak`, the
    largest logit, is taken off first: divided by a temperature near zero it would be infinite, and so only the others
    are (temperature 5e-324 chooses among the likeliest, as 0 does).
    """
    probabilities = torch.softmax((logits.double() - peak) / sampling.temperature, dim=-1)
    whole = 1.0
    if sampling.min_p > 0 or sampling.top_k > 0:
        least = sampling.min_p * probabilities.max()
        if 0 < sampling.top_k < len(probabilities):
            least = torch.maximum(least, probabilities.topk(sampling.top_k).values[-1])
        probabilities[probabilities < least] = 0.0
        whole = float(probabilities.sum())
    if sampling.top_p < 1:
        descending, order = probabilities.sort(descending=True, stable=True)
        beyond = descending.cumsum(0) - descending >= sampling.top_p * whole
        probabilities[order[beyond]] = 0.0
    cumulative = probabilities.cumsum(0)
    index = torch.searchsorted(cumulative, point * cumulative[-1], right=True)
    last = torch.searchsorted(cumulative, cumulative[-1])  # rounding may take `point` of the whole up to the whole
    return int(torch.minimum(index, last))
