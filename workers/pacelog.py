"""How a paced worker keeps its profile's times, on disk while it runs: `pace-HOST.json` in the records directory.

Whoever judges a run reads it (docs/engine.md, "Pacing"); a worker without a profile writes none.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from workers.engine import PaceCounts, Profile

EVERY_S = 0.5


class PaceLog:
    """Keeps the file up to date. `counts` is asked for what there is to say."""

    def __init__(self, directory: Path, host: str, profile: Profile, counts: Callable[[], PaceCounts]) -> None:
        self._file = directory / f"pace-{host}.json"
        self._host = host
        self._profile = profile
        self._counts = counts
        self._written: PaceCounts | None = None

    async def keep(self) -> None:
        """Write whenever something has changed, until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(EVERY_S)

    def write(self) -> None:
        """The whole file at once, so that a reader never sees half of it."""
        counts = self._counts()
        if counts == self._written:
            return
        self._written = counts
        row = {
            "host": self._host,
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "profile": self._profile.name,
            **counts.row(),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        whole = self._file.with_suffix(".tmp")
        whole.write_text(json.dumps(row) + "\n")
        whole.replace(self._file)
