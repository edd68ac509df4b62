"""SIGTERM to a gateway process: what runs ends as it would have, what is new is refused, then the process is gone."""

import json
import os
import signal
import time
from pathlib import Path

import httpx

from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.local import Layout, LocalCluster
from workers.models import LoadedModel

TOKENS = 700


def test_a_gateway_that_gets_sigterm_finishes_its_answer_and_exits(tiny: LoadedModel, tmp_path: Path) -> None:
    expected = generate(tiny, prompt_of(40), Sampling(max_tokens=TOKENS, ignore_eos=True))
    body = {"prompt": prompt_of(40), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    with LocalCluster(Layout(serving={"drain": 60 * 10**9}), tmp_path) as cluster:
        http = httpx.Client(base_url=cluster.base_url, timeout=60)
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            read = [next(lines)]
            os.kill(cluster.pids["gw0"], signal.SIGTERM)
            refused = None
            while refused is None or refused.status_code == 200:  # until the signal has arrived
                refused = httpx.post(f"{cluster.base_url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert httpx.get(f"{cluster.base_url}/health").json()["status"] == "draining"
            read += [line for line in lines if line]
        http.close()
        assert read.pop() == "data: [DONE]"
        ids = [token for line in read for token in json.loads(line[6:])["pdd"]["token_ids"]]
        assert ids == expected
        end = time.monotonic() + 20
        while Path(f"/proc/{cluster.pids['gw0']}").exists():
            assert time.monotonic() < end, "the process is gone soon after"
            time.sleep(0.02)
        assert "Traceback" not in cluster.log("gw0").read_text()
