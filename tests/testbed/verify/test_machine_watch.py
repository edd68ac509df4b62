"""Evidence beside a reason: what this machine did at that time, and not at another."""

import time

from testbed.verify.machine_watch import MachineWatch, Sample, evidence

# Two CPUs; from 102 to 103 half of their time was stolen, and somebody waited all the time.
SAMPLES = [Sample(100.0 + n, 2.0 * n, 1.0 if n >= 3 else 0.0, 1.0 if n >= 3 else 0.0) for n in range(8)]


def test_evidence_is_of_the_time_that_is_asked_about() -> None:
    at_the_time = evidence(SAMPLES, 102.2, 102.9)
    assert "took 50% of the CPU time" in at_the_time
    assert "waited for a CPU 100% of the time" in at_the_time
    later = evidence(SAMPLES, 105.1, 105.9)
    assert "took 0%" in later
    assert "waited for a CPU 0%" in later


def test_a_time_that_is_not_known_is_said_to_be_so() -> None:
    assert "not known any more" in evidence(SAMPLES[:1], 50.0, 60.0)


def test_it_samples_this_machine() -> None:
    watch, begin = MachineWatch(), time.time()
    end = begin + 0.2
    while time.time() < end:  # at least one CPU is busy
        pass
    assert "of the CPU time" in watch.evidence(begin, time.time())
