"""The same workers on CUDA, in a few minutes at most: `make gpu-test`, or `python -m tests.gpu.run`.

Needs PyTorch with CUDA and pddbed's Python dependencies; with root and Mininet a lab is raised as well. Checks that the
device computes what the CPU does, that batches and hand-overs change no answer, and times the copies between host and
device with device events. Where there is no CUDA it says so in one sentence and ends with status 0; 1 means that a
check failed.
"""

import importlib.util
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEVICE = "cuda"
LENGTHS = (1, 16, 17, 100, 500, 1000)
ANSWER = 64
COPY_BYTES = 256 << 20


@dataclass
class Report:
    """What was checked, as lines; `failed` counts those that are wrong."""

    failed: int = 0
    lines: list[str] = field(default_factory=list)

    def check(self, what: str, ok: bool, found: str = "") -> None:
        self.failed += not ok
        self.say(f"{'ok  ' if ok else 'FAIL'} {what}{': ' + found if found else ''}")

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)


def prompt(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randint(ord(" "), ord("~")) for _ in range(length)]


def check_model(report: Report, name: str) -> None:
    """Logits against the CPU's, and sixteen side by side against each alone."""
    import torch

    from workers.engine import BlockPool, Chunk, Engine, Sampling, Sequence, generate
    from workers.engine.paged import PagedAttention, Segment
    from workers.models import ModelSpec, load_model

    host, device = load_model(ModelSpec(name)), load_model(ModelSpec(name, device=DEVICE))
    ids = prompt(300)
    logits = []
    for loaded in (host, device):
        pool = BlockPool(loaded.config, 20, device=loaded.spec.device)
        where = pool.storage.device
        with torch.inference_mode():
            attention = PagedAttention(loaded.config, pool, [Segment(0, 300, range(20))])
            positions = torch.arange(300, device=where)
            logits.append(loaded.model(torch.tensor(ids, device=where), positions, None, attention).cpu())
    difference = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    report.check(
        f"{name}: logits of 300 tokens as on the CPU", difference < 1e-3, f"relative difference {difference:.1e}"
    )

    sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
    lengths = [1 + 19 * n for n in range(16)]
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(ModelSpec(name, device=DEVICE, dtype=dtype))
        pool = BlockPool(loaded.config, 16 * 24, dtype=dtype, device=DEVICE)
        engine = Engine(loaded, pool)
        sequences = [Sequence(str(n), prompt(n), n, sampling) for n in lengths]
        for sequence in sequences:
            engine.admit(sequence)
            engine.step([Chunk(sequence, sequence.pending)])
        began = time.perf_counter()
        while running := [s for s in sequences if s.finish_reason is None]:
            engine.step([Chunk(s, 1) for s in running])
        rate = 16 * (ANSWER - 1) / (time.perf_counter() - began)
        if dtype == "float32":
            same = sum(s.tokens[s.prompt_len :] == generate(loaded, prompt(s.prompt_len), sampling) for s in sequences)
            report.check(f"{name}, {dtype}: sixteen side by side answer as each alone", same == 16, f"{same} of 16")
        report.say(f"     {name}, {dtype}: {rate:.0f} tokens/s, sixteen side by side")


def time_copies(report: Report) -> None:
    """Page-locked copies of blocks both ways, by the device's clock; and that they bring the bytes."""
    import torch

    from workers.engine import BlockPool
    from workers.models.load import TINY

    pool = BlockPool.for_budget(TINY, COPY_BYTES, device=DEVICE)
    assert pool.stage is not None
    pool.storage.normal_()
    torch.cuda.synchronize()
    expected = pool.storage.cpu()
    everything = range(pool.num_blocks)
    for _ in range(3):
        fetched_ns = pool.stage.fetch(everything)
    pool.storage.zero_()
    torch.cuda.synchronize()
    stored_ns = pool.store(everything)
    report.check("copies bring every byte", bool(torch.equal(pool.storage.cpu(), expected)))
    size = pool.num_blocks * pool.block_size * pool.bytes_per_token
    report.say(
        f"     {size >> 20} MiB in one run: device to host {size / fetched_ns:.1f} GB/s, "
        f"host to device {size / stored_ns:.1f} GB/s"
    )
    before = pool.stage.fetched.ns
    blocks = min(1000, pool.num_blocks)
    for block in range(blocks):
        pool.view(block, 16)
    each_us = (pool.stage.fetched.ns - before) / 1e3 / blocks
    report.say(f"     a block of {16 * pool.bytes_per_token >> 10} KiB alone: {each_us:.1f} us on the device")


def check_relay(report: Report, serving: dict[str, Any], directory: Path) -> None:
    """Real worker processes over loopback: P, RLD and MD on the device, answers as from one process."""
    import httpx

    from workers.engine import Sampling, generate
    from workers.local import Layout, LocalCluster
    from workers.models import ModelSpec, load_model

    loaded = load_model(ModelSpec("tiny", device=DEVICE))
    layout = Layout(model={"name": "tiny", "device": DEVICE}, serving=serving)
    name = ", ".join(f"{key} {value}" for key, value in serving.items())
    began = time.monotonic()
    copied_ms, same, relayed = 0.0, 0, 0
    with LocalCluster(layout, directory) as cluster:
        started_s = time.monotonic() - began
        for length in LENGTHS:
            body = {"prompt": prompt(length), "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60)
            if answer.status_code != 200:
                report.check(f"relay, {name}", False, answer.text)
                return
            pdd = answer.json()["pdd"]
            expected = generate(loaded, prompt(length), Sampling(max_tokens=ANSWER, ignore_eos=True))
            same += pdd["token_ids"] == expected
            relayed += "rld0" in pdd["instances"] and "md0" in pdd["instances"]
            copies = [span for span in pdd["record"]["pdd_spans"] if span["name"] == "host-copy"]
            copied_ms += sum(span["end_ns"] - span["start_ns"] for span in copies) / 1e6
    what = f"relay, {name}: answers as from one process"
    report.check(what, same == len(LENGTHS), f"{same} of {len(LENGTHS)}, {relayed} of them by relay and main decode")
    report.say(
        f"     up in {started_s:.1f} s; host to device {copied_ms:.2f} ms for {len(LENGTHS)} prompts, both decodes"
    )


def check_lab(report: Report, directory: Path) -> None:
    """A lab whose main decode computes on the device and the others on the CPU, where this user may raise one."""
    import os
    import shutil
    import subprocess

    if os.geteuid() != 0 or shutil.which("mnexec") is None or importlib.util.find_spec("mininet") is None:
        report.say("     no lab: that needs root and Mininet")
        return
    from testbed.topology.overlay import laid_over

    file, name = directory / "gpu.yaml", f"gpu-{os.getpid()}"
    tiny = Path(__file__).parents[2] / "topologies" / "two-dc-tiny.yaml"
    file.write_text(laid_over(tiny, {"datacenters.remote.hosts.md0.device": DEVICE}))

    def pddbed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "testbed", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    up = pddbed("up", str(file), "--name", name, "--api", "auto")
    try:
        if up.returncode:
            report.check("a lab with main decode on the device", False, up.stderr.strip())
            return
        text = "A lab whose main decode computes on an accelerator, asked something long enough to be handed over."
        answer = pddbed("ask", "--lab", name, "--max-tokens", "200", "--json", text)
        told = json.loads(answer.stdout) if answer.returncode == 0 else {}
        by = set(told.get("tokens", ()))
        report.check("a lab with main decode on the device", by == {"rld0", "md0"}, answer.stderr.strip() or str(by))
    finally:
        pddbed("down", name)


def main() -> int:
    try:
        import torch
    except ImportError:
        print(f"gpu-test skipped: {sys.executable} has no PyTorch; set PYTHON to an interpreter that has it with CUDA")
        return 0
    if not torch.cuda.is_available():
        print(f"gpu-test skipped: PyTorch {torch.__version__} finds no CUDA device on this machine")
        return 0
    try:
        import workers.local  # noqa: F401
    except ImportError as error:
        print(
            f"gpu-test: {error}; run: {sys.executable} -m pip install -e . --no-deps, and what it names",
            file=sys.stderr,
        )
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    report = Report()
    began = time.monotonic()
    report.say(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    for name in ("tiny", "tiny-mla"):
        check_model(report, name)
    time_copies(report)
    with tempfile.TemporaryDirectory(prefix="pddbed-gpu-") as directory:
        for number, serving in enumerate(({"handoff": "one-shot"}, {"handoff": "kv", "kv_send": "chunked"})):
            check_relay(report, serving, Path(directory) / str(number))
        check_lab(report, Path(directory))
    report.say(f"{report.failed} failed, {time.monotonic() - began:.0f} s")
    if "--json" in sys.argv:
        print(json.dumps({"failed": report.failed, "lines": report.lines}))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
