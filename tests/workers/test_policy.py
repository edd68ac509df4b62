"""Which workers a request gets: pure decisions, no network."""

from dataclasses import replace

import pytest

from workers.policy import (
    BUSY_TOKENS,
    NoRoute,
    Route,
    WorkerView,
    alone_route,
    choose_route,
    pipeline_for,
    route_around,
    route_for,
)


def view(name: str, role: str, active: int = 0, connected: str = "", matched: int = 0) -> WorkerView:
    return WorkerView(name, role, active, frozenset(connected.split()), matched)


WORKERS = [
    view("p0", "prefill", 2, "rld0 rld1 md0 md1"),
    view("p1", "prefill", 1, "rld0 rld1 md0 md1"),
    view("rld0", "relay-decode", 0, "md0 md1"),
    view("rld1", "relay-decode", 0, "md0 md1"),
    view("md0", "main-decode", 3),
    view("md1", "main-decode", 2),
]


def test_the_hit_rate_chooses_the_pipeline_of_pdd() -> None:
    assert pipeline_for("pdd", 0.951, 0.95)[0] == "p-md"
    assert pipeline_for("pdd", 0.95, 0.95) == ("p-rld-md", "hit rate 95.0% is not above 95.0%")
    assert [pipeline_for(policy, 0.0, 0.95)[0] for policy in ("cdc-pd", "idc-pd", "single")] == ["p-md", "p-rld", "p"]


def test_the_least_busy_worker_of_each_role_is_taken_ties_by_name() -> None:
    assert choose_route("p-rld-md", "why", WORKERS) == Route("p-rld-md", "p1", "rld0", "md1", "why")
    assert choose_route("p-md", "", WORKERS).workers == ("p1", "md1")
    assert choose_route("p-rld", "", WORKERS).workers == ("p1", "rld0")
    assert choose_route("p", "", WORKERS).workers == ("p1",)


def test_a_prefill_that_reaches_nobody_is_passed_over() -> None:
    lonely = [view("p9", "prefill", 0, ""), *WORKERS]
    assert choose_route("p-rld-md", "", lonely).prefill == "p1"


def test_main_decode_must_be_reached_by_the_relay_too() -> None:
    workers = [view("p0", "prefill", 0, "rld0 md0 md1"), view("rld0", "relay-decode", 0, "md1"), *WORKERS[4:]]
    assert choose_route("p-rld-md", "", workers).main == "md1"


def test_a_prefill_is_given_a_relay_of_its_own_datacenter_only() -> None:
    here, there = (
        [
            replace(view(f"p-{name}", "prefill", busy, "rld-a rld-b md0"), datacenter=name),
            replace(view(f"rld-{name}", "relay-decode", 0, "md0"), datacenter=name),
        ]
        for name, busy in (("a", 1), ("b", 0))
    )
    main = replace(view("md0", "main-decode"), datacenter="c")
    for pipeline in ("p-rld-md", "p-rld"):
        assert choose_route(pipeline, "", [*here, *there, main]).workers[:2] == ("p-b", "rld-b")
        assert choose_route(pipeline, "", [*here, there[0], main]).workers[:2] == ("p-a", "rld-a")
        with pytest.raises(NoRoute, match="p-a reaches no relay-decode worker of its datacenter a"):
            choose_route(pipeline, "", [here[0], there[1], main])
    route = route_around("pdd", 0.95, 100, [here[0], there[1], main])
    assert (route.pipeline, route.workers) == ("p-md", ("p-a", "md0"))


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ([], "no prefill worker is connected"),
        ([view("p0", "prefill", 0, "md0"), view("md0", "main-decode")], "p0 reaches no relay-decode worker"),
        (
            [view("p0", "prefill", 0, "rld0 md0"), view("rld0", "relay-decode"), view("md0", "main-decode")],
            "p0 and rld0 reach no main-decode worker",
        ),
    ],
)
def test_what_is_missing_is_named(workers: list[WorkerView], missing: str) -> None:
    with pytest.raises(NoRoute, match=missing):
        choose_route("p-rld-md", "", workers)


def warm(matched: dict[str, int], active: dict[str, int] | None = None) -> list[WorkerView]:
    """Two of each role, all connected, with so many tokens of the prompt in their caches."""
    everyone = "rld0 rld1 md0 md1"
    roles = {"p": "prefill", "rld": "relay-decode", "md": "main-decode"}
    return [
        view(name, roles[name[:-1]], (active or {}).get(name, 0), everyone, matched.get(name, 0))
        for name in ("p0", "p1", *everyone.split())
    ]


def test_who_holds_the_prompt_is_chosen_and_main_decodes_cache_decides_about_the_relay() -> None:
    route = route_for("pdd", 0.95, 1000, warm({"p1": 640, "md1": 960, "rld1": 16}))
    assert route == Route("p-md", "p1", None, "md1", "hit rate 96.0% is above 95.0%", 0.96)
    route = route_for("pdd", 0.95, 1000, warm({"p1": 640, "md1": 944, "rld1": 16}))
    assert route == Route("p-rld-md", "p1", "rld1", "md1", "hit rate 94.4% is not above 95.0%", 0.944)
    assert route_for("cdc-pd", 0.95, 1000, warm({"md1": 320})).hit_rate == 0.32
    assert route_for("idc-pd", 0.95, 1000, warm({"md1": 320})).hit_rate == 0.0


def test_a_cache_is_left_when_its_worker_is_busier_by_more_than_the_cache_is_worth() -> None:
    for busy, chosen in ((3, "md1"), (5, "md0")):
        route = route_for("pdd", 0.95, 1100, warm({"md1": 4 * BUSY_TOKENS}, {"md1": busy}))
        assert route.main == chosen


def test_new_sessions_spread_over_idle_workers() -> None:
    """Each stays where it began: were ties decided by name, the first worker would get every one of them."""
    idle = [replace(one, cached=5000 if one.name in ("p0", "md0") else 3000) for one in warm({})]
    route = route_for("cdc-pd", 0.95, 1100, idle)
    assert (route.prefill, route.main) == ("p1", "md1")


def test_how_much_a_request_weighs_can_be_chosen() -> None:
    for weight, chosen in ((BUSY_TOKENS, "md0"), (16, "md1")):
        views = [replace(one, busy_tokens=weight) for one in warm({"md1": 200}, {"md1": 3})]
        assert route_for("pdd", 0.95, 1100, views).main == chosen


@pytest.mark.parametrize(
    ("policy", "missing", "expected"),
    [
        ("pdd", "", ("p-rld-md", "p0", "rld0", "md0")),
        ("pdd", "md", ("p-rld", "p0", "rld0", None)),
        ("pdd", "rld", ("p-md", "p0", None, "md0")),
        ("pdd", "p", ("md", "md0", None, None)),
        ("pdd", "p md", ("rld", "rld0", None, None)),
        ("pdd", "rld md", ("p", "p0", None, None)),
        ("cdc-pd", "md", ("rld", "rld0", None, None)),
        ("cdc-pd", "p", ("md", "md0", None, None)),
        ("idc-pd", "rld", ("md", "md0", None, None)),
        ("single", "p", ("md", "md0", None, None)),
    ],
)
def test_who_is_left_serves(policy: str, missing: str, expected: tuple[str | None, ...]) -> None:
    there = [one for one in warm({}) if one.name.rstrip("01") not in missing.split()]
    route = route_around(policy, 0.95, 100, there)
    assert (route.pipeline, route.prefill, route.relay, route.main) == expected
    if missing:
        assert "no " in route.reason, "the reason says what is missing"


def test_nobody_left_is_one_sentence() -> None:
    with pytest.raises(
        NoRoute, match="no prefill worker is connected to the gateway; nor is one that could serve alone"
    ):
        route_around("pdd", 0.95, 100, [])
    with pytest.raises(NoRoute, match="no main-decode worker is connected; nor is one"):
        route_for("prfaas", 0.95, 100, [])


def test_alone_serves_whose_cache_holds_most_then_main_decode() -> None:
    there = [one for one in warm({"rld1": 64}) if one.role != "prefill"]
    assert route_around("pdd", 0.95, 100, there).pipeline == "rld"
    assert route_around("pdd", 0.95, 100, there).prefill == "rld1"
    assert alone_route(("prefill", "relay-decode"), "why", warm({})).workers == ("p0",)
