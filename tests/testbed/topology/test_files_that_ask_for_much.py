"""Topology files that ask for memory, depth or time: refused in one sentence, under 2 s of one CPU and 300 MB."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.topology import TopologyErrors, load_plan
from testbed.topology.files import MAX_BYTES
from tests.conftest import ROOT

ROOM = MAX_BYTES - 100
TWO = "datacenters: {a: {subnet: 10.1.0.0/24}, b: {subnet: 10.2.0.0/24}}\n"
HOSTS = "datacenters:\n  main:\n    subnet: 10.0.0.0/8\n    hosts:\n"


def bomb() -> str:
    levels = [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)]
    return "a0: &a0 [x, x, x, x, x]\n" + "".join(levels)


FILES = {
    "brackets": "a: " + "[" * ROOM,
    "braces": "{" * ROOM,
    "dashes": "- " * (ROOM // 2),
    "a long list": "a:\n" + "- 1\n" * (ROOM // 4 - 1),
    "a long flow list": "a: [" + "1," * (ROOM // 2 - 5) + "]",
    "an alias bomb": bomb(),
    "many aliases": "a: &a 1\nb: [" + "*a," * (ROOM // 3 - 9) + "]",
    "many anchors": "".join(f"a{n}: &a{n} 1\n" for n in range(11_000)),
    "merges of a large mapping": "a: &a {"
    + ",".join(f"k{n}: 1" for n in range(3000))
    + "}\n"
    + "".join(f"b{n}: {{<<: *a}}\n" for n in range(9_000)),
    "one key again and again": "a: 1\n" * (ROOM // 5),
    "many unknown keys": "".join(f"k{n}: 1\n" for n in range(20_000)),
    "a long number": "seed: " + "9" * (ROOM - 10),
    "many hosts": HOSTS + "".join(f"      h{n}: {{}}\n" for n in range(11_000)),
    "many wrong hosts": HOSTS + "".join(f"      h{n}: x\n" for n in range(11_000)),
    "many datacenters": "datacenters:\n" + "".join(f"  d{n}: {{subnet: 10.0.0.0/24}}\n" for n in range(7_000)),
    "many links": TWO + "wan:\n" + "- {between: [a, b], delay: 1ms}\n" * 7_000,
    "many changes": TWO + "wan: [{between: [a, b], delay: 1ms}]\ncongestion:\n" + "- step: {at: 1s}\n" * 12_000,
    "changes without end": TWO
    + "wan: [{between: [a, b], delay: 1ms}]\ncongestion:\n"
    + "- step: {at: 1s, delay: 2ms, repeat: {every: 1s, times: 10000}}\n" * 2_900,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("much")
    for name, text in FILES.items():
        assert len(text) <= MAX_BYTES, name
        (directory / f"{name}.yaml").write_text(text)
    return directory


@pytest.mark.quiet
def test_each_is_refused_within_two_seconds(folder: Path) -> None:
    took = {}
    for file in sorted(folder.iterdir()):
        began = time.process_time()
        with pytest.raises(TopologyErrors) as caught:
            load_plan(file)
        took[file.stem] = time.process_time() - began
        assert all(str(problem).startswith(str(file)) for problem in caught.value.problems)
        assert len(str(caught.value).splitlines()) <= 101, file
    assert max(took.values()) < 2, took


def test_all_of_them_fit_into_300_mb_and_are_said_in_few_lines(folder: Path) -> None:
    # not ru_maxrss, which a parent of many megabytes hands down through fork and exec
    code = "from pathlib import Path; from testbed.cli import main\n"
    code += "try: main(prog_name='pddbed')\nfinally: print(Path('/proc/self/status').read_text())"
    program = [sys.executable, "-c", code, "validate", *map(str, sorted(folder.iterdir()))]
    limit = (2 << 30, 2 << 30)  # what runs away ends in MemoryError instead of taking the machine along
    done = subprocess.run(
        program,
        capture_output=True,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    assert "Traceback" not in done.stderr
    assert int(done.stdout.partition("VmHWM:")[2].split()[0]) < 300 * 1024, done.stdout  # KiB
    assert len(done.stderr.splitlines()) < 310 * len(FILES)
