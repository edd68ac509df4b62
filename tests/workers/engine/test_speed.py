"""Decoding is no slower than transformers' on a model of the same shape. CPU time, so that neighbours
matter less.
"""

import time
from collections.abc import Callable

import torch
from transformers import LlamaForCausalLM

from tests.workers.engine.drive import prompt
from tests.workers.models.oracle import llama_shape
from workers.engine import Sampling, generate
from workers.models import LoadedModel

TOKENS = 150


def least_cpu_s(work: Callable[[], object]) -> float:
    """The least of three: whatever disturbs a run makes it slower, never faster."""
    times = []
    for _ in range(3):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def test_a_single_sequence_of_tiny_decodes_no_slower_than_in_transformers(tiny: LoadedModel) -> None:
    config = tiny.config
    shape = llama_shape(
        config,
        head_dim=config.head_dim,
        eos_token_id=None,
        pad_token_id=0,
    )
    oracle = LlamaForCausalLM(shape).eval()
    ids = prompt(tiny, 50)

    @torch.inference_mode()
    def theirs() -> None:
        oracle.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)

    def ours() -> None:
        generate(tiny, ids, Sampling(max_tokens=TOKENS, ignore_eos=True))

    assert least_cpu_s(ours) <= least_cpu_s(theirs)  # measured idle: 0.76 ms against 1.42 ms a token
