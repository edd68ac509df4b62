"""`pddbed ask`: one answer as it streams, coloured by who made each token, and the request's timeline under it."""

import json
import os
import sys
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from testbed.cli import CommandError
from testbed.cli.answer_stream import Piece, stream_answer
from testbed.cli.answer_timeline import ASCII, Marks, draw, handover_sentence, milliseconds, route_sentence, rows_of
from testbed.cli.console import Console as HarmlessConsole
from testbed.cli.options import lab_errors, lab_option, tell_losses
from testbed.cli.output import json_text
from testbed.lab.record import LabError, find_record

MIN_CELLS, MAX_CELLS = 60, 100
ROLE_WORDS = {"pdd_relay": "relay decode", "pdd_main": "main decode", "pdd_prefill": "prefill"}


@click.command("ask")
@click.argument("prompt")
@lab_option
@click.option("--api", metavar="URL", help="Address of a gateway, instead of a lab.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Limit of tokens to answer.")
@click.option("--model", default=None, help="Fail unless the lab serves this model.")
@click.option("--system", default=None, help="System message (chat only).")
@click.option("--raw/--chat", default=False, help="Continue the text, or answer it through the model's chat template.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object with the text, the tokens by instance, and the record.",
)
@click.option("--no-color", is_flag=True, help="Mark the instances by name instead of colour (as with NO_COLOR set).")
@lab_errors
def ask_command(prompt: str, lab: str | None, api: str | None, **options: Any) -> None:
    """Answer PROMPT ("-" reads it from standard input) and show where each token was made."""
    ask(api or _api_of(lab), prompt, **options)


def _api_of(lab: str | None) -> str:
    record = find_record(lab)
    url: str | None = record.state().get("api")
    if url is None:
        raise LabError(f'lab "{record.name}" has no API: it runs without workers, or without a gateway')
    tell_losses(record, err=True)
    return url


def ask(
    base_url: str,
    prompt: str,
    *,
    max_tokens: int = 128,
    model: str | None = None,
    system: str | None = None,
    raw: bool = False,
    as_json: bool = False,
    no_color: bool = False,
    console: Console | None = None,
) -> None:
    """Ask the gateway at `base_url` and print. Greedy, so that an answer can be asked for again.

    Raises CommandError with one sentence when there is no answer.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt:
        raise CommandError("the prompt is empty; give some text, or - and the text on standard input")
    for name, text in (("prompt", prompt), ("--system", system or "")):
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of another encoding, as Python keeps them
            raise CommandError(f"the {name} is not UTF-8; convert it first (iconv -t utf-8)") from None
    if raw and system is not None:
        raise CommandError("--system needs the chat template; leave --raw out")
    path, body = _request(prompt, system, raw)
    body |= {"max_tokens": max_tokens, "temperature": 0, **({"model": model} if model else {})}
    pieces = stream_answer(base_url, path, body)
    if as_json:
        click.echo(json_text(json.dumps(_collect(list(pieces)), ensure_ascii=False)))
        return
    if console is None:
        console = HarmlessConsole(no_color=True if no_color or os.environ.get("NO_COLOR") else None)
    _show(pieces, console)


def _request(prompt: str, system: str | None, raw: bool) -> tuple[str, dict[str, Any]]:
    if raw:
        return "/v1/completions", {"prompt": prompt}
    messages = [{"role": "system", "content": system}] if system is not None else []
    return "/v1/chat/completions", {"messages": [*messages, {"role": "user", "content": prompt}]}


def _collect(pieces: list[Piece]) -> dict[str, Any]:
    tokens: dict[str, int] = {}
    for piece in pieces:
        if piece.instance:
            tokens[piece.instance] = tokens.get(piece.instance, 0) + piece.tokens
    last = pieces[-1] if pieces else Piece("", "", 0)
    return {
        "text": "".join(piece.text for piece in pieces),
        "finish_reason": last.finish_reason,
        "tokens": tokens,
        "record": last.record,
    }


def _show(pieces: Any, console: Console) -> None:
    coloured = console.color_system is not None and not console.no_color
    marks = Marks() if console.encoding.lower().replace("-", "").startswith("utf") else ASCII
    opening, closing = ("«", "»") if marks is not ASCII else ("<", ">")
    colours = iter(["green", "blue", "magenta", "yellow"])
    styles: dict[str, str] = {}
    seen: list[Piece] = []
    current = ""
    for piece in pieces:
        if piece.instance and piece.instance != current:
            current = piece.instance
            styles.setdefault(current, next(colours, "white"))
            if not coloured:
                console.print(f"{opening}{current}{closing}", end="", markup=False, soft_wrap=True)
        console.print(Text(piece.text, style=styles.get(current, "")), end="", soft_wrap=True)
        seen.append(piece)
    console.print()
    result = _collect(seen)
    if result["record"] is not None:
        console.print()
        _legend(result, styles, console, marks)
        _timeline(result["record"], styles, console, marks)


def _legend(result: dict[str, Any], styles: dict[str, str], console: Console, marks: Marks) -> None:
    record = result["record"]
    line = Text()
    for instance, count in result["tokens"].items():
        if line:
            line.append("   ")
        role = next((word for key, word in ROLE_WORDS.items() if record.get(key) == instance), "")
        line.append(f"{marks.bar}{marks.bar} {instance}", style=styles.get(instance, ""))
        line.append(f" {role}, {count} token{'' if count == 1 else 's'}")
    console.print(line, soft_wrap=True)
    facts = [f"first token {milliseconds(record['ttft'] * 1000)}"] if record["ttft"] is not None else []
    if record["tpot"]:
        facts.append(f"{milliseconds(record['tpot'] * 1000)} a token")
    facts.append(f"whole answer {milliseconds(record['e2el'] * 1000)}")
    if result["finish_reason"] == "length":
        facts.append("cut at --max-tokens")
    console.print(Text(f" {marks.dot} ".join(facts), style="dim"), soft_wrap=True)


def _timeline(record: dict[str, Any], styles: dict[str, str], console: Console, marks: Marks) -> None:
    width = max(MIN_CELLS, min(MAX_CELLS, console.width))
    console.print()
    for line in draw(rows_of(record, styles, marks), width, marks):
        console.print(line, no_wrap=True, crop=False, soft_wrap=True)
    console.print(Text(route_sentence(record), style="dim"), soft_wrap=False)
    sentence = handover_sentence(record, marks)
    if sentence is not None:
        console.print(Text(sentence, style="dim"), soft_wrap=False)
