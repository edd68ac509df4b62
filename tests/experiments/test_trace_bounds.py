"""Trace files that ask for memory or time, or hold what no trace has: refused in a sentence, soon."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.traces import read_trace
from experiments.traces.stats import stats
from tests.conftest import ROOT, run_pddbed

MOST_S, MOST_MB = 2.0, 300.0

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,1\n"
GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
FIELDS = {
    "timestamp": '"timestamp" is',
    "input_length": '"input_length" is',
    "output_length": '"output_length" is',
    "hash_ids": '"hash_ids" is',
    "session": '"session" is',
    "turn": '"turn" is',
}
VALUES = {  # JSON text that no field takes
    "negative": "-5",
    "not a number": "NaN",
    "infinite": "Infinity",
    "1e308": "1e308",
    "a string": '"10"',
    "a long string": '"' + "9" * 100_000 + '"',
    "true": "true",
    "an object": '{"a": {"b": {}}}',
    "nested lists": "[" * 400 + "]" * 400,
    "a list of lists": "[" + "[]," * 100_000 + "[]]",
    "eight billion million": str(8_589_934_592 * 10**6),
}


def jsonl(*rows: str) -> bytes:
    return "".join(row + "\n" for row in rows).encode()


def with_field(row: dict[str, Any], key: str, text: str) -> str:
    rest = json.dumps({name: value for name, value in row.items() if name != key})
    return f'{rest[:-1]}, "{key}": {text}}}'


def conversation(**changes: str) -> bytes:
    """An agentic conversation whose fields are JSON text."""
    request = {"t": "1.5", "in": "130", "out": "3", "hash_ids": "[1, 2, 3]"}
    request |= {key: text for key, text in changes.items() if key in request}
    whole = {"block_size": "64", "hash_id_scope": '"local"', "requests": f"[{_object(request)}]"}
    return _object(whole | {key: text for key, text in changes.items() if key in whole}).encode()


def _object(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}"


def wrong_files() -> Iterator[tuple[str, str, bytes, str]]:
    """(mistake, file name, content, what the message has behind the file's name)."""
    good = json.dumps(GOOD)
    for value, text in VALUES.items():
        for key, said in FIELDS.items():
            if key == "hash_ids" and value in ("nested lists", "a list of lists"):
                said = '"hash_ids" has [], ' if value == "a list of lists" else '"hash_ids" has [['
                said = said.removesuffix(", ")
            yield f"{key}: {value}", "t.jsonl", jsonl(good, with_field(GOOD, key, text)), f":2: {said}"
        for key in ("t", "in", "out", "hash_ids", "block_size", "hash_id_scope", "requests"):
            if value == "a list of lists" and key == "hash_ids":
                yield (
                    f"agentic {key}: {value}",
                    "t.json",
                    conversation(**{key: text}),
                    ': requests[0]: "hash_ids" has []',
                )
            else:
                yield f"agentic {key}: {value}", "t.json", conversation(**{key: text}), ": "
    for value in ("1.5", "-1", str(1 << 64), "10" * 200, "null", '"7"', "[1]", "true", "1e400"):
        row = with_field(GOOD, "hash_ids", f"[1, {value}]")
        yield f"an id of {value[:20]}", "t.jsonl", jsonl(good, row), ':2: "hash_ids" has '
    digits = "9" * 5000
    yield (
        "5,000 digits",
        "t.jsonl",
        jsonl(good, with_field(GOOD, "input_length", digits)),
        ":2: a number of 5000 digits",
    )
    yield "5,000 digits, agentic", "t.json", conversation(**{"in": digits}), ": a number of 5000 digits"
    for tokens in ("8589934592", "1099511627776", "100000000", digits, "-1", "1e3", "NaN", "٣" * 30):
        for row, column in ((f"{tokens},1", "ContextTokens"), (f"1,{tokens}", "GeneratedTokens")):
            yield (
                f"{column} {tokens[:12]}",
                "t.csv",
                f"{AZURE}2023-11-16 18:15:46,{row}\n".encode(),
                f":3: {column} is '",
            )
    for stamp in ("9999-12-31 23:59:59", "0001-01-01 00:00:00", "1e308", "-1", "2023-11-16 18:15:46.1234567890"):
        yield f"the time {stamp}", "t.csv", f"{AZURE}{stamp},1,1\n".encode(), f":3: TIMESTAMP is '{stamp}'"
    yield "a cell of a megabyte", "t.csv", f"{AZURE}{'x' * 1_000_000},1,1\n".encode(), ":3: not CSV"
    yield "an open quote", "t.csv", f'{AZURE}"2023-11-16 18:15:46,1,1\n'.encode(), ":3: 1 columns instead of 3"
    yield "a line without end", "t.jsonl", b"[" * (9 << 20), ":1: a line longer than 8 MiB"
    yield "zeros without end", "t.csv", b"\0" * (9 << 20), ":1: a line longer than 8 MiB"
    yield "a conversation of lists", "t.json", b"[" + b"[]," * (3 << 20), ": a conversation of more than 8 MiB"
    yield "a line of lists", "t.jsonl", jsonl(good, "[" + "[]," * 2_700_000 + "[]]"), ":2: a JSON list where"
    yield "nothing but blank lines", "t.jsonl", b"\r\n \n\n" * 10_000, ": holds no request"
    for name in ("t.jsonl", "t.csv", "t.json", "t.jsonl.gz"):
        yield f"an empty {name}", name, b"" if not name.endswith("gz") else gzip.compress(b""), ":"
    yield "a bomb of lines", "t.jsonl.gz", gzip.compress(b"\n" * (200 << 20), 9), ": unpacks to more than 100 times"
    yield "a bomb of zeros", "t.jsonl.gz", gzip.compress(b"\0" * (64 << 20)), ":"
    yield "a bomb of requests", "t.jsonl.gz", gzip.compress(jsonl(good) * 2_000_000), ": unpacks to more than 100 times"
    packed = gzip.compress(b"".join(jsonl(with_field(GOOD, "timestamp", str(at))) for at in range(3000)))
    yield "cut short", "t.jsonl.gz", packed[:-500], "the compressed file is truncated or damaged; fetch it again"
    yield "a wrong checksum", "t.jsonl.gz", packed[:-8] + b"\0" * 8, "damaged; fetch it again"
    yield "something behind it", "t.jsonl.gz", packed + b"more", "the compressed file is damaged; fetch it again"


# a program of its own, so that its memory can be read
READER = """
import json, sys, time
from pathlib import Path
from experiments.traces import TraceError
from experiments.traces import read_trace
for name in sys.stdin.read().splitlines():
    began = time.process_time()
    try:
        said = f"read: {len(read_trace(Path(name)).requests)}"
    except TraceError as error:
        said = str(error)
    except BaseException as error:
        said = f"TRACEBACK {error!r:.200}"
    taken = time.process_time() - began
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(json.dumps([name, said, taken, int(status["VmHWM"].split()[0]) / 1024]))
"""


def test_what_no_trace_holds_is_refused_soon_and_in_one_sentence(tmp_path: Path) -> None:
    wanted: dict[str, tuple[str, str]] = {}
    for number, (mistake, name, content, said) in enumerate(wrong_files()):
        file = tmp_path / str(number) / name
        file.parent.mkdir()
        file.write_bytes(content)
        wanted[str(file)] = mistake, said
    reader = [sys.executable, "-c", READER]
    found = subprocess.run(reader, input="\n".join(wanted), capture_output=True, text=True, cwd=ROOT, check=True)
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(rows) == len(wanted) > 150
    for name, message, seconds, peak_mb in rows:
        mistake, said = wanted[name]
        assert message.startswith(name), f"{mistake}: {message}"
        assert said in message[len(name) :], f"{mistake}: {message}"
        assert len(message) < len(name) + 250, mistake
        assert "\n" not in message, mistake
        assert seconds < MOST_S, f"{mistake} took {seconds:.1f} s of CPU"
        assert peak_mb < MOST_MB, f"{mistake} took {peak_mb:.0f} MB"


@pytest.mark.parametrize("form", ["mooncake", "agentic", "azure"])
@pytest.mark.parametrize("change", ["a byte order mark", "line ends of Windows", "both"])
def test_marks_and_line_ends_of_other_systems_change_nothing(tmp_path: Path, form: str, change: str) -> None:
    name, content = {
        "mooncake": ("t.jsonl", jsonl(json.dumps(GOOD), json.dumps(GOOD))),
        "agentic": ("t.json", conversation().replace(b", ", b",\n")),
        "azure": ("t.csv", AZURE.encode()),
    }[form]
    (tmp_path / name).write_bytes(content)
    plain = read_trace(tmp_path / name)
    if change != "a byte order mark":
        content = content.replace(b"\n", b"\r\n")
    if change != "line ends of Windows":
        content = b"\xef\xbb\xbf" + content
    (tmp_path / name).write_bytes(content)
    assert read_trace(tmp_path / name).sha256 == plain.sha256


def test_a_prompt_as_long_as_one_may_be_costs_no_memory_where_nobody_shares_it(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46,16777216,1\n" * 3
    (tmp_path / "t.csv").write_text(AZURE + rows)
    assert stats(read_trace(tmp_path / "t.csv")).weighted_hit == 0


@pytest.mark.parametrize("path", ["x" * 300 + ".jsonl", "a.jsonl/b.jsonl", "nul\0.jsonl"])
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, path: str) -> None:
    from experiments.traces import TraceError

    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(TraceError):
        read_trace(tmp_path / path)


@pytest.mark.parametrize("make", [lambda at: 5 - at, lambda at: at % 2])
def test_requests_that_do_not_stand_in_the_order_of_time_are_sorted_and_told(
    tmp_path: Path, make: Callable[[int], int]
) -> None:
    rows = [with_field(GOOD, "timestamp", str(make(at))) for at in range(5)]
    (tmp_path / "t.jsonl").write_bytes(jsonl(*rows))
    found = read_trace(tmp_path / "t.jsonl")
    assert [r.time_ns for r in found.requests] == sorted(make(at) * 10**6 for at in range(5))
    (note,) = found.notes
    assert note.startswith("Out of the order of time in the file, and sorted: ")
    result = run_pddbed("trace", "stats", str(tmp_path / "t.jsonl"))
    assert "Out of the order of time" in result.stdout
