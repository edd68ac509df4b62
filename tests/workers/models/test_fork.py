"""Weights are loaded once and shared by forked workers, whose thread pools start after the fork."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from workers.models import LoadedModel

SCRIPT = textwrap.dedent(
    """
    import json, os, signal, sys, time
    import torch
    from workers.models import ModelSpec, load_model

    loaded = load_model(ModelSpec(sys.argv[1]))
    ids = list(range(40, 104))
    weight_bytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())

    def report(threads):
        from workers.engine import Sampling, generate
        torch.set_num_threads(threads)
        began_threads = len(os.listdir("/proc/self/task"))
        answer = generate(loaded, ids, Sampling(max_tokens=4, ignore_eos=True))
        memory = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
        return {
            "answer": answer,
            "threads started": len(os.listdir("/proc/self/task")) - began_threads,
            "private bytes": int(memory["Private_Dirty:"]) * 1024,
            "weight bytes": weight_bytes,
        }

    reader, writer = os.pipe()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            signal.alarm(100)  # a pool that did not survive the fork waits for ever
            os.write(writer, (json.dumps(report(threads=2)) + chr(10)).encode())
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    os.close(writer)
    reports = [json.loads(line) for line in os.fdopen(reader).read().splitlines()]
    print(json.dumps({"statuses": statuses, "children": reports, "parent": report(threads=1)}))
    """
)


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_children_forked_after_loading_compute_with_two_threads_on_shared_weights(
    name: str, smollm2: LoadedModel
) -> None:
    # Waiting threads sleep instead of spinning: two workers with two threads each share two cores here.
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-c", SCRIPT, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["statuses"] == [0, 0], "a child hung or crashed"
    for child in result["children"]:
        assert child["answer"] == result["parent"]["answer"]
        assert child["threads started"] >= 1
        if name != "tiny":  # tiny's weights are small beside everything else that a process touches
            assert child["private bytes"] < child["weight bytes"] / 3
