"""A simulated worker's prefix cache: the live workers' policy, bounded in blocks or not at all."""

from collections.abc import Sequence

from workers.cache.policy import PrefixPolicy


class SimCache:
    """Counts in tokens, a last block in part as a whole one: a prompt's own length is the caller's to mind."""

    def __init__(self, block_tokens: int, most_tokens: int = 0) -> None:
        self._policy = PrefixPolicy()
        self._block_tokens = block_tokens
        self._most_blocks = most_tokens // block_tokens if most_tokens else None

    def matched(self, path: Sequence[int]) -> int:
        """Tokens of the prompt's beginning that are here. Changes nothing."""
        return self._policy.match(path) * self._block_tokens

    @property
    def tokens(self) -> int:
        """All that is here."""
        return self._policy.size * self._block_tokens

    def keep(self, path: Sequence[int]) -> None:
        """The whole prompt is here and used now."""
        if path:
            self._policy.insert(path)
        if self._most_blocks is not None and self._policy.size > self._most_blocks:
            self._policy.evict(self._policy.size - self._most_blocks)
