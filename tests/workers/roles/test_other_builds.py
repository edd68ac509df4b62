"""A worker with another block size, model or protocol version is refused when it connects, and both values are named.

Every kind of difference is a real one: a worker made with other settings, other weights, or of another build.
"""

import asyncio
import json
import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.workers.serving import eventually, run
from workers.environment import read_environment
from workers.local import Layout, Plan
from workers.models import LoadedModel, ModelSpec, load_model
from workers.process import make
from workers.wire.frames import PROTOCOL_VERSION
from workers.wire.peers import Peers

HOSTS = (
    ("gw0", "gateway", "main"),
    ("p0", "prefill", "main"),
    ("rld0", "relay-decode", "main"),
    ("md0", "main-decode", "remote"),
)


def peers_of(host: Any) -> Peers:
    peers: Peers = host.dispatcher.peers if hasattr(host, "dispatcher") else host.peers
    return peers


async def logged(caplog: pytest.LogCaptureFixture, beginning: str, sentence: str) -> None:
    def said() -> bool:
        messages = [record.getMessage() for record in caplog.records]
        return any(message.startswith(beginning) and sentence in message for message in messages)

    await eventually(said, 10, f"a log says {beginning}{sentence}")


async def refused(
    tmp_path: Path,
    ours: LoadedModel,
    theirs: LoadedModel,
    expected: str,
    caplog: pytest.LogCaptureFixture,
    **extra: str,
) -> None:
    """md0 differs: nobody connects to it, everybody else connects, and the sentence is `expected` on both sides."""
    plan = Plan(Layout(hosts=HOSTS, extra={"md0": extra}), tmp_path, ("127.0.0.1", 0))
    hosts = {
        name: make(read_environment(plan.environment(name)), theirs if name == "md0" else ours) for name, _, _ in HOSTS
    }
    for name in ("md0", "rld0", "p0"):
        await hosts[name].start(plan.sockets[name])
    gateway: Any = hosts["gw0"]
    await gateway.dispatcher.start()
    try:
        for name in ("gw0", "p0", "rld0"):
            peers = peers_of(hosts[name])
            await eventually(partial(operator.contains, peers._errors, "md0"), 10, f"{name} has tried md0")
            assert expected in peers._errors["md0"].replace(f" on {name}", " on X"), peers._errors["md0"]
            assert "md0" not in peers.connected()
        pool = peers_of(hosts["p0"]).pools["md0"]
        await eventually(lambda: expected in pool._error.replace(" on p0", " on X"), 10, "KV connections as well")
        assert pool.up == 0
        assert peers_of(hosts["md0"])._links == {}
        for name in ("gw0", "p0"):
            links = peers_of(hosts[name])._links
            await eventually(partial(operator.contains, links, "rld0"), 10, f"{name} knows the others")
        for name in ("gw0", "p0", "rld0"):
            await logged(caplog, f"refused a connection: {name} refused this worker: ", expected.replace("X", name))
    finally:
        for host in hosts.values():
            await host.close()
        plan.sockets["gw0"].close()


@pytest.mark.parametrize(
    ("spec", "serving", "expected"),
    [
        (ModelSpec("tiny"), {"block_size": 32}, "block size is 16 on X and 32 on md0"),
        (ModelSpec("tiny", seed=1), {}, "model fingerprint is {ours} on X and {theirs} on md0"),
        (ModelSpec("tiny", dtype="bfloat16"), {}, "KV dtype is float32 on X and bfloat16 on md0"),
        (ModelSpec("tiny-mla"), {}, "model is tiny on X and tiny-mla on md0"),
    ],
    ids=["block size", "weights", "dtype", "model"],
)
def test_a_worker_of_other_settings_is_refused_by_everyone(
    tiny: LoadedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spec: ModelSpec,
    serving: dict[str, Any],
    expected: str,
) -> None:
    theirs = load_model(spec)
    sentence = expected.format(ours=tiny.fingerprint, theirs=theirs.fingerprint)
    caplog.set_level("INFO")
    extra = {"PDDBED_SERVING": json.dumps(serving)}
    run(refused(tmp_path, tiny, theirs, sentence, caplog, **extra))


@contextmanager
def other_build(plan: Plan, name: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process whose build speaks another version of the protocol."""
    code = (
        "import sys; from workers.wire import frames; frames.PROTOCOL_VERSION = 9\n"
        "from workers.environment import read_environment; from workers.models import load_model\n"
        "from workers.process import run\n"
        "environment = read_environment(); sys.exit(run(environment, load_model(environment.model)))"
    )
    listener = plan.sockets[name]
    environment = {**os.environ, **plan.environment(name), "PDDBED_LISTEN_FD": str(listener.fileno())}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, pass_fds=[listener.fileno()], stderr=output, stdout=output
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def test_a_worker_of_another_protocol_version_is_refused_and_both_logs_name_both_versions(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    async def test() -> None:
        plan = Plan(Layout(hosts=HOSTS), tmp_path, ("127.0.0.1", 0))
        p0 = make(read_environment(plan.environment("p0")), tiny)
        peers, log = peers_of(p0), tmp_path / "md0.log"
        with other_build(plan, "md0", log):
            await p0.start(plan.sockets["p0"])
            try:
                ours = f"peer speaks wire protocol 9, this worker {PROTOCOL_VERSION}; run the same pddbed on both"
                theirs = f"peer speaks wire protocol {PROTOCOL_VERSION}, this worker 9; run the same pddbed on both"
                await eventually(lambda: ours in peers._errors.get("md0", ""), 40, "p0 names both")
                assert peers._errors["md0"].startswith("handshake with md0 at 127.0.0.1:")
                await eventually(lambda: theirs in log.read_text(), 10, "and so does md0")
                assert "md0" not in peers.connected()
            finally:
                await p0.close()
        await asyncio.sleep(0)

    run(test())
