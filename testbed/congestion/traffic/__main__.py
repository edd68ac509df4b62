"""`python -m testbed.congestion.traffic`: the first line of standard input says what to be.

{"be": "receiver", "protocol", "address", "flows"}           -> {"port"} ... (any line, or the end) -> the report
{"be": "sender", ...}  -> {"ready"}; {"start_ns"}            ... (over, or any line, or the end)    -> the report
"""

import json
import os
import sys
from contextlib import suppress
from typing import Any

from workers.linux import set_timer_slack

_NICE = -10  # others' traffic would not wait for this machine's workers


def main() -> None:
    set_timer_slack()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    wanted = json.loads(sys.stdin.readline())
    if wanted["be"] == "receiver":
        from testbed.congestion.traffic.receive import Receiver

        receiver = Receiver(wanted["protocol"], wanted["address"], wanted["flows"])
        _say({"port": receiver.port})
        _say(receiver.run())
        return
    from testbed.congestion.traffic.send import make_flows, send

    flows = make_flows(wanted)
    _say({"ready": True})
    line = sys.stdin.readline()
    if line.strip():
        _say(send(flows, json.loads(line)["start_ns"], wanted["duration_ns"]))


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
