"""Workers as real processes, born of the fork server: curl, the openai client, and a process that dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.local import ClusterError, Layout, LocalCluster
from workers.models import LoadedModel


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(Layout(), tmp_path_factory.mktemp("cluster")) as running:
        yield running


def test_curl_streams_a_completion(tiny: LoadedModel, cluster: LocalCluster) -> None:
    curl = shutil.which("curl")
    assert curl is not None, "curl is not installed; apt-get install curl"
    expected = tiny.tokenizer.decode(generate(tiny, tiny.tokenizer.encode("Hello"), Sampling(max_tokens=20)))
    body = json.dumps({"prompt": "Hello", "max_tokens": 20, "temperature": 0, "stream": True})
    result = subprocess.run(
        [curl, "-sSN", f"{cluster.base_url}/v1/completions", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    lines = [line.removeprefix("data: ") for line in result.stdout.splitlines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == expected


def test_the_unmodified_openai_client_streams_and_completes(tiny: LoadedModel, cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.base_url}/v1", api_key="none", max_retries=0, timeout=30)
    messages = [{"role": "user", "content": "Hello"}]
    expected = tiny.tokenizer.decode(
        generate(tiny, tiny.tokenizer.apply_chat_template(messages), Sampling(max_tokens=20))
    )
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    whole = client.completions.create(model="tiny", prompt=prompt_of(33), max_tokens=5, temperature=0)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 33
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096"):
        client.completions.create(model="tiny", prompt="x" * 5000)


def test_the_processes_hold_nothing_after_their_answers(cluster: LocalCluster) -> None:
    free = {}
    for _ in range(100):
        metrics = httpx.get(f"{cluster.base_url}/metrics").text.splitlines()
        used = [float(line.split()[-1]) for line in metrics if 'state="used"' in line]
        free = {"used": used}
        if used == [0, 0, 0] and "pddbed_requests_running 0.0" in metrics:
            return
        time.sleep(0.05)
    pytest.fail(f"still in use: {free}")


def test_a_cluster_ends_its_processes_a_stopped_one_too(tmp_path: Path) -> None:
    with LocalCluster(Layout(), tmp_path) as cluster:
        os.kill(cluster.pids["md0"], signal.SIGSTOP)
        pids = list(cluster.pids.values())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_model_that_does_not_exist_is_one_sentence_and_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="nonesuch"):
        LocalCluster(Layout(model={"name": "nonesuch"}), tmp_path).__enter__()


def test_a_worker_started_alone_names_what_its_environment_lacks() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PDDBED_")}
    result = subprocess.run(
        [sys.executable, "-m", "workers"], env={**environment, "PDDBED_ROLE": "cook"}, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert 'PDDBED_ROLE is "cook"; it must be one of gateway, main' in result.stderr
    for name in ("PDDBED_HOST", "PDDBED_ADDRESS", "PDDBED_SECRET"):
        assert f"{name} is not set" in result.stderr
