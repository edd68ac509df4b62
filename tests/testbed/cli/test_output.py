"""What people are shown: nothing drives their terminal, nothing that they copy is broken, Ctrl-C ends with 130."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.table import Table

from testbed.cli.console import Console
from testbed.cli.output import harmless, json_text
from testbed.model.units import told_apart
from tests.conftest import ROOT, run_pddbed

MAIN = [sys.executable, "-c", "from testbed.cli import main; main(prog_name='pddbed')"]
# Sets the window's title, clears the screen, rings, moves back, C1's form of CSI, turns the text round, half a pair.
EVIL = "\x1b]0;owned\x07 \x1b[2J\x1b[31mred \x08\x0b\x0c\r\x7f \x9b31m \u202etxet\u202c \ud83d end"
DRIVES = "\x1b\x07\x08\x0b\x0c\x0d\x7f\x9b\u202e\u202c"


def unharmed(text: str) -> bool:
    return not any(character in text for character in DRIVES)


def test_control_characters_are_escaped_and_text_stays() -> None:
    assert unharmed(harmless(EVIL))
    assert "\\x1b]0;owned\\x07" in harmless(EVIL)
    plain = "ä 語 👩‍👩‍👧 nbsp\u00a0 tab\t line\n windows\r\n"
    assert harmless(plain) == plain.replace("\r\n", "\n")
    assert harmless(harmless(EVIL)) == harmless(EVIL)


def test_json_stays_json_and_cannot_drive_the_terminal() -> None:
    text = json_text(json.dumps({"a": EVIL, "b": "ü"}, ensure_ascii=False))
    assert unharmed(text)
    assert "ü" in text
    assert json.loads(text) == {"a": EVIL, "b": "ü"}


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_and_texts_of_others_are_escaped(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, color_system=None)
    table = Table(EVIL)
    table.add_row(EVIL)
    console.print(table)
    console.print(EVIL, markup=False)
    assert unharmed(out.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_no_word_of_a_table_is_broken_and_nothing_wraps_where_no_terminal_is(terminal: bool) -> None:
    words = [
        "http://127.0.0.1:48000/v1",
        "chatcmpl-0123456789abcdef0123456789abcdef",
        "/a/long/path/to/a/topology.yaml",
    ]
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=40, color_system=None)
    table = Table("A", "B", "C", "NOTE", box=None)
    table.add_row(*words, "some words that may be on several lines where a terminal is as narrow as this one")
    console.print(table)
    text = out.getvalue()
    assert all(word in text for word in words)
    assert (len(text.splitlines()) == 2) is not terminal
    out.truncate(0)
    console.print(f"a sentence that is longer than the terminal is wide, about {words[2]}")
    assert words[2] in out.getvalue()


def test_errors_that_quote_names_and_contents_of_files_are_escaped(tmp_path: Path) -> None:
    evil = EVIL.replace("\ud83d", "")
    folder = tmp_path / evil.replace("/", "")
    folder.mkdir()
    file = folder / "lab.yaml"
    file.write_text(
        'model: {name: "\\e[31m\\a"}\n"\\e]0;x\\a": 1\ndatacenters: {a: {subnet: "\\e[2J", switch: "\\x9b31m"}}\n'
    )
    for command in (
        ["validate", str(file)],
        ["validate", str(folder / "none.yaml")],
        ["up", str(file)],
        ["graph", str(file)],
        ["trace", "stats", str(file)],
        ["compare", str(folder), str(folder)],
        ["report", str(folder)],
        ["audit", str(file)],
        ["down", evil],
        ["ps", evil],
        ["status", f"--{evil}"],
        [evil],
        ["ask", "--api", f"http://127.0.0.1:1/{evil}", "hello"],
    ):
        done = run_pddbed(*command)
        assert done.returncode or command == ["down", evil], command
        assert unharmed(done.stdout + done.stderr), (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr


def test_a_model_and_a_command_with_escapes_in_their_names_are_shown_escaped(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    hosts = '{h: {command: "echo \\e]0;x\\a"}, gw0: {role: gateway}, p0: {role: prefill}}'
    file.write_text(
        f"datacenters: {{main: {{subnet: 10.1.0.0/24, hosts: {hosts}}}}}\nserving: {{pipeline: single}}\n"
        'model: {name: "/\\e[31m/\\x9b31m.gguf"}\n'
    )
    for command in (["validate", str(file)], ["graph", str(file)]):
        done = run_pddbed(*command)
        assert done.returncode == 0, done.stderr
        assert unharmed(done.stdout + done.stderr), done.stdout


class EvilServer(BaseHTTPRequestHandler):
    """Streams an answer whose every text has control characters in it; refuses other paths with such a message."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/refuse"):
            body = json.dumps({"error": {"message": EVIL}}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.end_headers()
        record = {"ttft": 0.1, "tpot": 0.1, "e2el": 1.0, "pdd_relay": EVIL, "pdd_pipeline": EVIL, "pdd_route": EVIL}
        chunk = {
            "choices": [{"delta": {"content": EVIL}, "finish_reason": EVIL}],
            "pdd": {"instance": EVIL, "token_ids": [1], "record": record},
        }
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_and_an_error_of_a_server_are_escaped() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), EvilServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        for command in (
            ["--api", url, "hello"],
            ["--api", url, "--json", "hello"],
            ["--api", f"{url}/refuse", "hello"],
        ):
            done = run_pddbed("ask", *command)
            assert "owned" in done.stdout + done.stderr
            assert unharmed(done.stdout + done.stderr), (command, done.stdout, done.stderr)
    finally:
        server.shutdown()
        server.server_close()


def interrupted(command: list[str], after: Callable[[], None]) -> tuple[int, str]:
    process = subprocess.Popen(
        [*MAIN, *command], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    after()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    return process.returncode, said


class SilentServer(BaseHTTPRequestHandler):
    asked = threading.Event()

    def do_POST(self) -> None:
        self.asked.set()
        time.sleep(20)

    def log_message(self, *_: object) -> None:
        pass


def test_ctrl_c_ends_a_command_with_130_and_a_sentence() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SilentServer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        status, said = interrupted(["ask", "--api", url, "hello"], lambda: SilentServer.asked.wait(20) and None)
        assert (status, said) == (130, "pddbed: interrupted\n")
    finally:
        server.shutdown()


def test_ctrl_c_at_a_question_ends_with_130() -> None:
    child, terminal = pty.fork()
    if child == 0:
        code = "import click; from testbed.cli import LazyGroup\n"
        code += "@click.group(cls=LazyGroup)\ndef main(): click.confirm('sure?', err=True)\n"
        code += "main(['ps'])"
        os.execv(sys.executable, [sys.executable, "-c", code])
    said = b""
    while b"sure?" not in said:
        said += os.read(terminal, 1000)
    deadline = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        # one that comes before Python reads is seen after the read, so a person presses it again
        os.write(terminal, b"\x03")
        time.sleep(0.2)
        assert time.monotonic() < deadline
    assert os.waitstatus_to_exitcode(ended[1]) == 130
    os.close(terminal)


def test_rounding_never_hides_what_a_limit_was_exceeded_by() -> None:
    assert told_apart(0.01, 0.005) == ("1.0%", "0.5%")
    assert told_apart(0.0050001, 0.005) == ("0.50001%", "0.50000%")
    assert told_apart(0.005, 0.005) == ("0.500000000%", "0.500000000%")
