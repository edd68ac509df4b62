"""A full disk costs lines, which are counted: never an answer, a link, or another line."""

import asyncio
import errno
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.workers.serving import eventually, prompt_of, run
from workers.engine import PaceCounts, Profile
from workers.linefile import LineFile, LogLines, Unwritten
from workers.local import InProcessCluster, Layout
from workers.models import LoadedModel
from workers.records import RecordWriter
from workers.worker_records import PaceLog

LONG = {"line": "x" * 9000}  # more than a page of what is left, so that a part of it finds room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "pddbed-test", str(directory)], check=True)
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path, leave: int = 0) -> Path:
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))
    os.truncate(filler, max(0, filler.stat().st_size - leave))
    return filler


def lines_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.root
@pytest.mark.parametrize("left", [0, 4096], ids=["no room", "room for half a line"])
def test_what_finds_no_room_is_counted_and_every_line_of_the_file_is_whole(small_disk: Path, left: int) -> None:
    unwritten = Unwritten()
    writer, file = RecordWriter(small_disk, unwritten), small_disk / "requests.jsonl"
    writer.write({"request_id": "first", **LONG})
    filler = fill(small_disk, left)
    for _ in range(3):
        writer.write({"request_id": "lost", **LONG})
    assert unwritten.counts["requests"] == 3
    assert unwritten.reason == "No space left on device"
    filler.unlink()
    writer.write({"request_id": "later", **LONG})
    assert [line["request_id"] for line in lines_of(file)] == ["first", "later"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_where_half_a_line_cannot_be_taken_back_the_next_one_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    unwritten, write = Unwritten(), os.write
    file = LineFile(tmp_path / "bytes.jsonl", "bytes", unwritten)
    assert file.write(b'{"a": 1}')

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def half(fd: int, data: memoryview) -> int:
        if len(data) > 8:
            return write(fd, data[:4])
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", half)
        broken.setattr(os, "ftruncate", refuse)
        assert not file.write(b'{"b": 2}')
    assert file.write(b'{"c": 3}')
    assert (tmp_path / "bytes.jsonl").read_text().splitlines() == ['{"a": 1}', '{"b"', '{"c": 3}']
    assert unwritten.counts["bytes"] == 1
    again = LineFile(tmp_path / "half", "bytes", unwritten)
    (tmp_path / "half").write_text('{"of a worker that died')
    assert again.write(b"{}")
    assert (tmp_path / "half").read_text().splitlines()[-1] == "{}"


def test_a_directory_that_was_removed_is_made_again_and_one_that_cannot_be_costs_lines(tmp_path: Path) -> None:
    unwritten, directory = Unwritten(), tmp_path / "records"
    writer = RecordWriter(directory, unwritten)
    writer.write({"request_id": "1"})
    shutil.rmtree(directory)
    writer.write({"request_id": "2"})
    assert [line["request_id"] for line in lines_of(directory / "requests.jsonl")] == ["2"]
    shutil.rmtree(directory)
    directory.write_text("a file in its place")
    writer.write({"request_id": "3"})
    assert unwritten.counts["requests"] == 1
    directory.unlink()
    writer.write({"request_id": "4"})
    assert [line["request_id"] for line in lines_of(directory / "requests.jsonl")] == ["4"]


def test_records_have_a_bound_that_their_last_line_tells(tmp_path: Path) -> None:
    unwritten = Unwritten()
    writer = RecordWriter(tmp_path, unwritten, most_bytes=10_000)
    for number in range(100):
        writer.write({"request_id": f"r{number}", "text": "x" * 400})
    file = tmp_path / "requests.jsonl"
    *whole, last = lines_of(file)
    assert file.stat().st_size < 10_500
    assert last["request_id"] == ""
    assert "limit of 10000 bytes (PDDBED_RECORDS_LIMIT)" in str(last["error"])
    assert len(whole) + unwritten.counts["requests"] == 100


@pytest.mark.root
def test_a_log_on_a_full_disk_loses_lines_and_tears_none(small_disk: Path) -> None:
    unwritten, file = Unwritten(), small_disk / "w.log"
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    handler = LogLines(fd, unwritten)

    def say(what: str) -> None:
        handler.handle(logging.LogRecord("w", logging.INFO, "", 0, what, (), None))

    say("first")
    filler = fill(small_disk)
    for _ in range(3):
        say("y" * 9000)
    filler.unlink()
    say("later")
    os.close(fd)
    assert file.read_text().splitlines()[0::2] == ["first", "later"]
    assert unwritten.counts["log"] == 3


@pytest.mark.root
def test_a_pace_file_that_found_no_room_is_written_when_there_is_some(small_disk: Path) -> None:
    counts, unwritten = PaceCounts(steps=1), Unwritten()

    async def scenario() -> None:
        nonlocal counts
        log = PaceLog(small_disk, "p0", Profile("chip", 1, 1, 1), lambda: counts, unwritten)
        keeping, file = asyncio.create_task(log.keep()), small_disk / "pace-p0.json"
        await eventually(file.exists, 5, "the first word")
        filler = fill(small_disk)
        counts = PaceCounts(steps=2)
        await eventually(lambda: unwritten.counts["pace"] > 0, 5, "there is no room")
        assert json.loads(file.read_text())["steps"] == 1
        filler.unlink()
        await eventually(lambda: json.loads(file.read_text())["steps"] == 2, 5, "the loop goes on")
        keeping.cancel()

    run(scenario())


@pytest.mark.root
def test_answers_and_links_are_as_ever_while_records_find_no_room(tiny: LoadedModel, small_disk: Path) -> None:
    async def scenario() -> None:
        async with InProcessCluster(tiny, Layout(), small_disk) as cluster:
            gateway, filler = cluster.gateway, fill(small_disk)
            links = {name: gateway.dispatcher.peers.link(name) for name in ("p0", "rld0", "md0")}
            async with httpx.AsyncClient(base_url=cluster.base_url, timeout=30) as http:

                async def ask(number: int) -> str:
                    body = {"prompt": prompt_of(40, seed=number), "max_tokens": 8, "temperature": 0}
                    answer = await http.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    return str(answer.json()["id"])

                for number in range(25):
                    await ask(number)
                await asyncio.gather(*(ask(100 + number) for number in range(6)))
                unwritten = gateway.dispatcher.environment.unwritten
                await eventually(lambda: unwritten.counts["requests"] == 31, 10, "all are counted")
                assert {name: gateway.dispatcher.peers.link(name) for name in links} == links, "none was lost"
                told = (await http.get("/metrics")).text
                assert 'pddbed_unwritten_lines_total{kind="requests"} 31' in told
                filler.unlink()
                later = [await ask(200 + number) for number in range(3)]
                file = small_disk / "requests.jsonl"
                await eventually(lambda: file.exists() and len(lines_of(file)) == 3, 10, "later ones are written")
                assert [line["request_id"] for line in lines_of(file)] == later

    run(scenario())
