"""What commands print for people: text of others (files, servers, models, hosts' programs) never drives the terminal.

Control characters are escaped where text is printed, whoever wrote it and wherever it goes; `--json` has them as JSON
writes them.
"""

import re
from typing import Any

import click

# C0 but tab and newline, DEL and C1 (in UTF-8 too, terminals take U+009B for the beginning of a sequence); what turns
# the direction of text (it makes a line read as another); halves of surrogate pairs, which cannot be encoded.
_DRIVES = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """`text` with control characters as escapes (`\\x1b`); tabs and ends of lines stay."""
    return _DRIVES.sub(lambda found: found.group().encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def echo(text: Any = "", *, fg: str | None = None, dim: bool = False, err: bool = False, nl: bool = True) -> None:
    """Print, escaped, in a colour where that is a terminal. NO_COLOR is heeded."""
    click.secho(harmless(str(text)), fg=fg, dim=dim or None, err=err, nl=nl)


def json_text(value: str) -> str:
    """JSON text for a terminal: what JSON may have as it is and a terminal may not, written as JSON's escapes."""
    return _DRIVES.sub(lambda found: f"\\u{ord(found.group()):04x}", value)
