"""Penalties of tokens that have occurred, as vLLM's `apply_penalties` has them, and what they count."""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

_LIMITS = torch.finfo(torch.float32)


class TokenCounts:
    """Which tokens a sequence has up to `length`, and how often its answer has each. Grows with it: what was counted
    is not counted again.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.length = 0
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.answered = torch.zeros(vocab, device=device)

    def extend(self, tokens: List[int], answer_from: int) -> None:
        """Counts the next tokens; those from position `answer_from` of the sequence on are of the answer."""
        ids = torch.tensor(tokens, dtype=torch.long, device=self.seen.device)
        self.seen[ids] = True
        answer = ids[max(0, answer_from - self.length) :]
        self.answered.index_add_(0, answer, torch.ones(len(answer), device=ids.device))
        self.length += len(tokens)

    def followed_by(self, draft: List[int]) -> TokenCounts:
        """As if the answer went on with a guess; itself where there is none."""
        if not draft:
            return self
        guessed = TokenCounts(0, self.seen.device)
        guessed.length, guessed.seen, guessed.answered = self.length, self.seen.clone(), self.answered.clone()
        guessed.extend(draft, self.length)
        return guessed


def penalise(logits: Tensor, counts: TokenCounts, repetition: float, presence: float, frequency: float) -> None:
    """Lowers (or raises) in one row of logits, in place, the tokens that have occurred.

    `repetition` is of prompt and answer: a logit above 0 is divided by it, another one multiplied. The others are of
    the answer: `frequency` is taken off for each occurrence, `presence` once. What a repetition penalty takes beyond
    float32 ends at its limit, where a choice is possible still.
    """
    if repetition != 1:
        factor = logits.new_tensor(repetition).clamp(_LIMITS.tiny, _LIMITS.max)
        scaled = logits * torch.where(logits > 0, 1 / factor, factor)
        logits.copy_(torch.where(counts.seen, scaled.clamp(_LIMITS.min, _LIMITS.max), logits))
    logits -= frequency * counts.answered
    logits -= presence * (counts.answered > 0)
