"""What another worker's cache holds, as far as its notices have told. Pure; may be wrong, so its users verify."""

from collections.abc import Iterable, Sequence


class CacheMirror:
    """The names of one worker's cached full blocks. Fed by `CacheNotice`s in the order they were sent."""

    def __init__(self) -> None:
        self._names: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._names)

    def apply(self, inserted: Iterable[bytes], evicted: Iterable[bytes], *, reset: bool = False) -> None:
        """Take one notice: first what went, then what came. `reset`: forget everything before."""
        if reset:
            self._names.clear()
        self._names.difference_update(evicted)
        self._names.update(inserted)

    def held(self, hashes: Sequence[bytes]) -> int:
        """How many of a chain's first blocks are there. By bisection: no cache holds a block without its parents."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._names:
                low = middle
            else:
                high = middle - 1
        return low

    def correct(self, hashes: Sequence[bytes], held: int) -> None:
        """The worker itself says that it holds only the first `held` blocks of a chain."""
        self._names.difference_update(hashes[held:])
