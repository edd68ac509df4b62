"""A worker's own records: what it has sent and received (`bytes-HOST.jsonl`), how it keeps its profile's times
(`pace-HOST.json`).
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from workers.engine import PaceCounts, Profile
from workers.linefile import LineFile, Unwritten, replace_whole
from workers.wire.frames import Counters


class ByteLog:
    """Byte counters in a records directory (None: nowhere): a JSON line each time one is asked for (SIGUSR1) and at the
    end. They are cumulative; whoever compares two lines knows what crossed between them.
    """

    def __init__(self, directory: Path | None, host: str, counters: Counters, unwritten: Unwritten) -> None:
        self._file = None if directory is None else LineFile(directory / f"bytes-{host}.jsonl", "bytes", unwritten)
        self._host = host
        self._counters = counters

    def write(self) -> None:
        """Append everything counted so far; never fails. `time_ns` is Unix time, as packet captures have it."""
        if self._file is None:
            return
        line = {
            "host": self._host,
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
            "counts": self._counters.rows(),
        }
        self._file.write(json.dumps(line).encode())


log = logging.getLogger(__name__)

EVERY_S = 0.5


class PaceLog:
    """The pace of a worker that has a profile, up to date while it runs; whoever judges a run reads it (docs/engine.md,
    "Pacing"). `counts` is asked for what there is to say.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        profile: Profile,
        counts: Callable[[], PaceCounts],
        unwritten: Unwritten,
    ) -> None:
        self._file = directory / f"pace-{host}.json"
        self._host = host
        self._profile = profile
        self._counts = counts
        self._unwritten = unwritten
        self._written: PaceCounts | None = None

    async def keep(self) -> None:
        """Write whenever something has changed, until cancelled."""
        while True:
            try:
                self.write()
            except Exception:  # the next time perhaps not; the file is old meanwhile, and its time says so
                log.exception("how paced steps are kept could not be written")
            await asyncio.sleep(EVERY_S)

    def write(self) -> None:
        """The whole file at once, so that a reader never sees half of it."""
        counts = self._counts()
        if counts == self._written:
            return
        row = {
            "host": self._host,
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "profile": self._profile.name,
            **counts.row(),
        }
        if replace_whole(self._file, json.dumps(row) + "\n", "pace", self._unwritten):
            self._written = counts
