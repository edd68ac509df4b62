"""What sends probes is part of a busy machine, and must not make the link look worse than it is."""

import os
import signal
import time
from itertools import pairwise

import pytest

from testbed.verify.stamps import ProbePath

MS = 1_000_000

pytestmark = pytest.mark.root


def test_a_sender_that_stood_still_does_not_send_all_that_it_owes_at_once() -> None:
    """A burst of a hundred probes fills a slow link's queue, and what the queue drops looks like the link's loss."""
    sender = os.getpid()
    if os.fork() == 0:
        try:
            time.sleep(0.05)
            os.kill(sender, signal.SIGSTOP)
            time.sleep(0.1)
        finally:
            os.kill(sender, signal.SIGCONT)
            os._exit(0)
    with ProbePath(sender, sender, "127.0.0.1") as path:
        arrivals = path.send_evenly(200, MS) + path.collect(0.2)
    os.wait()
    stamps = sorted(arrival.received_ns for arrival in arrivals)
    assert len(stamps) == 200
    gap_ns, resumed = max((after - before, at) for at, (before, after) in enumerate(pairwise(stamps)))
    assert gap_ns > 80 * MS, "it stood still"
    soon = [stamp for stamp in stamps[resumed + 1 :] if stamp - stamps[resumed + 1] < 5 * MS]
    assert len(soon) < 15
