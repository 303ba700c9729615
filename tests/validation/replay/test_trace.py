"""What is kept of a trace, what is refused, and the shapes of the built-in traces."""

from __future__ import annotations

import itertools
import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pytest

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.block_kind import BlockKind
from semblend_trt.fleet.telemetry import TraceBlock
from validation.replay import trace as trace_module
from validation.replay.trace import WORKLOADS, Observation, Trace, TraceFormat, trace_file, trace_of, workload_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from semblend_trt.fleet.telemetry import TraceLine


def uses(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    """The blocks of each request by content, and by all before them."""
    by_span, by_prefix = (
        [request for _, request in trace.requests(as_prefixes=as_prefixes)] for as_prefixes in (False, True)
    )
    return by_span, by_prefix


def test_blocks_are_told_apart_by_content_or_by_all_before(line: Callable[..., TraceLine]) -> None:
    trace = trace_of([line(0, "ab", [1, 2]), line(1, "cb", [3, 2]), line(2, "ab", [1, 2])])
    assert uses(trace) == ([[0, 1], [2, 1], [0, 1]], [[0, 1], [2, 3], [0, 1]])
    assert list(trace.prefixes.parents) == [-1, 0, -1, 2]
    assert (len(trace), trace.block_uses, trace.prompt_tokens()) == (3, 6, [3, 5, 3])


@pytest.mark.parametrize(
    "other",
    [{"tenant": "b"}, {"tenant": None}, {"tenant": "a", "model_name": "another"}, {"tenant": "a", "tokens": [6]}],
)
def test_other_tenants_models_and_lengths_share_nothing(
    line: Callable[..., TraceLine], other: dict[str, object]
) -> None:
    first = {"contents": ["x"], "tokens": [5], "tenant": "a"}
    trace = trace_of([line(0, **first), line(1, **(first | other)), line(2, **first)])
    assert uses(trace) == ([[0], [1], [0]], [[0], [1], [0]])


def test_a_block_without_content_is_not_shared_and_ends_the_prefix(line: Callable[..., TraceLine]) -> None:
    trace = trace_of([line(0, ["a", None, "b"], [1, 2, 3])] * 2)
    assert uses(trace) == ([[0, -1, 1]] * 2, [[0, -1, -1]] * 2)


def test_what_has_no_tokens_is_left_out(line: Callable[..., TraceLine]) -> None:
    trace = trace_of([line(0, "ab", [0, 2]), line(1, "a", [0]), line(2, "", []), line(3, "cb", [0, 2])])
    assert (uses(trace), trace.empty) == (([[0], [0]], [[0], [0]]), 2)


def test_text_stands_for_a_missing_hash(line: Callable[..., TraceLine]) -> None:
    said = [TraceBlock(text=text, token_count=2) for text in ("same", "same", "other")]
    assert uses(trace_of([line(0, [], [], blocks=said)]))[0] == [[0, 0, 1]]


def test_requests_are_replayed_in_the_order_of_their_times(line: Callable[..., TraceLine]) -> None:
    trace = trace_of([line(2, "a", [1]), line(1, "b", [2]), line(1, "c", [3])])
    assert [seconds for seconds, _ in trace.requests(as_prefixes=False)] == [1.0, 1.0, 2.0]
    assert trace.prompt_tokens() == [2, 3, 1]


def test_what_was_observed_is_kept_where_it_says_enough(line: Callable[..., TraceLine]) -> None:
    enough = {"observed_ttft_ms": 30.0, "observed_prefill_tokens": 90, "observed_prefix_hit_tokens": 30}
    changes: list[dict[str, object]] = [
        {},
        *({"observed_ttft_ms": None}, {"observed_prefill_tokens": None}, {"observed_total_latency_ms": 30.0}),
        *({"metadata": {"status": 503}}, {"metadata": {"status": 200, "prompt_tokens": 150}}),
    ]
    trace = trace_of([line(index, "a", [100], **(enough | change)) for index, change in enumerate(changes)])
    assert trace.observations == [Observation(30.0, 90, 30), Observation(30.0, 90, 60)]
    assert trace.observed_over_counted == pytest.approx(1.35)


# Lines of Mooncake's conversation trace.
MOONCAKE = """
{"timestamp": 90000, "input_length": 1902, "output_length": 654, "hash_ids": [0, 975, 976, 977]}
{"timestamp": 108000, "input_length": 1661, "output_length": 93, "hash_ids": [0, 5021, 7897, 7898]}
{"timestamp": 168000, "input_length": 1902, "output_length": 661, "hash_ids": [0, 975, 976, 977]}
"""
# The beginning of Azure's conversation trace, with its line ends.
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109"
)


def session(name: str, requests: list[dict[str, object]], scope: str = "local") -> str:
    return json.dumps({"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": scope, "requests": requests})


def turn(seconds: float, tokens: int, *ids: int) -> dict[str, object]:
    return {"t": seconds, "type": "n", "model": "m", "in": tokens, "out": 9, "hash_ids": ids, "stop": "tool_use"}


def read(tmp_path: Path, content: str, requests: int | None = None) -> Trace:
    path = tmp_path / "trace"
    path.write_bytes(content.encode())
    return trace_file(path, requests)


def test_mooncakes_lines_are_blocks_of_512_tokens(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE)
    assert (trace.form, trace.skipped.counts) == (TraceFormat.MOONCAKE, {})
    assert list(trace.requests(as_prefixes=True)) == [(90, [0, 1, 2, 3]), (108, [0, 4, 5, 6]), (168, [0, 1, 2, 3])]
    assert list(trace.prefixes.tokens) == [512, 512, 512, 366, 512, 512, 125]
    assert trace.prompt_tokens() == [1902, 1661, 1902]
    assert trace.held_prefix_blocks == 5
    assert len(read(tmp_path, MOONCAKE, 2)) == 2


def test_azures_rows_are_prompts_that_share_nothing(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    assert (trace.form, trace.prompt_tokens(), trace.skipped.counts) == (TraceFormat.AZURE, [374, 396], {})
    first, second = (seconds for seconds, _ in trace.requests(as_prefixes=True))
    assert first == pytest.approx(datetime(2023, 11, 16, 18, 15, 46, 680590, timezone.utc).timestamp())
    assert second - first == pytest.approx(4.314579, abs=1e-5)
    assert (uses(trace)[1], trace.held_prefix_blocks) == ([[-1], [-1]], 0)


def test_sessions_of_claude_code_share_within_themselves(tmp_path: Path) -> None:
    ids = range(1, 174)
    seen = session("trace_0504", [turn(0.0, 11133, *ids), turn(13.0, 11300, *ids, 174, 175, 176)])
    trace = read(tmp_path, seen + "\n" + session("other", [turn(5.0, 100, 1)]))
    assert (trace.form, trace.prompt_tokens()) == (TraceFormat.CLAUDE_CODE, [11133, 100, 11300])
    first, other, second = uses(trace)[1]
    assert second[:173] == first[:173]
    assert (first[173], trace.held_prefix_blocks, other[0] in first) == (-1, 173, False)
    assert trace.prefixes.tokens[other[0]] == 64
    together = read(
        tmp_path, session("a", [turn(0, 64, 1)], "global") + "\n" + session("b", [turn(1, 64, 1)], "global")
    )
    assert together.held_prefix_blocks == 1


@pytest.mark.parametrize("first", [0.0, 160.0])
def test_a_subagents_times_count_from_its_own_begin_or_the_sessions(tmp_path: Path, first: float) -> None:
    agent = {"t": 160.0, "type": "subagent", "requests": [turn(first, 64, 5), turn(first + 5, 70, 5)]}
    trace = read(tmp_path, session("s", [turn(0.0, 64, 1), agent, turn(400.0, 64, 1)]))
    assert [seconds for seconds, _ in trace.requests(as_prefixes=True)] == [0, 160, 165, 400]


def test_a_folder_of_sessions_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(json.loads(session(name, [turn(0, 64, 1)])), indent=1))
    (tmp_path / "c.json").write_text('{"id": "cut')
    (tmp_path / "README.md").write_text("no session")
    trace = trace_file(tmp_path)
    assert (len(trace), trace.skipped.sentence()) == (2, "Passed over: 1 not JSON (first in line 3).")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (MOONCAKE.strip() + '\n{"timestamp": 9, "input_le', "not JSON"),
        (MOONCAKE.strip() + "\nlast words", "not JSON"),
        (MOONCAKE.strip() + "\n[1]", "without any of blocks, requests, hash_ids"),
        (MOONCAKE.strip() + '\n{"timestamp": 9}', "without any of blocks, requests, hash_ids"),
        (
            MOONCAKE.strip() + '\n{"timestamp": 9, "input_length": 5, "hash_ids": ["a"]}',
            "hash_ids: Input should be a valid integer",
        ),
        (
            MOONCAKE.strip() + '\n{"timestamp": NaN, "input_length": 5, "hash_ids": [1]}',
            "timestamp: Input should be a finite number",
        ),
        (
            MOONCAKE.strip() + '\n{"timestamp": 9, "input_length": 5000, "hash_ids": [1]}',
            "with ids of blocks of 512 tokens that do not fit its length",
        ),
        (MOONCAKE.strip() + "\n" + session("s", [turn(0, 64, 1)]), "of another format, claude_code"),
        (MOONCAKE.strip() + "\n" + AZURE.split("\r")[0], "of another format, azure"),
        (AZURE + "\r\n2023-11-16 18:15:50,many,1", "ContextTokens: Input should be a valid integer, unable to parse"),
        (AZURE + "\r\n2023-11-16 18:1", "not of 3 columns"),
        (AZURE + "\r\n" + MOONCAKE.split("\n")[1], "of another format, mooncake"),
    ],
)
def test_what_cannot_be_read_is_passed_over_and_counted(tmp_path: Path, content: str, reason: str) -> None:
    trace = read(tmp_path, content)
    assert len(trace) in (2, 3)
    (told,) = trace.skipped.counts
    assert told.startswith(reason)
    assert trace.skipped.first == {told: 4}


def test_bad_lines_of_telemetry_are_counted(
    line: Callable[..., TraceLine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semblend_trt.files.MAX_LINE_BYTES", 1 << 20)
    good = line(0, "a", [1]).to_json()
    negative = good.replace('"token_count":1', '"token_count":-1')
    trace = read(tmp_path, "\n".join([good, "{", "", " " * (2 << 20), negative, good]))
    told = "1 not JSON (first in line 2), 1 longer than 1 MiB (first in line 4), 1 blocks.token_count: Input should be "
    assert len(trace) == 2
    assert trace.skipped.sentence().startswith(f"Passed over: {told}")


@pytest.mark.parametrize("content", ["", "\n\n", '{"request_id": "a", "timestamp_ms": 1, "blocks": []}\n'])
def test_nothing_to_replay_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"trace: the trace holds no request with tokens"):
        read(tmp_path, content)


def test_where_no_line_can_be_read_the_reasons_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing to replay\. Passed over: 2 not JSON \(first in line 1\)"):
        read(tmp_path, "a\nb\n")


@pytest.mark.parametrize("bound", ["MAX_REQUESTS", "MAX_BLOCK_USES"])
def test_too_much_is_refused(line: Callable[..., TraceLine], monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(trace_module, bound, 2)
    assert len(trace_of([line(0, "a", [1])] * 2)) == 2
    with pytest.raises(ConfigurationError, match="replay the first ones with --requests"):
        trace_of([line(0, "a", [1])] * 3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_lines_are_seeded_ordered_and_shared_in_part(name: str) -> None:
    lines = list(workload_lines(name, 60, 1))
    assert lines == list(workload_lines(name, 60, 1))
    assert lines != list(workload_lines(name, 60, 2))
    assert all(one.timestamp_ms < other.timestamp_ms for one, other in itertools.pairwise(lines))
    seen: dict[str, int] = {}
    for block in (block for line in lines for block in line.blocks):
        assert block.content_hash is not None
        assert block.token_count > 0
        assert seen.setdefault(block.content_hash, block.token_count) == block.token_count
    uses = sum(len(line.blocks) for line in lines)
    assert 1.5 * len(seen) < uses
    assert all(line.blocks[-1].kind is BlockKind.USER_QUERY for line in lines)


def test_a_session_repeats_what_it_said() -> None:
    turns: dict[str, list[str | None]] = {}
    for line in workload_lines("support_agent", 60, 0):
        said = [block.content_hash for block in line.blocks if block.kind is BlockKind.USER_QUERY]
        assert said[:-1] == turns.get(line.session_id, [])
        turns[line.session_id] = said
    assert max(map(len, turns.values())) == WORKLOADS["support_agent"].turns


def test_the_shift_changes_kind_and_documents_in_the_middle() -> None:
    lines = list(workload_lines("workload_shift_static_vs_adaptive", 40, 0))
    halves = [
        {(block.kind, block.content_hash) for line in half for block in line.blocks[1:-1]}
        for half in (lines[:20], lines[20:])
    ]
    assert [{kind for kind, _ in half} for half in halves] == [{BlockKind.CODE}, {BlockKind.TOOL_OUTPUT}]
    assert not {content for _, content in halves[0]} & {content for _, content in halves[1]}


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="'lucky'; there are repeated_system, rag_shared_corpus"):
        next(workload_lines("lucky", 1, 0))
