"""Account of this machine second by second: CPU time that the hypervisor took, and how long runnable processes waited.

It is the evidence beside a lab's reasons: an emulator that was late while the machine stood still was
not slow by itself.
Owns one thread; reads /proc only.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

KEPT_S = 7200
_EVERY_S = 1.0


class Sample(NamedTuple):
    """Sums since the machine started, at a time in seconds of the epoch."""

    time: float
    cpu_s: float
    stolen_s: float
    waiting_s: float  # some runnable process had no CPU (PSI)


class MachineWatch:
    """Samples until the process ends."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque([sample()], maxlen=KEPT_S)
        threading.Thread(target=self._run, name="machine-watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            with suppress(Exception):  # one second is not known then, the next one is
                self._samples.append(sample())

    def evidence(self, begin: float, end: float) -> str:
        """Evidence of the time from `begin` to `end`, in seconds of the epoch, in words."""
        return evidence([*self._samples, sample()], begin, end)


def evidence(samples: Iterable[Sample], begin: float, end: float) -> str:
    """In words: what was stolen and how long processes waited, of the samples around `begin` to `end`."""
    samples = list(samples)
    before = [one for one in samples if one.time <= begin]
    first = before[-1] if before else samples[0]
    last = next((one for one in samples if one.time >= end), samples[-1])
    if last.time <= first.time:
        return "this machine's load of that time is not known any more"
    stolen = (last.stolen_s - first.stolen_s) / max(last.cpu_s - first.cpu_s, 0.01)
    waiting = (last.waiting_s - first.waiting_s) / (last.time - first.time)
    taken = f"meanwhile the hypervisor took {stolen:.0%} of the CPU time"
    return f"{taken}, and processes waited for a CPU {waiting:.0%} of the time"


def sample() -> Sample:
    """This machine now."""
    times = psutil.cpu_times()
    return Sample(time.time(), sum(times), getattr(times, "steal", 0.0), _waiting_s())


def _waiting_s(pressure: Path = Path("/proc/pressure/cpu")) -> float:
    try:
        return int(pressure.read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError, ValueError):
        return 0.0  # a kernel without PSI
