"""A YAML file as plain data in which every key and value knows its line and column.

Owns positions and the words for YAML mistakes; knows nothing of topologies. Every scalar stays the
text that was typed (only an unquoted `null`, `~` or nothing is None), so that no name becomes a
boolean, a date, an octal or a sexagesimal number on the way (`on`, `1:30`, `010`); whoever wants a
number asks for one.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from testbed.model.units import printable, quote
from testbed.topology.nodes import Mark, NodeBuilder, Refused, Unfolder
from testbed.topology.problems import Path, Problem, TopologyErrors, dotted

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # YAML's, so that marks and lines agree


@dataclass(slots=True)
class Document:
    """The data (None, str, list, dict), where everything in it stands, and the mistakes found so far."""

    file: str
    lines: list[str]
    data: Any = None
    keys: dict[Path, Mark] = field(default_factory=dict)
    values: dict[Path, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, path: Path, message: str, *, at_key: bool = False) -> Problem:
        """A problem at `path`; where that does not exist, at the key of the nearest thing around it."""
        known = path
        while known and known not in self.values:
            known = known[:-1]
        mark = self.values.get(known, Mark(0, 0))
        if at_key or known != path:
            mark = self.keys.get(known, mark)
        return self.at(mark, message, path)

    def at(self, mark: Mark, message: str, path: Path = ()) -> Problem:
        """A problem at a place in the text."""
        source = self.lines[mark.line] if mark.line < len(self.lines) else ""
        line, column = mark.line + 1, mark.column + 1
        # Messages quote what the file holds, and that must not drive the terminal.
        return Problem(self.file, line, column, dotted(path), printable(message), source, mark.width)


def parse_yaml(text: str, file: str) -> Document:
    """The document in `text`; mistakes that do not stop the reading are in its `problems`.

    Raises TopologyErrors where the text is not YAML, or is YAML of a kind that no topology needs.
    """
    document = Document(file, _LINE_BREAK.split(text))
    builder = NodeBuilder()
    stopped: Problem | None = None
    try:
        root = builder.build(text)
        if root is not None:
            unfolder = Unfolder(document.keys, document.values)
            document.data = unfolder.unfold(root)
    except yaml.reader.ReaderError as error:
        before = _LINE_BREAK.split(text[: error.position])
        code = error.character if isinstance(error.character, int) else ord(error.character)
        mark = Mark(len(before) - 1, len(before[-1]))
        stopped = document.at(mark, f"the control character U+{code:04X} is not text; remove it")
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        stopped = document.at(Mark(place.line, place.column) if place else Mark(0, 0), _explain(error))
    except Refused as error:
        stopped = document.at(error.mark, str(error))
    for key, mark, first in builder.duplicates:
        message = f"{quote(key)} is given twice (first on line {first.line + 1}); keep one of them"
        document.problems.append(document.at(mark, message))
    if stopped is not None:
        raise TopologyErrors([*document.problems, stopped])
    return document


def _explain(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's complaint in the words of someone who edits a file, not of someone who writes parsers."""
    problem = error.problem or "syntax error"
    found = re.search(r"found character '(.*)' that cannot start any token", problem)
    if found is not None and found.group(1) in ("\t", "\\t"):
        return "a tab; YAML is indented with spaces"
    if found is not None:
        return f'text that begins with "{found.group(1)}" must stand in quotes'
    if problem == "mapping values are not allowed here":
        return 'a ":" that is not expected here; put the text in quotes, or what belongs below on its own lines'
    if problem.startswith("expected <block end>"):
        return "this does not line up with the lines above it; check the indentation"
    if problem == "could not find expected ':'":
        return 'expected "key: value"; the ":" and a space after it are missing'
    if problem.startswith("expected ',' or"):
        bracket = "]" if "]" in problem else "}"
        return f'expected "," or "{bracket}"; is a bracket not closed?'
    return f"not YAML: {problem}" + (f" ({error.context})" if error.context else "")
