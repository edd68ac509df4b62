"""Main decode's sequence while it follows the relay's: ids as they come, their KV computed, one token further.

Owns the bookkeeping of one hand-over on main decode; messages and deadlines are the role's.
"""

import asyncio

from workers.engine import EngineRunner, Generated, Sequence
from workers.handover import Pace, RelayedIds
from workers.wire.kv_tail import token_views


class Following:
    """Behind the ids that were followed the sequence holds what was sampled after them: the relay's next tokens, if
    the relay is still decoding, or else the first of this worker's own.
    """

    def __init__(self, runner: EngineRunner, sequence: Sequence) -> None:
        self.relayed = RelayedIds(sequence.prompt_len)
        self.rounds: list[int] = []
        """Ids in each round so far."""
        self.relay_pace, self.own_pace = Pace(), Pace()
        self.ahead: list[Generated] = []
        """Tokens sampled behind those followed."""
        self._runner = runner
        self._sequence = sequence
        self._followed = 0
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Ids that have come and were not followed yet."""
        return len(self.relayed.ids) - self._followed

    @property
    def agrees(self) -> bool:
        """The sequence's answer and the relay's are the same as far as both go."""
        own = self._sequence.tokens[self._sequence.prompt_len :]
        return all(ours == theirs for ours, theirs in zip(own, self.relayed.ids, strict=False))

    def note(self) -> None:
        """`relayed` has changed, or KV has come."""
        self._news.set()

    async def news(self) -> None:
        """Return after the next `note`."""
        self._news.clear()
        await self._news.wait()

    async def follow(self) -> list[Generated]:
        """Compute the KV of all ids that have come, in one extend; returns the tokens sampled behind them, one or more.

        Tokens that were sampled here stand as long as the ids agree with them. Raises what the runner raises.
        """
        sequence, ids = self._sequence, self.relayed.ids[self._followed :]
        if not ids:
            return self.ahead
        at = sequence.prompt_len + self._followed
        own = sequence.tokens[at:]
        agreed = next((i for i, (ours, theirs) in enumerate(zip(own, ids, strict=False)) if ours != theirs), len(own))
        self._followed += len(ids)
        self.rounds.append(len(ids))
        if agreed > len(ids):  # sampled beyond them already
            self.ahead = self.ahead[len(ids) :]
            return self.ahead
        if agreed < min(len(own), len(ids)):
            self._runner.forget(sequence, at + agreed)
        rest = ids[agreed:]
        self.ahead = [await (self._runner.extend(sequence, rest) if rest else self._runner.prefill(sequence))]
        return self.ahead

    @property
    def may_guess(self) -> bool:
        """There is a last token to go on from, and it does not end the answer."""
        return bool(self.ahead) and self._sequence.finish_reason is None and self._sequence.pending == 1

    async def guess(self) -> None:
        """Sample one token more, which the relay is making as well: nothing is left to compute when it stops there."""
        self.ahead.append(await self._runner.prefill(self._sequence))


def write_tail(runner: EngineRunner, sequence: Sequence, position: int, tokens: int, kv: memoryview) -> None:
    """Put the KV of positions [position, position + tokens) into the sequence's blocks. Raises OutOfBlocks.

    The sequence is not being computed, and `computed` stays as it is.
    """
    runner.reserve(sequence, position + tokens)
    start = 0
    for view in token_views(runner.pool, sequence.blocks, position, position + tokens):
        view[:] = kv[start : start + len(view)]
        start += len(view)
    size = runner.pool.block_size
    runner.pool.store(sequence.blocks[position // size : -(-(position + tokens) // size)])
