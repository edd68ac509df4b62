"""Every file in tests/fixtures/wrong-topologies is refused with all of its mistakes, each on its line.

A fixture is named after its mistake. Its sibling `.expected` has one line for each error: the line number (or -
where there is no file to point into), and words that the error must contain.
"""

from pathlib import Path

import pytest

from testbed.topology import TopologyErrors, load_plan

FOLDER = Path(__file__).parents[2] / "fixtures" / "wrong-topologies"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_enough_mistakes_and_each_says_what_is_expected() -> None:
    assert len(FILES) >= 25
    assert all(file.with_suffix(".expected").read_text().strip() for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_wrong_file_gives_all_its_mistakes_at_once_with_their_lines(file: Path) -> None:
    with pytest.raises(TopologyErrors) as caught:
        load_plan(file)
    problems = caught.value.problems
    expected = [line.split(": ", 1) for line in file.with_suffix(".expected").read_text().splitlines()]
    unmatched = list(problems)
    for line, words in expected:
        found = [p for p in unmatched if str(p.line or "-") == line and words in f"{p.path}: {p.message}"]
        assert found, f"no error on line {line} says {words!r}; there are:\n{caught.value}"
        unmatched.remove(found[0])
    assert not unmatched, "errors that nobody expects:\n" + "\n".join(map(str, unmatched))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_error_is_one_printable_line_that_names_the_file(file: Path) -> None:
    with pytest.raises(TopologyErrors) as caught:
        load_plan(file)
    for problem in caught.value.problems:
        text = str(problem)
        assert text.startswith(str(file))
        assert text.isprintable()
        assert not problem.message.endswith((".", ";"))


def test_a_path_that_is_no_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text("")
    for path, words in [
        (tmp_path / "none.yaml", "there is no such file"),
        (tmp_path, f"is a directory; name a file in it, such as {tmp_path / 'lab.yaml'}"),
        (Path("/dev/zero"), "is larger than 256 KiB"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
        (tmp_path / "a\0b", "no file can have such a name"),
    ]:
        with pytest.raises(TopologyErrors) as caught:
            load_plan(path)
        (problem,) = caught.value.problems
        assert words in problem.message
        assert problem.line is None


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_text("# nothing\n" * 60_000)
    with pytest.raises(TopologyErrors, match="larger than 256 KiB"):
        load_plan(large)


def test_more_packets_than_memory_holds_are_refused_with_the_sum(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    file.write_text(
        "datacenters: {a: {subnet: 10.1.0.0/24}, b: {subnet: 10.2.0.0/24}}\n"
        "wan:\n"
        "  - {between: [a, b], rate: 10gbit, delay: 800ms, queue: {bytes: 200MiB}}\n"
        "  - {between: [a, b], rate: 10gbit, delay: 800ms, queue: {bytes: 200MiB}}\n"
    )
    load_plan(file, memory_bytes=32 * 2**30)
    with pytest.raises(TopologyErrors) as caught:
        load_plan(file, memory_bytes=10 * 2**30)  # each link alone holds 2 x (1GB + 200MiB) = 2.42GB
    assert "all links together may hold 4.84GB of packets, more than the 2.5GiB" in str(caught.value)
    with pytest.raises(TopologyErrors) as caught:
        load_plan(file, memory_bytes=8 * 2**30)
    assert len(caught.value.problems) == 2
    assert "forward 10gbit x 800ms = 1GB and a queue of 200MiB" in str(caught.value)
