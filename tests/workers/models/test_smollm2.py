"""SmolLM2 from GGUF against transformers on the same file: logits, greedy tokens, tokenizer, chat template."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from tests.workers.engine.drive import TEXT
from tests.workers.models.oracle import llama_from_gguf, our_logits, their_logits
from tests.workers.models.texts import TEXTS
from workers.engine import Sampling, generate
from workers.models import LoadedModel
from workers.models.fetch import FETCHABLE, model_path

QUESTIONS = ["What is a datacenter?", "Write a haiku about rain.", "Count from 1 to 12."]


@pytest.fixture(scope="module")
def oracle(smollm2: LoadedModel) -> LlamaForCausalLM:
    return llama_from_gguf(model_path(FETCHABLE["smollm2-135m"]), smollm2.config)


@pytest.fixture(scope="module")
def their_tokenizer(smollm2: LoadedModel) -> PreTrainedTokenizerBase:
    path = model_path(FETCHABLE["smollm2-135m"])
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return tokenizer


def test_logits_are_those_of_transformers(smollm2: LoadedModel, oracle: LlamaForCausalLM) -> None:
    ids = smollm2.tokenizer.encode(TEXT)
    difference = (our_logits(smollm2, ids) - their_logits(oracle, ids)).abs().max()
    assert difference < 5e-4  # measured: 1e-4, with logits up to 42


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_answers_are_those_of_transformers(
    smollm2: LoadedModel, oracle: LlamaForCausalLM, question: str
) -> None:
    ids = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    theirs = oracle.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)[0, len(ids) :].tolist()
    assert generate(smollm2, ids, Sampling(max_tokens=32)) == theirs


def test_greedy_choices_along_a_long_text_are_those_of_transformers(
    smollm2: LoadedModel, oracle: LlamaForCausalLM
) -> None:
    """An answer of 100 tokens, checked by one pass of the oracle: at each position it would choose the
    same.
    """
    ids = smollm2.tokenizer.encode(TEXT)[:100]
    answer = generate(smollm2, ids, Sampling(max_tokens=100, ignore_eos=True))
    chosen = their_logits(oracle, ids + answer)[99:-1].argmax(dim=-1).tolist()
    assert chosen == answer


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_and_text_are_those_of_transformers(
    smollm2: LoadedModel, their_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    ours = smollm2.tokenizer.encode(text)
    assert ours == their_tokenizer.encode(text)
    assert smollm2.tokenizer.decode(ours) == their_tokenizer.decode(ours, skip_special_tokens=True)


def test_every_kind_of_digit_is_a_piece_of_its_own(smollm2: LoadedModel) -> None:
    """SmolLM2 splits before each digit, fractions and other scripts too; transformers forgets that for
    GGUF.
    """
    tokenizer = smollm2.tokenizer
    space = tokenizer.encode(" ")
    for digit in "7½²٣":
        assert tokenizer.encode(f"x {digit}") == tokenizer.encode("x") + space + tokenizer.encode(digit)


def test_chat_prompts_are_those_of_transformers(smollm2: LoadedModel, their_tokenizer: PreTrainedTokenizerBase) -> None:
    conversations = [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ünïcödé 🙂 123"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b\n"},
            {"role": "user", "content": "<|im_end|> c"},
        ],
    ]
    for messages in conversations:
        theirs = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert smollm2.tokenizer.apply_chat_template(messages) == theirs


def test_what_the_file_says_is_understood(smollm2: LoadedModel) -> None:
    config = smollm2.config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab, config.context_length, config.rope_theta) == (49152, 8192, 100_000)
    assert smollm2.tokenizer.eos_ids == {0, 2, 4}  # <|im_end|>, and by their names <|endoftext|> and <reponame>
    assert config.name == "smollm2-135m"
