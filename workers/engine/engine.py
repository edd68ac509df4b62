"""One step of inference over several sequences: grow their blocks, run the model, append what was sampled.

A step has three parts so that a runner can place them: `prepare` and `commit` touch a sequence and the pool
and belong to the event loop's thread; `compute` touches tensors only and may run on another.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch

from workers.engine.blocks import BlockPool
from workers.engine.paged import PagedAttention, Segment
from workers.engine.sampling import Row, Sampled, Sampling, TokenCounts, choose
from workers.engine.sequence import Generated, Sequence
from workers.models import LoadedModel


@dataclass(frozen=True)
class Chunk:
    """The next `count` pending tokens of a sequence and, if these are all, a `draft`: tokens that may follow them."""

    sequence: Sequence
    count: int
    draft: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """How many go through the model."""
        return self.count + len(self.draft)


@dataclass(frozen=True)
class Part:
    """A sequence's share of a step, ready to compute: a snapshot that later changes to the sequence do not touch."""

    chunk: Chunk
    ids: list[int]
    segment: Segment
    requests: list[Row]
    """After each of the last `ids`, as many as these, a token is chosen: how, and for which position."""


@dataclass(frozen=True)
class Batch:
    """A step: parts that go through the model together."""

    parts: List[Part]

    @property
    def requests(self) -> list[Row]:
        """Of all parts, in their order."""
        return [request for part in self.parts for request in part.requests]

    def split(self, sampled: List[Sampled]) -> list[List[Sampled]]:
        """What was sampled for each part."""
        remaining = iter(sampled)
        return [[next(remaining) for _ in part.requests] for part in self.parts]


class Engine:
    """Computes with one model over one pool. Not thread-safe beyond the split described above."""

    def __init__(self, loaded: LoadedModel, pool: BlockPool) -> None:
        self.loaded = loaded
        self.pool = pool
        self._device = pool.storage.device

    def admit(self, sequence: Sequence) -> None:
        """Allocates blocks for the tokens of a new sequence and notes whether it is finished already.

        Raises ValueError for an impossible sequence (empty, over-long, unknown token) and OutOfBlocks; in
        either case nothing is allocated.
        """
        self.check(sequence)
        sequence.blocks = self.pool.allocate(self.pool.blocks_for(len(sequence.tokens)))
        self.begin(sequence)

    def check(self, sequence: Sequence) -> None:
        """Raises ValueError for an impossible sequence: empty, over-long, unknown token."""
        config = self.loaded.config
        if sequence.prompt_len >= config.context_length:
            raise ContextTooLong(
                f"a prompt of {sequence.prompt_len} tokens leaves no room for an answer in the context of model "
                f'"{config.name}" ({config.context_length}); shorten the prompt'
            )
        self._check(sequence.tokens, len(sequence.tokens))
        if not 0 < sequence.prompt_len <= len(sequence.tokens):
            raise ValueError(f"prompt of {sequence.prompt_len} tokens in a sequence of {len(sequence.tokens)}")

    def begin(self, sequence: Sequence) -> None:
        """Notes whether a new sequence, whose blocks are there, is finished already."""
        sequence.note_finish(self._eos_ids, self.loaded.config.context_length)

    def append(self, sequence: Sequence, ids: List[int]) -> None:
        """Appends known answer tokens. Raises ValueError, appending none, when they do not fit."""
        self._check(ids, len(sequence.tokens) + len(ids))
        sequence.tokens.extend(ids)
        sequence.note_finish(self._eos_ids, self.loaded.config.context_length)

    def grow(self, sequence: Sequence, count: int) -> None:
        """Allocates what the next `count` tokens lack. Raises OutOfBlocks, leaving the sequence as it was."""
        missing = self.pool.blocks_for(sequence.computed + count) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)

    def prepare(self, chunk: Chunk) -> Part:
        """Snapshot of a chunk whose blocks are there (`grow`). One that reaches the last token gets sampled, after that
        token and after each of its draft.
        """
        sequence, start = chunk.sequence, chunk.sequence.computed
        end = start + chunk.count
        sampled = end == len(sequence.tokens) and sequence.finish_reason is None
        assert sampled or not chunk.draft, "a draft that follows no last token"
        assert 0 < chunk.count <= sequence.pending, f"chunk of {chunk.count}, {sequence.pending} pending"
        ids = [*sequence.tokens[start:end], *chunk.draft]
        segment = Segment(start, start + chunk.tokens, tuple(sequence.blocks))
        rows: list[Row] = []
        if sampled:
            counts = self._counted(sequence) if sequence.sampling.penalises else None
            draft = range(len(chunk.draft) + 1)
            rows = [Row(sequence.sampling, end + ahead, counts, chunk.draft[:ahead]) for ahead in draft]
        return Part(chunk, ids, segment, rows)

    def _counted(self, sequence: Sequence) -> TokenCounts:
        """All of a sequence's tokens. A step that is computed again finds them as they are: nothing else counts."""
        counts = sequence.counts = sequence.counts or TokenCounts(self.loaded.config.vocab, self._device)
        if counts.length < len(sequence.tokens):
            begins = sequence.sampling.answer_from
            counts.extend(sequence.tokens[counts.length :], sequence.prompt_len if begins is None else begins)
        return counts

    @torch.inference_mode()
    def compute(self, batch: Batch) -> list[Sampled]:
        """Runs the model; returns what was chosen in each sampled row. Writes KV into the pool."""
        attention = PagedAttention(self.loaded.config, self.pool, [part.segment for part in batch.parts])
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for part in batch.parts:
            ids += part.ids
            positions += range(part.segment.start, part.segment.end)
            rows += range(len(ids) - len(part.requests), len(ids))
        logits = self.loaded.model(
            torch.tensor(ids, device=self._device),
            torch.tensor(positions, device=self._device),
            torch.tensor(rows, dtype=torch.long, device=self._device),
            attention,
        )
        if rows:
            return choose(logits, batch.requests)  # waits for the device
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the KV is there when a step has ended
        return []

    def commit(self, part: Part, sampled: List[Sampled]) -> list[Generated]:
        """Moves the sequence on; returns the tokens it gained. Raises what stands in place of a choice that is needed.

        None while tokens are still pending; with a draft up to one more than that has. A sequence that was finished
        before gains nothing and returns its last token.
        """
        chunk, sequence = part.chunk, part.chunk.sequence
        sequence.computed += chunk.count
        if sequence.pending:
            return []
        if sequence.finish_reason is not None:
            return [sequence.last]
        gained = self._accept(sequence, chunk.draft, sampled)
        # the KV of guesses that failed is behind `computed`: nobody reads it, the next tokens' replaces it
        sequence.computed += len(gained) - 1
        return gained

    def _accept(self, sequence: Sequence, draft: tuple[int, ...], sampled: List[Sampled]) -> list[Generated]:
        """Appends what the model chose, as long as it was given what it chose before."""
        gained: list[Generated] = []
        for ahead, choice in enumerate(sampled):
            if isinstance(choice, Exception):
                raise choice
            sequence.tokens.append(choice.token)
            sequence.note_finish(self._eos_ids, self.loaded.config.context_length)
            position = len(sequence.tokens) - 1
            gained.append(Generated(choice.token, position, sequence.finish_reason, choice.logprob, choice.top))
            if sequence.finish_reason is not None or ahead == len(draft) or choice.token != draft[ahead]:
                break
        return gained

    def step(self, chunks: List[Chunk]) -> list[Generated]:
        """All of one step, synchronously; returns the tokens gained. Raises OutOfBlocks before anything is computed."""
        for chunk in chunks:
            self.grow(chunk.sequence, chunk.tokens)
        batch = Batch([self.prepare(chunk) for chunk in chunks])
        sampled = batch.split(self.compute(batch))
        return [token for part, own in zip(batch.parts, sampled, strict=True) for token in self.commit(part, own)]

    @property
    def _eos_ids(self) -> frozenset[int]:
        return self.loaded.tokenizer.eos_ids

    def _check(self, ids: List[int], total: int) -> None:
        config = self.loaded.config
        if not ids:
            raise ValueError("no tokens to compute; a prompt has at least one")
        if total > config.context_length:
            raise ContextTooLong(
                f'{total} tokens exceed the context of model "{config.name}" ({config.context_length}); '
                "end the answer earlier"
            )
        for token in ids:
            if not 0 <= token < config.vocab:
                raise ValueError(f'token {token} is outside the vocabulary of model "{config.name}" ({config.vocab})')


class ContextTooLong(ValueError):
    """More tokens than the model's context holds."""


def generate(loaded: LoadedModel, tokens: List[int], sampling: Sampling, block_size: int = 16) -> list[int]:
    """The control, which any other way must equal: one process decoding alone, with nothing between it and the model.

    Returns the answer to the prompt `tokens`, end-of-text token included.
    """
    context = min(len(tokens) + sampling.max_tokens, loaded.config.context_length)
    pool = BlockPool(loaded.config, -(-context // block_size), block_size, loaded.spec.dtype, loaded.spec.device)
    engine = Engine(loaded, pool)
    sequence = Sequence("control", list(tokens), len(tokens), sampling)
    engine.admit(sequence)
    while sequence.finish_reason is None:
        engine.step([Chunk(sequence, sequence.pending)])
    return sequence.tokens[len(tokens) :]
