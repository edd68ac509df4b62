"""Where received bytes go: into views in order, whatever sizes they come in, and nowhere once detached."""

from hypothesis import given
from hypothesis import strategies as st

from workers.wire.stream import SCRATCH, Target


def fill(target: Target, data: bytes, at_once: int) -> int:
    """What `Stream.read` does with a socket that always has up to `at_once` bytes; returns how many were taken."""
    taken = 0
    while buffers := target.buffers():
        assert all(buffers), "an empty buffer would read as the peer's end"
        left = min(at_once, sum(map(len, buffers)))
        target.advance(left)
        for buffer in buffers:
            count = min(left, len(buffer))
            buffer[:count] = data[taken : taken + count]
            taken += count
            left -= count
    return taken


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 100))
def test_views_are_filled_in_order(sizes: list[int], at_once: int) -> None:
    data = bytes(index % 251 for index in range(sum(sizes)))
    memory = bytearray(sum(sizes))
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(memory)[start : start + size])
        start += size
    assert fill(Target(views), data, at_once) == len(data)
    assert memory == data


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 30), st.integers(0, 5))
def test_once_detached_nothing_is_written_and_the_rest_is_still_taken(
    sizes: list[int], at_once: int, reads_before: int
) -> None:
    memory = bytearray(sum(sizes))
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(memory)[start : start + size])
        start += size
    target = Target(views)
    taken = 0
    for _ in range(reads_before):
        if buffers := target.buffers():
            count = min(at_once, len(buffers[0]))
            target.advance(count)
            taken += count
    target.detach()
    assert fill(target, b"x" * sum(sizes), at_once) == sum(sizes) - taken
    assert memory == bytes(sum(sizes))


def test_nowhere_takes_more_than_its_scratch_memory() -> None:
    target = Target.nowhere(3 * len(SCRATCH) + 7)
    taken = 0
    while buffers := target.buffers():
        count = min(100_000, sum(map(len, buffers)))
        target.advance(count)
        taken += count
    assert taken == 3 * len(SCRATCH) + 7
