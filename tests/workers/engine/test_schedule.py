"""The policy of a step: decodes always run, prefill takes what is left and is never starved."""

from workers.engine import Sequence
from workers.engine.batching import schedule


def waiting(id: str, pending: int) -> Sequence:
    return Sequence(id, [0] * pending, pending)


def plan(sequences: list[Sequence], max_tokens: int) -> list[tuple[str, int]]:
    return [(chunk.sequence.id, chunk.count) for chunk in schedule(sequences, max_tokens)]


def test_decodes_come_first_and_prefill_fills_the_rest_in_order() -> None:
    sequences = [waiting("p", 50), waiting("d", 1), waiting("q", 50), waiting("e", 1)]
    assert plan(sequences, 64) == [("d", 1), ("e", 1), ("p", 50), ("q", 12)]


def test_a_long_prompt_is_cut_into_chunks() -> None:
    assert plan([waiting("p", 1000)], 256) == [("p", 256)]


def test_many_decodes_do_not_starve_a_prefill() -> None:
    sequences = [*(waiting(f"d{i}", 1) for i in range(300)), waiting("p", 100)]
    assert len(plan(sequences, 256)) == 301
    assert plan(sequences, 256)[-1] == ("p", 16)


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan([], 256) == []
