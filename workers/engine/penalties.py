"""Penalties of tokens that have occurred, as vLLM's `apply_penalties` has them, and what they count."""

from __future__ import annotations

from collections.abc import Sequence as List
from copy import copy

import torch
from torch import Tensor

_LIMITS = torch.finfo(torch.float32)


class TokenCounts:
    """Which tokens a sequence has up to `length`, and how often its answer has each. Grows with it: what was counted
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
