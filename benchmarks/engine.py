"""Speed of the engine's decoding beside transformers on the same shape of model, and of its cache's matching.

    python -m benchmarks.engine [--rounds 5] [--out results/engine]

Everything is a ratio of two things measured in the same round, one after the other, on one thread; of all rounds the
best of each side counts, because whatever disturbs a run makes it slower. CPU time of the process, so that
neighbours on the machine matter less.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from workers.cache import BlockCache
from workers.engine import BlockPool, Chunk, Drafter, Engine, Sampling, Sequence, Speculation
from workers.models import LoadedModel, ModelError, ModelSpec, load_model

TOKENS = 128
PROMPT = 50
CONCURRENT = 16


@dataclass(frozen=True)
class Figure:
    """One measured figure and what is asked of it."""

    name: str
    value: float
    unit: str
    asked: str
    ok: bool
    details: dict[str, float]


def best_cpu_s(rounds: int, *works: Callable[[], object]) -> list[float]:
    """The least CPU time of each work, all of them taking turns."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for index, work in enumerate(works):
            began = time.process_time()
            work()
            best[index] = min(best[index], time.process_time() - began)
    return best


def prompt(length: int) -> list[int]:
    """Printable noise for the byte model."""
    source = random.Random(length)
    return [source.randint(ord(" "), ord("~")) for _ in range(length)]


def oracle(loaded: LoadedModel) -> LlamaForCausalLM:
    """A transformers model of the same shape; its weights do not matter to its speed."""
    config = loaded.config
    shape = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(shape).eval()


def decode_ours(loaded: LoadedModel, concurrent: int, length: int = PROMPT, tokens: int = TOKENS) -> None:
    """Prefill and decode `concurrent` sequences side by side."""
    blocks = concurrent * -(-(length + tokens) // 16)
    engine = Engine(loaded, BlockPool(loaded.config, blocks, 16, loaded.spec.dtype))
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    sequences = [Sequence(str(n), prompt(length), length, sampling) for n in range(concurrent)]
    for sequence in sequences:
        engine.admit(sequence)
    while sequences[0].finish_reason is None:
        engine.step([Chunk(sequence, sequence.pending) for sequence in sequences])


@torch.inference_mode()
def decode_theirs(model: LlamaForCausalLM, length: int = PROMPT, tokens: int = TOKENS) -> None:
    """Prefill and decode one sequence with `generate`, as a user of transformers would."""
    model.generate(torch.tensor([prompt(length)]), max_new_tokens=tokens, do_sample=False)


def decoding(loaded: LoadedModel, rounds: int) -> tuple[float, float, dict[str, float]]:
    """(tokens/s of 16 side by side, tokens/s of one alone), both over transformers' one by one; and ms a token."""
    theirs_model = oracle(loaded)
    together, alone, theirs = best_cpu_s(
        rounds,
        lambda: decode_ours(loaded, CONCURRENT),
        lambda: decode_ours(loaded, 1),
        lambda: decode_theirs(theirs_model),
    )
    details = {
        "ms_per_token_of_16": 1e3 * together / CONCURRENT / TOKENS,
        "ms_per_token_alone": 1e3 * alone / TOKENS,
        "ms_per_token_transformers": 1e3 * theirs / TOKENS,
    }
    return CONCURRENT * theirs / together, theirs / alone, details


CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
    raise ValueError("unknown shape: " + shape.kind)
"""


def speculation(rounds: int) -> Figure | None:
    """SmolLM2 repeats a function that it is given, with and without guesses. None when it has not been fetched."""
    try:
        loaded = load_model(ModelSpec("smollm2-135m"))
    except ModelError:
        return None
    ask = "Repeat the following Python function exactly, character by character:\n" + CODE
    ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": ask}])
    pool = BlockPool(loaded.config, 64, 16)
    engine = Engine(loaded, pool)
    tokens = 80
    answers: dict[bool, list[int]] = {}
    counts: dict[str, float] = {}

    def start() -> Sequence:
        sequence = Sequence("repeat", list(ids), len(ids), Sampling(max_tokens=tokens, ignore_eos=True))
        engine.admit(sequence)
        engine.step([Chunk(sequence, sequence.pending)])
        return sequence

    prefilled = start()

    def decode(drafter: Drafter | None) -> None:
        """From the first token on: the prompt's KV is there."""
        sequence = Sequence("repeat", prefilled.tokens[: len(ids) + 1], len(ids), prefilled.sampling)
        sequence.blocks, sequence.computed = list(prefilled.blocks), len(ids)
        drafted = accepted = steps = 0
        while sequence.finish_reason is None:
            wanted = len(ids) + tokens - len(sequence.tokens) - 1
            draft = tuple(drafter.propose(sequence.tokens, wanted)) if drafter else ()
            gained = engine.step([Chunk(sequence, 1, draft)])
            steps += 1
            if drafter and draft:
                drafter.learn(len(draft), len(gained) - 1)
                drafted, accepted = drafted + len(draft), accepted + len(gained) - 1
        pool.release(sequence.blocks[len(prefilled.blocks) :])
        answers[drafter is not None] = sequence.tokens[len(ids) :]
        if drafter:
            counts.update(drafted=drafted, accepted=accepted, steps=steps, tokens=tokens)

    plain, guessing = best_cpu_s(rounds, lambda: decode(None), lambda: decode(Drafter(Speculation(3, 8))))
    same = answers[False] == answers[True]
    details = counts | {"ms_per_token": 1e3 * guessing / tokens, "ms_per_token_plain": 1e3 * plain / tokens}
    name = "SmolLM2 repeating a function, 8 guesses"
    return Figure(name, plain / guessing, "x without guesses", "> 1, same answer", same and plain > guessing, details)


def radix_match_s(rounds: int, tokens: int = 100_000) -> float:
    """The least time to hash a prompt of `tokens` tokens and find what the cache holds of it: all but its end."""
    config = load_model(ModelSpec("tiny")).config
    pool = BlockPool(config, tokens // 16 + 64, 16)
    cache = BlockCache(pool, "benchmark")
    chance = random.Random(1)
    ids = [chance.randrange(config.vocab) for _ in range(tokens)]
    lease, blocks, _ = cache.adopt(ids[:-100])
    cache.keep(lease, ids[:-100], blocks, last=True)
    cache.end(lease)
    pool.release(blocks)

    def match() -> None:
        held = cache.policy.match(cache.hashes(ids))
        assert held == (tokens - 100) // 16

    return best_cpu_s(rounds, match)[0]


def measure(rounds: int) -> list[Figure]:
    loaded = load_model(ModelSpec("tiny"))
    together, alone, details = decoding(loaded, rounds)
    match_ms = 1e3 * radix_match_s(5 * rounds)
    repeated = speculation(rounds)
    return [
        Figure(
            "16 sequences of tiny side by side", together, "x transformers one by one", ">= 4", together >= 4, details
        ),
        Figure("one sequence of tiny", alone, "x transformers", ">= 1", alone >= 1, details),
        Figure("radix match of 100,000 tokens", match_ms, "ms", "< 5", match_ms < 5, {}),
        *([repeated] if repeated else []),
    ]


def line(figure: Figure) -> str:
    details = ", ".join(f"{name} {value:.3g}" for name, value in figure.details.items())
    verdict = "ok  " if figure.ok else "MISS"
    return f"{verdict} {figure.name}: {figure.value:.3g} {figure.unit}  [asked {figure.asked}]  {details}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    harness.add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(arguments.rounds)
    lines = [line(figure) for figure in figures]
    print("\n".join(lines))
    harness.write(arguments.out, [asdict(figure) for figure in figures], lines)


if __name__ == "__main__":
    main()
