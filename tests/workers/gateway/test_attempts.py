"""What a loss means for an attempt, and what a replay is: pure decisions."""

import pytest

from workers.gateway.attempts import Attempt, LiveRequest, Taken
from workers.gateway.merge import MergedToken
from workers.policy import Route
from workers.records import RequestLog
from workers.roles.request import RequestFailed
from workers.wire.messages import RequestSpec, SamplingSpec, Without

RELAYED = Route("p-rld-md", "p0", "rld0", "md0", "why")
LOST = RequestFailed("worker_lost", "gone")


def attempt(route: Route = RELAYED) -> Attempt:
    spec = RequestSpec(
        id="r",
        gateway="gw0",
        prefill=route.prefill,
        relay=route.relay,
        main=route.main,
        prompt=[1, 2, 3],
        sampling=SamplingSpec(max_tokens=10, temperature=0.7, seed=5, presence_penalty=1, answer_from=3),
        deadline_s=900,
    )
    return Attempt(spec, route)


def _as_they_come(tokens: list[MergedToken]) -> Taken:
    return Taken("", tokens, tokens[-1].finish_reason)


def request(route: Route = RELAYED) -> LiveRequest:
    return LiveRequest(attempt(route), RequestLog("r", "tiny", route, 3, "one-shot", 0.0, 0), _as_they_come)


def test_the_relay_goes_on_first_then_main_decode_then_nobody() -> None:
    one = attempt()
    assert one.decoders == ["rld0", "md0"]
    one.gone["rld0"] = LOST
    assert one.decoders == ["md0"]
    one.unsettled.discard("md0")
    assert one.decoders == []


def test_alone_is_whoever_prefills() -> None:
    one = attempt(Route("md", "md0", None, None, "why"))
    assert one.decoders == ["md0"]
    one.gone["md0"] = LOST
    assert one.decoders == []


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("p0", {"rld0": [], "md0": []}),
        ("rld0", {"p0": [], "md0": [7, 8]}),
        ("md0", {"p0": [], "rld0": []}),
    ],
)
def test_everyone_else_is_told_and_only_who_takes_over_gets_the_ids(lost: str, told: dict[str, list[int]]) -> None:
    one = attempt()
    one.gone[lost] = LOST
    messages = dict(one.without(lost, [7, 8], None))
    assert {name: message.ids for name, message in messages.items() if isinstance(message, Without)} == told
    assert all(message.lost == lost for message in messages.values() if isinstance(message, Without))


def test_who_has_let_go_or_is_gone_is_told_nothing() -> None:
    one = attempt()
    one.unsettled.discard("p0")
    one.gone["rld0"] = LOST
    assert [name for name, _ in one.without("rld0", [], None)] == ["md0"]


def test_a_replay_goes_on_where_the_answer_is() -> None:
    live = request()
    live.merge.offer(3, [7, 8], None, "rld0")
    live.merge.offer(6, [10, 11], "stop", "md0")  # position 5 was lost on its way
    again = live.replay(Route("p-rld", "p0", "rld0", None, "why"), 60.0)
    assert again.spec.id == "r.1"
    assert again.spec.prompt == [1, 2, 3, 7, 8]
    assert again.spec.sampling == SamplingSpec(max_tokens=8, temperature=0.7, seed=5, presence_penalty=1, answer_from=3)
    assert (again.spec.relay, again.spec.main, again.spec.deadline_s) == ("rld0", None, 60.0)
    assert live.attempt is again
    assert live.answered_in(again) == []
    assert live.answered_in(live.attempts[0]) == [7, 8]
    ready = live.merge.offer(5, [9, 12], None, "rld0")
    assert [token.token_id for token in ready] == [9, 12], "behind a gap the replay's tokens stand, and its end"
    assert not live.merge.finished
    third = live.replay(RELAYED, 60.0)
    assert third.spec.id == "r.2"
    assert third.spec.prompt == [1, 2, 3, 7, 8, 9, 12]
    assert live.log.replays == 2


def test_the_record_has_one_entry_a_loss_with_who_went_on_in_the_end() -> None:
    live = request()
    live.note_loss("md0", LOST)
    live.note_recovery("goes-on", ["rld0"])
    live.note_recovery("replay", ["p0", "rld0"])
    (entry,) = live.log.recovery
    assert (entry["lost"], entry["error"], entry["how"], entry["by"]) == (
        "md0",
        "worker_lost",
        "replay",
        ["p0", "rld0"],
    )
    assert live.log.record()["pdd_recovery"] == [entry]
