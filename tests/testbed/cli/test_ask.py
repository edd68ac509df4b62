"""`ask` against real processes: on a pipe, on a terminal, as JSON, and every way in which there is no answer."""

import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.engine import Sampling, generate
from workers.local import Layout, LocalCluster
from workers.models import LoadedModel

COMMAND = [sys.executable, "-c", "from testbed.cli.ask import ask_command; ask_command()"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalCluster(Layout(), tmp_path_factory.mktemp("ask")) as cluster:
        yield cluster.base_url


def ask(api: str, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [*COMMAND, "--api", api, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        env={**variables, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **environment},
    )


def expected_answer(tiny: LoadedModel, prompt: str, tokens: int) -> str:
    ids = tiny.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tiny.tokenizer.decode(generate(tiny, ids, Sampling(max_tokens=tokens)))


def test_on_a_pipe_the_hand_over_is_marked_by_name_and_nothing_is_coloured(tiny: LoadedModel, api: str) -> None:
    result = ask(api, "--max-tokens", "30", "Hello")
    assert (result.returncode, result.stderr) == (0, "")
    answer, _, rest = result.stdout.partition("\n\n")
    assert answer.startswith("«rld0»")
    assert answer.count("«md0»") == 1
    plain = answer.replace("«rld0»", "").replace("«md0»", "")
    assert plain == expected_answer(tiny, "Hello", 30)
    assert "\x1b" not in result.stdout
    assert "██ rld0 relay decode" in rest
    assert "██ md0 main decode" in rest
    for label in ("prefill p0", "fabric → rld0", "WAN → md0", "first token", "hand-over", "main md0", "end"):
        assert any(line.startswith(label) for line in rest.splitlines()), label
    assert max(map(len, rest.splitlines())) <= 80


def test_on_a_terminal_each_instance_has_its_colour(api: str) -> None:
    ours, theirs = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    process = subprocess.Popen(
        [*COMMAND, "--api", api, "--max-tokens", "20", "Hello"],
        stdout=theirs,
        stderr=theirs,
        stdin=subprocess.DEVNULL,
        env={**variables, "TERM": "xterm-256color", "COLUMNS": "80"},
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # the other end of a pseudo-terminal is gone
            break
        if not data:
            break
        output += data
    os.close(ours)
    assert process.wait(30) == 0
    text = output.decode()
    assert "\x1b[32m" in text
    assert "\x1b[34m" in text
    assert "«md0»" not in text


def test_without_unicode_it_stays_readable(api: str) -> None:
    result = ask(api, "--max-tokens", "12", "Hello", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert "<rld0>" in result.stdout


def test_no_color_is_honoured_where_colour_is_forced(api: str) -> None:
    for arguments, environment in (((), {"NO_COLOR": "1"}), (("--no-color",), {})):
        result = ask(api, *arguments, "--max-tokens", "5", "Hi", FORCE_COLOR="1", **environment)
        assert "\x1b[3" not in result.stdout
        assert "«rld0»" in result.stdout


def test_json_is_one_object_with_text_makers_and_record(tiny: LoadedModel, api: str) -> None:
    answer = json.loads(ask(api, "--json", "--max-tokens", "25", "Hello").stdout)
    assert answer["text"] == expected_answer(tiny, "Hello", 25)
    assert sum(answer["tokens"].values()) == 25
    assert set(answer["tokens"]) == {"rld0", "md0"}
    assert answer["record"]["pdd_pipeline"] == "p-rld-md"


def test_raw_continues_the_text_and_a_dash_reads_it_from_standard_input(tiny: LoadedModel, api: str) -> None:
    expected = tiny.tokenizer.decode(generate(tiny, tiny.tokenizer.encode("Once"), Sampling(max_tokens=9)))
    assert json.loads(ask(api, "--json", "--raw", "--max-tokens", "9", "-", stdin="Once").stdout)["text"] == expected


def test_a_system_message_changes_the_answer(api: str) -> None:
    plain = json.loads(ask(api, "--json", "--max-tokens", "9", "Hi").stdout)["text"]
    told = json.loads(ask(api, "--json", "--max-tokens", "9", "--system", "Be brief.", "Hi").stdout)["text"]
    assert plain != told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "gpt-9", "x"], "the model 'gpt-9' does not exist here; this lab serves 'tiny'"),
        (["--raw", "x" * 5000], "maximum context length is 4096 tokens"),
        (["--max-tokens", "5000", "x"], "maximum context length is 4096 tokens"),
        ([""], "the prompt is empty"),
        ([os.fsdecode(b"gr\xfc\xdfe")], "the prompt is not UTF-8"),
        (["hi", "--system", os.fsdecode(b"\xff")], "the --system is not UTF-8"),
        (["--raw", "--system", "x", "y"], "--system needs the chat template"),
        (["--api", "not an address", "x"], "not an address"),
    ],
)
def test_no_answer_is_one_sentence_and_exit_status_one(api: str, arguments: list[str], sentence: str) -> None:
    result = ask(api, *arguments)
    assert result.returncode == 1
    assert sentence in result.stderr
    assert result.stderr.startswith("pddbed: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_dead_or_foreign_api_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    result = ask(f"http://127.0.0.1:{port}", "x")
    assert result.returncode == 1
    assert f"nothing answers at http://127.0.0.1:{port}; start a lab" in result.stderr

    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def answer() -> None:
            connection, _ = foreign.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\ndata: {"a":1}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        result = ask(f"http://127.0.0.1:{foreign.getsockname()[1]}", "x")
        thread.join()
    assert result.returncode == 1
    assert "none of OpenAI's" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_help_is_at_hand() -> None:
    result = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0
    assert "--max-tokens" in result.stdout
    assert Path(COMMAND[0]).exists()
