"""YAML as data with positions: no trap changes a name, and every key and value knows where it stands."""

import pytest

from testbed.topology.document import parse_yaml
from testbed.topology.nodes import Mark
from testbed.topology.problems import TopologyErrors, dotted


@pytest.mark.parametrize(
    "word",
    [
        "on",
        "off",
        "yes",
        "no",
        "y",
        "true",
        "False",
        "010",
        "0x1f",
        "0o17",
        "1:30",
        "12:30:45",
        "1_000",
        "1e3",
        "2024-01-01",
        "2024-01-01T00:00:00Z",
        ".inf",
        ".nan",
        "1.10",
        "+5",
        "=",
        "20ms",
        "0.1%",
    ],
)
def test_a_word_stays_the_text_that_was_typed_as_key_and_as_value(word: str) -> None:
    assert parse_yaml(f"{word}: {word}\n", "f").data == {word: word}


@pytest.mark.parametrize("nothing", ["", "~", "null", "Null", "NULL"])
def test_only_unquoted_nothing_is_none(nothing: str) -> None:
    assert parse_yaml(f"key: {nothing}\n", "f").data == {"key": None}
    assert parse_yaml(f"key: '{nothing}'\n", "f").data == {"key": nothing}


def test_a_key_that_yaml_takes_for_nothing_is_still_a_name() -> None:
    assert parse_yaml("null: 1\n~: 2\n", "f").data == {"null": "1", "~": "2"}


def test_every_key_and_value_knows_its_place() -> None:
    document = parse_yaml("a: 1\nb:\n  - x\n  - {c: 20ms}\n", "f")
    assert document.keys[("b",)] == Mark(1, 0, 1)
    assert document.values[("b", 0)] == Mark(2, 4, 1)
    assert document.keys[("b", 1, "c")] == Mark(3, 5, 1)
    assert document.values[("b", 1, "c")] == Mark(3, 8, 4)


def test_a_problem_where_nothing_stands_points_at_what_is_around_it() -> None:
    document = parse_yaml("a:\n  b: {c: 1}\n", "f")
    problem = document.problem(("a", "b", "missing", 3), "is missing")
    assert (problem.line, problem.column, problem.path) == (2, 3, "a.b.missing[3]")
    assert problem.source == "  b: {c: 1}"


def test_windows_line_ends_and_a_byte_order_mark_change_nothing() -> None:
    document = parse_yaml("a: 1\r\nb: 2\r\n", "f")
    assert document.data == {"a": "1", "b": "2"}
    assert document.values[("b",)] == Mark(1, 3, 1)
    assert document.lines[0] == "a: 1"


def test_aliases_repeat_and_merge_keys_merge() -> None:
    document = parse_yaml(
        "worker: &worker {role: prefill, device: cpu}\n"
        "both: [*worker, *worker]\n"
        "own: {<<: *worker, role: gateway}\n"
        "many: {<<: [{a: 1, b: 1}, {b: 2, c: 2}], c: 3}\n",
        "f",
    )
    assert document.data["both"] == [{"role": "prefill", "device": "cpu"}] * 2
    assert document.data["own"] == {"role": "gateway", "device": "cpu"}
    assert document.data["many"] == {"a": "1", "b": "1", "c": "3"}
    assert document.values[("own", "device")] == document.values[("worker", "device")]


def test_a_quoted_merge_key_is_an_ordinary_key() -> None:
    assert parse_yaml("'<<': {a: 1}\n", "f").data == {"<<": {"a": "1"}}


def test_duplicate_keys_are_all_found_even_when_the_rest_is_no_yaml() -> None:
    with pytest.raises(TopologyErrors) as caught:
        parse_yaml("a: 1\na: 2\nb: {c: 1, c: 2}\nd: [\n", "f")
    assert [problem.line for problem in caught.value.problems] == [2, 3, 5]


@pytest.mark.parametrize("levels", [5_000, 20])
def test_long_chains_of_aliases_end_neither_in_a_crash_nor_in_a_long_wait(levels: int) -> None:
    lines = ["a0: &a0 {k: v}"]
    lines += [f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: v}}" for i in range(1, levels)]
    text = "\n".join(lines)
    if levels == 20:
        assert len(parse_yaml(text, "f").data["a19"]) == 20
    else:
        with pytest.raises(TopologyErrors, match="more than 25,000"):
            parse_yaml(text, "f")


def test_deep_aliases_are_refused_instead_of_recursed_into() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 100)]
    with pytest.raises(TopologyErrors, match="deep once its aliases are unfolded"):
        parse_yaml("\n".join(lines), "f")


def test_paths_are_written_as_people_write_them() -> None:
    assert dotted(("wan", 0, "delay")) == "wan[0].delay"
    assert dotted(("datacenters", "main", "hosts", "edge-1.rack:2", "role")) == (
        'datacenters.main.hosts["edge-1.rack:2"].role'
    )
