"""Traces are read from every format, or refused with line and reason; generated ones have the hit rates asked for."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.traces import Request, Trace, TraceError, read_trace
from experiments.traces.generate import Recipe, generate
from experiments.traces.hit_rates import DISTRIBUTIONS, MEAN_MATCHED, SKEWED, STRATUM, UNIFORM, draw, share_above
from experiments.traces.mooncake import write_trace
from experiments.traces.prompts import PromptMaker
from experiments.traces.stats import hits, stats

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def line(**changes: object) -> dict[str, object]:
    row: dict[str, object] = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    return {key: value for key, value in {**row, **changes}.items() if value is not ...}


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_generated_trace_is_the_same_after_writing_and_reading(tmp_path: Path, name: str) -> None:
    made = generate(Recipe(requests=40, sessions=4))
    write_trace(made, tmp_path / name)
    assert read_trace(tmp_path / name).sha256 == made.sha256
    assert generate(Recipe(requests=40, sessions=4, seed=2)).sha256 != made.sha256


def test_requests_are_ordered_by_time_and_keep_their_sessions(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "t.jsonl", line(timestamp=7.5, session=1, turn=0), line(timestamp=2, session=0, turn=3))
    found = read_trace(file)
    assert [(r.time_ns, r.session, r.turn) for r in found.requests] == [(2_000_000, 0, 3), (7_500_000, 1, 0)]
    assert found.block_tokens == 512


@pytest.mark.parametrize("count", [15, 16])
def test_the_last_block_in_part_may_have_an_id_or_none(tmp_path: Path, count: int) -> None:
    file = jsonl(tmp_path / "t.jsonl", line(input_length=1000, hash_ids=list(range(count))))
    assert read_trace(file).block_tokens == 64


WRONG = {
    "not JSON": ('{"timestamp": 0, "input_le', "not JSON"),
    "a list": ("[1]", "a JSON list where"),
    "no length": (line(input_length=...), '"input_length" is missing'),
    "a negative length": (line(input_length=-1), '"input_length" is -1'),
    "true is no number": (line(output_length=True), '"output_length" is True'),
    "a fraction": (line(output_length=1.5), '"output_length" is 1.5'),
    "a time in words": (line(timestamp="noon"), "\"timestamp\" is 'noon'"),
    "time before the beginning": (line(timestamp=-1), '"timestamp" is -1'),
    "not a number": ('{"timestamp": NaN, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}', "is nan"),
    "no ids": (line(hash_ids=...), '"hash_ids" is None'),
    "ids in words": (line(hash_ids=[1, "2"]), "\"hash_ids\" has '2'"),
    "too few ids": (line(hash_ids=[]), '0 "hash_ids" for a prompt of 1000 tokens'),
    "too deep": ("[" * 100_000, "nested too deeply"),
    "a session in words": (line(session="a"), "\"session\" is 'a'"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_line_is_refused_with_its_number_and_reason(tmp_path: Path, mistake: str) -> None:
    row, reason = WRONG[mistake]
    file = jsonl(tmp_path / "t.jsonl", line(), line(), "", row, line())
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert str(caught.value).startswith(f"{file}:4: ")
    assert reason in str(caught.value)


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(line(timestamp=i)).encode() + b"\n" for i in range(1000)))
    (tmp_path / "t.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz:\d+: the compressed file is truncated"):
        read_trace(tmp_path / "t.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.jsonl.gz", b"plain", "not a gzip file"),
        ("t.jsonl", b"\xff\xfe\x00", "not UTF-8"),
        ("t.jsonl", b"", "holds no request"),
        ("t.parquet", b"PAR1", "which format is it"),
        ("t.csv", b"a,b\n1,2\n", ":1: the first line must name the columns"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_trace(tmp_path / name)
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "absent.jsonl")


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_azure_traces_have_times_and_sizes_and_share_nothing(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,4808,10\n2023-11-16 18:15:50.9951690,3180,8\n2023-11-16 18:15:45,16,1\n"
    (tmp_path / "t.csv").write_text(AZURE + rows)
    found = read_trace(tmp_path / "t.csv")
    assert [(r.time_ns, r.input_tokens, r.output_tokens) for r in found.requests] == [
        (0, 16, 1),
        (1_680_590_000, 4808, 10),
        (5_995_169_000, 3180, 8),
    ]
    assert stats(found).weighted_hit == 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,4808", "2 columns instead of 3"),
        ("yesterday,1,1", "TIMESTAMP is 'yesterday'"),
        ("2023-13-16 18:15:46,1,1", "TIMESTAMP is"),
        ("2023-11-16 18:15:46,,1", "ContextTokens is ''"),
        ("2023-11-16 18:15:46,5,-1", "GeneratedTokens is '-1'"),
    ],
)
def test_a_wrong_azure_line_is_refused_with_its_number(tmp_path: Path, row: str, reason: str) -> None:
    (tmp_path / "t.csv").write_text(f"{AZURE}2023-11-16 18:15:46,5,1\n{row}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path / "t.csv")
    assert ":3: " in str(caught.value)
    assert reason in str(caught.value)


def conversation(scope: str = "local", **changes: object) -> dict[str, object]:
    requests = [
        {"t": 0.0, "type": "n", "in": 130, "out": 3, "hash_ids": [1, 2, 3]},
        {"t": 2.5, "type": "subagent", "requests": [{"t": 0.5, "type": "s", "in": 64, "out": 1, "hash_ids": [9]}]},
        {"t": 9.0, "type": "n", "in": 200, "out": 3, "hash_ids": [1, 2, 4]},
    ]
    return {"id": "c", "block_size": 64, "hash_id_scope": scope, "requests": requests, **changes}


@pytest.mark.parametrize(("scope", "shared"), [("local", 0), ("global", 129)])
def test_agentic_conversations_are_read_subagents_included(tmp_path: Path, scope: str, shared: int) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(conversation(scope)))
    found = read_trace(tmp_path)
    assert [r.time_ns for r in found.requests] == [0, 0, 3 * 10**9, 3 * 10**9, 9 * 10**9, 9 * 10**9]
    assert {r.session for r in found.requests} == {0, 1}
    second_first = hits(found)[1]
    assert second_first.cached_tokens == shared  # the last block in part has an id; the last token is computed
    last = hits(found)[-1]
    assert last.cached_tokens == (192 if scope == "global" else 128)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 0}, '"block_size" is 0'),
        ({"hash_id_scope": "moon"}, "\"hash_id_scope\" is 'moon'"),
        ({"requests": {}}, '"requests" is not a list'),
        ({"requests": [{"t": "x"}]}, r'requests\[0\]: "t" is'),
        ({"requests": [{"t": 1, "in": 64, "out": 0, "hash_ids": [1, 2, 3]}]}, r"requests\[0\]: 3 \"hash_ids\""),
        ({"requests": []}, "holds no request"),
    ],
)
def test_a_wrong_conversation_is_refused_with_its_place(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(conversation(**changes)))  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=reason):
        read_trace(tmp_path)


def test_a_conversation_that_is_cut_short_is_refused_with_its_line(tmp_path: Path) -> None:
    text = json.dumps(conversation(), indent=1)
    (tmp_path / "a.json").write_text(text[: len(text) // 2])
    with pytest.raises(TraceError, match=r"a\.json:\d+: not JSON"):
        read_trace(tmp_path)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_generated_prompts_hit_as_often_as_their_distribution_says(name: str) -> None:
    recipe = Recipe(name, requests=320, sessions=8)
    found = hits(generate(recipe))
    assert all(hit.cached_tokens == 0 for hit in found[: recipe.warm_up])
    measured = [1 - hit.rate for hit in found[recipe.warm_up :]]
    wanted = draw(DISTRIBUTIONS[name], 320, recipe.seed)
    for miss, asked in zip(measured, wanted, strict=True):
        assert abs(miss - asked) <= 16 / 4096  # whole blocks; a prompt's last token is never cached


def test_the_named_distributions_are_what_they_claim() -> None:
    assert 0.02 <= SKEWED.median <= 0.03
    assert UNIFORM.mean == UNIFORM.median == 0.5
    assert abs(MEAN_MATCHED.mean - SKEWED.mean) < 1e-12
    assert abs(DISTRIBUTIONS["ninety"].mean - 0.10) < 1e-3
    for seed in range(1, 20):
        assert 0.70 <= share_above(draw(SKEWED, 512, seed), 0.95) <= 0.80


@given(st.sampled_from(sorted(DISTRIBUTIONS)), st.integers(0, 1000), st.integers(1, 8))
def test_every_group_of_sixteen_holds_one_of_each_sixteenth(name: str, seed: int, groups: int) -> None:
    rates = DISTRIBUTIONS[name]
    drawn = draw(rates, groups * STRATUM, seed)
    for start in range(0, len(drawn), STRATUM):
        for index, miss in enumerate(sorted(drawn[start : start + STRATUM])):
            assert rates.at(index / STRATUM) - 1e-9 <= miss <= rates.at((index + 1) / STRATUM) + 1e-9


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=2, max_size=5), st.sampled_from([4, 8, 16])
)
def test_equal_block_ids_are_equal_tokens_and_others_are_not(chains: list[list[int]], block_tokens: int) -> None:
    requests = tuple(Request(i, len(chain) * 16, 1, tuple(chain)) for i, chain in enumerate(chains))
    maker = PromptMaker(Trace(requests, 16, "test", "test"), range(32, 127), block_tokens)
    prompts = [maker.prompt(request) for request in requests]
    for chain, prompt in zip(chains, prompts, strict=True):
        assert len(prompt) == len(chain) * block_tokens
        blocks = [tuple(prompt[at : at + block_tokens]) for at in range(0, len(prompt), block_tokens)]
        for one, other in ((i, j) for i in range(len(chain)) for j in range(len(chain))):
            assert (chain[one] == chain[other]) == (blocks[one] == blocks[other])


def test_a_tail_without_an_id_is_nobody_elses() -> None:
    requests = (Request(0, 40, 1, (1, 2)), Request(1, 40, 1, (1, 2)))
    maker = PromptMaker(Trace(requests, 16, "test", "test"), range(32, 127))
    one, other = (maker.prompt(request) for request in requests)
    assert len(one) == 40
    assert one[:32] == other[:32]
    assert one[32:] != other[32:]


def test_a_last_block_in_part_that_has_an_id_hits_like_any_other() -> None:
    rows = (Request(0, 40, 1, (1, 2, 3)), Request(1, 40, 0, (1, 2, 3)), Request(2, 60, 1, (1, 2, 4, 5)))
    trace = Trace(rows, 16, "test", "test")
    assert [hit.cached_tokens for hit in hits(trace)] == [0, 39, 32], "all but the last token, which is computed"
    found = stats(trace)
    assert found.median_hit == 32 / 60
    assert found.weighted_hit == 71 / 140
    assert found.without_answer == 1


def test_a_bounded_cache_forgets() -> None:
    def request(time_ns: int, first: int) -> Request:
        return Request(time_ns, 64, 1, tuple(range(first, first + 4)))

    trace = Trace((request(0, 0), request(1, 100), request(2, 0)), 16, "test", "test")
    assert [hit.cached_tokens for hit in hits(trace)] == [0, 0, 63]
    assert [hit.cached_tokens for hit in hits(trace, cache_tokens=64)] == [0, 0, 0]


@pytest.mark.skipif(not SHARED.exists(), reason="shared/traces is not beside the project")
def test_the_real_traces_are_read_and_have_the_hit_rates_that_were_measured_elsewhere() -> None:
    agentic = stats(read_trace(SHARED / "agentic-coding-a.jsonl.gz"))
    assert (agentic.requests, agentic.sessions, agentic.block_tokens) == (3209, 60, 64)
    assert abs(agentic.mean_hit - 0.945) < 0.001
    assert abs(agentic.share_above_95 - 0.855) < 0.001
    mooncake = stats(read_trace(SHARED / "mooncake_conversation_trace.jsonl.gz"))
    assert abs(mooncake.weighted_hit - 0.3736) < 0.0001, "by blocks as the file names them, partial ones included"
    assert abs(mooncake.median_hit - 0.363) < 0.001
