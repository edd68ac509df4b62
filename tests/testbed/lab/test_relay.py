"""A whole lab answers as one process would: P, RLD, MD and gateway in their own hosts, KV over the emulated WAN.

The control is `generate` in this process, on the same weights. Bytes are counted by the WAN link itself.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from testbed.topology.overlay import laid_over
from tests.conftest import ROOT, Lab, run_pddbed
from workers.engine import Sampling, generate
from workers.models import LoadedModel, ModelSpec, load_model

pytestmark = pytest.mark.root
LENGTHS = [1, 15, 16, 17, 500]


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(ModelSpec("tiny"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """`tiny`, over a WAN slow enough that the relay makes several tokens of every answer."""
    file = tmp_path_factory.mktemp("relay") / "slow.yaml"
    tiny = ROOT / "topologies" / "two-dc-tiny.yaml"
    file.write_text(laid_over(tiny, {"wan.wan0.rate": "20mbit", "wan.wan0.delay": "30ms"}))
    result = run_pddbed("up", str(file), "--name", "relay", "--api", "auto")
    assert result.returncode == 0, result.stderr
    yield Lab("relay")
    assert run_pddbed("down", "relay").returncode == 0


def complete(lab: Lab, prompt: list[int], tokens: int, **options: Any) -> dict[str, Any]:
    body = {"model": lab.status()["model"], "prompt": prompt, "max_tokens": tokens, "temperature": 0, **options}
    response = httpx.post(f"{lab.status()['api']}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()["pdd"]
    return answer


def prompt_of(length: int, vocabulary: int = 256) -> list[int]:
    return [(17 + 31 * number + number * number) % vocabulary for number in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_tiny_relayed_across_the_wan_answers_as_one_process_alone(lab: Lab, tiny: LoadedModel, length: int) -> None:
    prompt = prompt_of(length)
    tokens = 200 if length < 500 else 400  # enough for main decode to come in, also on an idle machine
    answer = complete(lab, prompt, tokens, ignore_eos=True)
    assert answer["token_ids"] == generate(tiny, prompt, Sampling(max_tokens=tokens, ignore_eos=True))
    made_by = answer["instances"]
    switch = made_by.index("md0")
    assert 1 <= switch < tokens
    assert made_by == ["rld0"] * switch + ["md0"] * (tokens - switch)


def test_only_token_ids_cross_the_wan_for_generated_tokens(lab: Lab, tiny: LoadedModel) -> None:
    """Counted by the link: an answer of 400 tokens more costs far less than the KV of a single block.

    And of a prompt that main decode knows, only the KV of its unfilled last block crosses.
    """

    def crossed() -> int:
        count: int = lab.status()["links"][0]["counters"]["forward"]["bytes"]
        return count

    def forward_bytes(first: int, tokens: int) -> int:
        before = after = crossed()
        complete(lab, [first, *prompt_of(299)], tokens, ignore_eos=True)
        while (now := crossed()) > after + 2000:  # KV may still cross when the answer has ended on the relay
            after = now
            time.sleep(0.5)
        return now - before

    forward_bytes(1, 10)  # whatever only the first request costs
    short, long, again = forward_bytes(2, 40), forward_bytes(3, 440), forward_bytes(3, 40)
    config = tiny.config
    bytes_per_token = config.layers * 2 * config.kv_heads * config.head_dim * 4
    assert short > 300 * bytes_per_token, "the prompt's KV crosses"
    acknowledgements = 52 * 400  # main decode streams its tokens back; TCP acknowledges each
    assert long - short < acknowledgements + 16 * bytes_per_token
    assert 300 % 16 * bytes_per_token < again < 16 * bytes_per_token + acknowledgements


def test_curl_streams_a_completion_from_the_machine(lab: Lab) -> None:
    url = lab.status()["api"] + "/v1/completions"
    body = json.dumps({"model": "tiny", "prompt": "What is a WAN?", "max_tokens": 12, "stream": True})
    command = ["curl", "-sN", "--max-time", "30", url, "-H", "content-type: application/json", "-d", body]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    *events, done = [line.removeprefix("data: ") for line in result.stdout.splitlines() if line]
    assert done == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events)
    assert sum(len(json.loads(event)["pdd"]["token_ids"]) for event in events) == 12


def test_the_unmodified_openai_client_streams_a_completion_and_a_chat(lab: Lab) -> None:
    client = openai.OpenAI(base_url=lab.status()["api"] + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    chunks = list(client.completions.create(model="tiny", prompt="Hello", max_tokens=10, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="Hello", max_tokens=1)


def test_a_dead_worker_shows_in_status_and_the_client_gets_its_answer_all_the_same(
    raise_lab: Callable[..., Lab],
) -> None:
    doomed = raise_lab("topologies/two-dc-tiny.yaml", "doomed", "--no-verify")
    before = doomed.status()
    pid = next(host["pid"] for host in before["hosts"] if host["name"] == "p0")
    assert doomed.exec("p0", "kill", "-9", str(pid)).returncode == 0
    loaded = load_model(ModelSpec("tiny"))
    prompt = prompt_of(20, loaded.config.vocab)
    answer = complete(doomed, prompt, 4, ignore_eos=True)
    assert answer["token_ids"] == generate(loaded, prompt, Sampling(max_tokens=4, ignore_eos=True))
    assert "p0" not in answer["instances"]
    states = {host["name"]: (host["state"], host["exit_status"]) for host in doomed.status()["hosts"]}
    assert states["p0"] == ("exited", -9)
    assert states["md0"] == ("ready", None)


@pytest.mark.nightly
def test_smollm2_relayed_across_the_wan_answers_as_one_process_alone(raise_lab: Callable[..., Lab]) -> None:
    assert run_pddbed("model", "get", "smollm2-135m", timeout_s=600).returncode == 0
    loaded = load_model(ModelSpec("smollm2-135m"))
    lab = raise_lab("topologies/two-dc.yaml", "smollm2")
    for length in LENGTHS:
        prompt = prompt_of(length, loaded.config.vocab)
        tokens = 12 if length < 500 else 40  # 23 MB of KV at 400 mbit: the relay has half a second and more
        answer = complete(lab, prompt, tokens, ignore_eos=True)
        assert answer["token_ids"] == generate(loaded, prompt, Sampling(max_tokens=tokens, ignore_eos=True)), length
        if length == 500:
            assert set(answer["instances"]) == {"rld0", "md0"}
