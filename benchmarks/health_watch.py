"""Times of `/health`, asked every 50 ms from a process of its own: whoever makes a load has enough to do.

How late that process's own sleeps end says how long the machine keeps anybody waiting.
"""

import http.client
import json
import select
import subprocess
import sys
import time
from typing import Any

EVERY_S = 0.05


class HealthWatch:
    """Asks from now on. `end` returns seconds: `p50`, `p99`, `max`, and `late`; `asked`, and what `failed`."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.health_watch", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end(self) -> dict[str, Any]:
        said, _ = self._process.communicate(timeout=60)
        figures: dict[str, Any] = json.loads(said)
        return figures


def watch(port: int) -> dict[str, Any]:
    """Ask until standard input ends."""
    took, late, failed = [0.0], [0.0], []
    while not select.select([sys.stdin], [], [], 0)[0]:
        start = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except OSError as error:
            failed.append(f"{type(error).__name__}: {error}")
        connection.close()
        took.append(time.monotonic() - start)
        start = time.monotonic()
        time.sleep(EVERY_S)
        late.append(time.monotonic() - start - EVERY_S)
    took.sort()
    seconds = {"p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100], "max": took[-1], "late": max(late)}
    return {"asked": len(took) - 1, "failed": failed, **{name: round(value, 4) for name, value in seconds.items()}}


if __name__ == "__main__":
    print(json.dumps(watch(int(sys.argv[1]))))
