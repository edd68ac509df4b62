"""How a paced worker keeps its profile's times, on disk while it runs: `pace-HOST.json` in the records directory.

Whoever judges a run reads it (docs/engine.md, "Pacing"); a worker without a profile writes none.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from workers.engine import PaceCounts, Profile
from workers.linefile import Unwritten, replace_whole

log = logging.getLogger(__name__)

EVERY_S = 0.5


class PaceLog:
    """Keeps the file up to date. `counts` is asked for what there is to say."""

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
