"""Effect of eight-bit KV on the WAN on answers: the share of requests whose greedy answer differs from the control's.

    python -m benchmarks.kv_fp8 [--requests 40] [--tokens 32] [--models tiny,smollm2-135m] [--out results/kv-fp8.json]

Each prompt goes through a cluster on loopback in which main decode gets all of its KV from prefill in fp8
(`pipeline: cdc-pd`, `kv_pool: {wan_dtype: fp8}`) and through `generate`, one process alone. Prompts are pieces of this
project's own documentation. `tiny` has random weights, spread wide so that its answers depend on every block: the
hardest case there is. A trained model is the usual one.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import harness
from workers.engine import Sampling, generate
from workers.local import InProcessCluster, Layout
from workers.models import LoadedModel, ModelSpec, load_model

ROOT = Path(__file__).parent.parent
HOSTS = (("gw0", "gateway", "main"), ("p0", "prefill", "main"), ("md0", "main-decode", "remote"))
CHARACTERS = 600


def prompts_of(loaded: LoadedModel, count: int) -> list[list[int]]:
    """Pieces of text, as the model's tokens."""
    text = "".join((ROOT / "docs" / name).read_text() for name in ("decisions.md", "congestion.md", "capture.md"))
    step = max(1, (len(text) - CHARACTERS) // count)
    return [loaded.tokenizer.encode(text[index * step :][:CHARACTERS]) for index in range(count)]


async def through_fp8(loaded: LoadedModel, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Answers and records of main decode on eight-bit KV."""
    serving = {"pipeline": "cdc-pd", "kv_pool": {"wan_dtype": "fp8"}}
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(hosts=HOSTS, serving=serving, model={"name": loaded.spec.name}, kv_bytes=512 << 20)
        async with (
            InProcessCluster(loaded, layout, Path(folder)) as cluster,
            httpx.AsyncClient(base_url=cluster.base_url, timeout=300) as http,
        ):
            for prompt in prompts:
                body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
                response = await http.post("/v1/completions", json=body)
                response.raise_for_status()
                answers.append(response.json()["pdd"])
    return answers


def measure(name: str, requests: int, tokens: int) -> dict[str, Any]:
    loaded = load_model(ModelSpec(name))
    prompts = prompts_of(loaded, requests)
    control = [generate(loaded, prompt, Sampling(max_tokens=tokens, ignore_eos=True)) for prompt in prompts]
    answers = asyncio.run(through_fp8(loaded, prompts, tokens))
    assert all(answer["record"]["pdd_kv_dtype"] == "fp8" for answer in answers)
    assert all(answer["record"]["pdd_md_hit"] is not None for answer in answers)
    equal = [_common(answer["token_ids"], alone) for answer, alone in zip(answers, control, strict=True)]
    sent = sum(answer["record"]["pdd_delta_bytes"] for answer in answers)
    computed = sum(
        (1 - answer["record"]["pdd_md_hit"]) * len(prompt) for answer, prompt in zip(answers, prompts, strict=True)
    )
    whole = round(computed) * _bytes_per_token(loaded)
    return {
        "model": name,
        "requests": requests,
        "prompt_tokens": sum(map(len, prompts)),
        "tokens": tokens,
        "different": sum(count < tokens for count in equal),
        "equal_tokens": equal,
        "median_equal_tokens": statistics.median(equal),
        "bytes": sent,
        "share_of_bytes": sent / whole,
    }


def _common(one: list[int], other: list[int]) -> int:
    """Number of tokens at the beginning that are the same."""
    return next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(other))


def _bytes_per_token(loaded: LoadedModel) -> int:
    elements = 1
    for size in loaded.config.kv_shape:
        elements *= size
    return elements * 4


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_fp8", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--models", default="tiny,smollm2-135m")
    harness.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, options.requests, options.tokens) for name in options.models.split(",")]
    lines = [f"{'MODEL':<14}{'REQUESTS':>9}{'DIFFERENT':>11}{'EQUAL TOKENS':>24}{'BYTES OF FP32':>15}"]
    for row in rows:
        equal = f"median {row['median_equal_tokens']:g} of {row['tokens']}"
        share = f"{row['different'] / row['requests']:.0%}"
        lines.append(
            f"{row['model']:<14}{row['requests']:>9}{row['different']:>5} = {share:<4}{equal:>23}"
            f"{row['share_of_bytes']:>15.1%}"
        )
    print("\n".join(lines))
    harness.write(options.out, rows, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
