"""Host memory for a pool that lives on an accelerator: where the wire reads and writes its blocks.

The wire needs bytes that the kernel can read, so a block is copied here before it is sent, and from here after it has
been received. Copies have a stream of their own: they do not wait for the step that is being computed, and what they
copy is final (`Engine.compute` returns when the device has finished). They are timed with device events, so a report
can tell them from the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class CopyCount:
    """Copies in one direction; `ns` by the device's clock."""

    copies: int = 0
    bytes: int = 0
    ns: int = 0

    def add(self, size: int, ns: int) -> None:
        self.copies += 1
        self.bytes += size
        self.ns += ns


def needs_staging(device: torch.device) -> bool:
    """True if the kernel cannot read the device's memory."""
    return device.type != "cpu"


class HostStage:
    """Page-locked memory of the same layout as `storage [blocks, ...]`, and the copies between the two."""

    def __init__(self, storage: Tensor) -> None:
        size = storage.numel() * storage.element_size()
        cuda = storage.device.type == "cuda"
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=cuda)
        self.bytes: memoryview = host.numpy().data
        self.fetched, self.stored = CopyCount(), CopyCount()
        """Device to host, and host to device."""
        self._device = storage
        self._host = host.view(storage.dtype).view(storage.shape)
        self._timed: Callable[[Callable[[], None]], int] = _CudaClock(storage.device) if cuda else _host_clock

    def fetch(self, blocks: Iterable[int]) -> int:
        """Bring blocks from the device; returns how long that took (ns)."""
        return self._copy(self._device, self._host, blocks, self.fetched)

    def store(self, blocks: Iterable[int]) -> int:
        """Bring blocks to the device; returns how long that took (ns). When it returns, steps to come see them."""
        return self._copy(self._host, self._device, blocks, self.stored)

    def _copy(self, source: Tensor, target: Tensor, blocks: Iterable[int], count: CopyCount) -> int:
        runs = _runs(blocks)

        def copy() -> None:
            for first, end in runs:
                target[first:end].copy_(source[first:end], non_blocking=True)

        ns = self._timed(copy)
        each = source[0].numel() * source.element_size()
        count.add(each * sum(end - first for first, end in runs), ns)
        return ns


class _CudaClock:
    """Runs copies on a stream of their own, waits for them, and says how long the device took."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def __call__(self, copy: Callable[[], None]) -> int:
        with torch.cuda.stream(self._stream):
            self._begin.record()
            copy()
            self._end.record()
        self._end.synchronize()
        return round(self._begin.elapsed_time(self._end) * 1e6)


def _host_clock(copy: Callable[[], None]) -> int:
    began_ns = time.perf_counter_ns()
    copy()
    return time.perf_counter_ns() - began_ns


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Neighbouring blocks as (first, end): each run is one copy."""
    runs: list[tuple[int, int]] = []
    for block in sorted(set(blocks)):
        if runs and runs[-1][1] == block:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return runs
