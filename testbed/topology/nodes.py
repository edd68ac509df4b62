"""From YAML's events to a tree of nodes, and from the tree to plain data with positions.

Owns anchors, aliases, merge keys, duplicate keys, and the limits that keep a small file from unfolding
into something huge. PyYAML's own composer recurses without a limit and lets a duplicate key win
silently, hence a stack of our own.
"""

from dataclasses import dataclass, field
from typing import Any

import yaml

from testbed.model.units import quote
from testbed.topology.problems import Path

MAX_VALUES = 25_000  # also after aliases are unfolded; a lab of 1,000 hosts has about 10,000
MAX_DEPTH = 24
MOST_DUPLICATES = 100


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the text, counted from 0, and how many characters it covers on that line."""

    line: int
    column: int
    width: int = 1


@dataclass(slots=True)
class Node:
    """A value before aliases are unfolded: text, None, a list of nodes, or key -> (mark, node)."""

    value: Any
    mark: Mark
    merges: list[tuple[Mark, "Node"]] = field(default_factory=list)
    complete: bool = True  # false until its end is seen: an alias to it would never end


class Refused(Exception):
    """YAML that cannot be gone on with."""

    def __init__(self, mark: Mark, message: str) -> None:
        super().__init__(message)
        self.mark = mark


class NodeBuilder:
    """Nodes from the events of one document; `duplicates` has (key, its mark, the first one's mark)."""

    def __init__(self) -> None:
        self.duplicates: list[tuple[str, Mark, Mark]] = []
        self._anchors: dict[str | None, Node] = {}
        self._open: list[Node] = []  # lists and mappings that have not ended
        self._keys: list[tuple[str, Mark, bool] | None] = []  # for each: the key that waits for its value
        self._root: Node | None = None
        self._merged = 0

    def build(self, text: str) -> Node | None:
        """The root; None without any document. Raises Refused and yaml.YAMLError."""
        documents = 0
        for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            mark = _mark(event)
            if number > 2 * MAX_VALUES:  # a key and a value each
                raise Refused(mark, f"has more than {MAX_VALUES:,} values; no topology is that large")
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise Refused(mark, "a second document begins here; a file holds one topology")
            elif isinstance(event, yaml.AliasEvent):
                self._place(self._lookup(event, mark), mark)
            elif isinstance(event, yaml.ScalarEvent):
                self._scalar(event, mark)
            elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
                self._begin(event, mark)
            elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
                self._end()
        return self._root

    def _lookup(self, event: yaml.AliasEvent, mark: Mark) -> Node:
        node = self._anchors.get(event.anchor)
        if node is None:
            raise Refused(mark, f"*{event.anchor} has no anchor &{event.anchor} before it")
        if not node.complete:
            raise Refused(mark, f"*{event.anchor} stands inside what it repeats, so it would never end")
        return node

    def _scalar(self, event: yaml.ScalarEvent, mark: Mark) -> None:
        plain = event.style is None
        if self._expects_key():
            self._keys[-1] = (event.value, mark, plain and event.value == "<<")
            self._remember(event, Node(event.value, mark))
            return
        null = plain and event.value in ("", "~", "null", "Null", "NULL")
        node = Node(None if null else event.value, mark)
        self._remember(event, node)
        self._place(node, mark)

    def _begin(self, event: yaml.SequenceStartEvent | yaml.MappingStartEvent, mark: Mark) -> None:
        if self._expects_key():
            raise Refused(mark, "a key must be a plain name, not a list or a mapping; is a quote missing?")
        if len(self._open) >= MAX_DEPTH:
            raise Refused(mark, f"nested more than {MAX_DEPTH} deep; no topology is")
        empty: Any = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        node = Node(empty, mark, complete=False)
        self._remember(event, node)
        self._place(node, mark)
        self._open.append(node)
        self._keys.append(None)

    def _end(self) -> None:
        node = self._open.pop()
        self._keys.pop()
        self._merge(node)
        node.complete = True

    def _expects_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._keys[-1] is None

    def _remember(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, node: Node) -> None:
        if event.tag is not None:
            raise Refused(node.mark, f"the tag {quote(event.tag)} is not supported; write the plain value")
        if event.anchor is not None:
            self._anchors[event.anchor] = node

    def _place(self, node: Node, mark: Mark) -> None:
        """Put a value where it belongs: `mark` is where it is used, `node.mark` where it is written."""
        if not self._open:
            self._root = node
            return
        parent = self._open[-1]
        if isinstance(parent.value, list):
            parent.value.append(node)
            return
        key = self._keys[-1]
        if key is None:
            raise Refused(mark, "a key must be a plain name, not an alias")
        self._keys[-1] = None
        text, key_mark, is_merge = key
        if is_merge:
            parent.merges.append((mark, node))
        elif text in parent.value:
            if len(self.duplicates) >= MOST_DUPLICATES:
                raise Refused(key_mark, f"is one more key that is given twice, after {MOST_DUPLICATES} others")
            self.duplicates.append((text, key_mark, parent.value[text][0]))
        else:
            parent.value[text] = (key_mark, node)

    def _merge(self, node: Node) -> None:
        """Own keys win; then, of several merged mappings, the earlier ones (YAML's merge key draft)."""
        for mark, source in node.merges:
            for mapping in source.value if isinstance(source.value, list) else [source]:
                if not isinstance(mapping.value, dict):
                    raise Refused(mark, "<<: takes a mapping or a list of mappings, as in <<: *defaults")
                self._merged += len(mapping.value)
                if self._merged > MAX_VALUES:
                    raise Refused(mark, f"merges more than {MAX_VALUES:,} values; no topology needs that")
                for key, entry in mapping.value.items():
                    node.value.setdefault(key, entry)


class Unfolder:
    """Plain data from nodes; fills in where the key and the value of every path stand."""

    def __init__(self, keys: dict[Path, Mark], values: dict[Path, Mark]) -> None:
        self._keys = keys
        self._values = values

    def unfold(self, node: Node, path: Path = ()) -> Any:
        """The data below `node`, aliases repeated. Raises Refused when that is too much."""
        if len(self._values) >= MAX_VALUES:
            raise Refused(node.mark, f"unfolds into more than {MAX_VALUES:,} values; no topology is that large")
        if len(path) > MAX_DEPTH:
            raise Refused(node.mark, f"nested more than {MAX_DEPTH} deep once its aliases are unfolded")
        self._values[path] = node.mark
        if isinstance(node.value, list):
            return [self.unfold(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node.value, dict):
            for key, (mark, _) in node.value.items():
                self._keys[(*path, key)] = mark
            return {key: self.unfold(item, (*path, key)) for key, (_, item) in node.value.items()}
        return node.value


def _mark(event: yaml.Event) -> Mark:
    start, end = event.start_mark, event.end_mark
    if start is None:
        return Mark(0, 0)
    width = end.column - start.column if end is not None and end.line == start.line else 1
    return Mark(start.line, start.column, max(1, width))
