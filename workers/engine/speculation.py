"""Guessing several tokens ahead by looking the answer up in what was said already (prompt lookup). Pure.

A guess costs nothing but its share of a step: all guessed tokens go through the model at once, behind the last known
one, and those count that the model itself would have chosen, up to the first that it would not. So answers do not
depend on guesses, whatever the sampling, and speed does: on text that repeats itself (code that is edited, answers
that quote the prompt) one step makes several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """Look the last `ngram` tokens up, and guess that up to `draft` tokens follow as they did there."""

    ngram: int = 3
    draft: int = 4

    def __post_init__(self) -> None:
        if self.ngram < 1 or self.draft < 1:
            raise ValueError(
                f"speculation with an ngram of {self.ngram} and a draft of {self.draft}; both are at least 1"
            )


class Drafter:
    """Guesses for one sequence that only grows: half as long after one that failed, twice after one that held."""

    def __init__(self, speculation: Speculation) -> None:
        self._ngram = speculation.ngram
        self._most = speculation.draft
        self._length = speculation.draft
        self._seen: dict[tuple[int, ...], int] = {}  # where each n-gram ended last
        self._indexed = 0

    def propose(self, tokens: List[int], at_most: int) -> list[int]:
        """A guess of what follows `tokens`: up to `at_most` ids; none when their end has not occurred before.

        Where the earlier occurrence runs into the end, it is continued with what has been guessed: a loop.
        """
        found = self._look_up(tokens)
        if found is None:
            return []
        known = len(tokens)
        draft: list[int] = []
        for index in range(found, found + min(self._length, at_most)):
            draft.append(tokens[index] if index < known else draft[index - known])
        return draft

    def learn(self, drafted: int, accepted: int) -> None:
        """So many of the last guess's tokens held."""
        if accepted == drafted:
            self._length = min(2 * self._length, self._most)
        elif accepted == 0:
            self._length = max(self._length // 2, 1)

    def _look_up(self, tokens: List[int]) -> int | None:
        """Index behind the last occurrence of the final n-gram, but for the final one itself, which is noted."""
        size = self._ngram
        for end in range(max(self._indexed + 1, size), len(tokens)):
            self._seen[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens) - 1
        return self._seen.get(tuple(tokens[-size:])) if len(tokens) >= size else None
