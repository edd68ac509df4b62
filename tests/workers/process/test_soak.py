"""The soak of `benchmarks/serving_soak.py` in its short form: right answers, clients that leave, nothing held after."""

from benchmarks.serving_soak import run, verdict
from workers.models import LoadedModel


def test_a_hundred_requests_leave_nothing_behind(tiny: LoadedModel) -> None:
    found = run(tiny, requests=100, at_once=8, windows=3)
    # memory: the pools fill only during a run as short as this; what is left to see is megabytes a request
    assert verdict(found, growth_bytes=48 << 20) == []
    assert found["answered"] + found["clients_that_left"] == 100
    assert found["handed_over"] > 20
    assert found["clients_that_left"] > 3
