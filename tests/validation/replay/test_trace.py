"""What is kept of a trace, what is refused, and the shapes of the built-in traces."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from semblend_trt.donors.block_kind import BlockKind
from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.telemetry import MAX_LINE_BYTES, TraceBlock
from validation.replay import trace as trace_module
from validation.replay.trace import WORKLOADS, Observation, Trace, trace_file, trace_of, workload_lines

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


def test_a_bad_line_is_named_or_counted(line: Callable[..., TraceLine], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    good = line(0, "a", [1]).to_json()
    path.write_text(f"{good}\n{{\n\n{' ' * (2 * MAX_LINE_BYTES + 10)}\n{good}")
    with pytest.raises(ConfigurationError, match=r"trace\.jsonl: line 2 is not a request"):
        trace_file(path, skip_bad=False)
    trace = trace_file(path, skip_bad=True)
    assert (len(trace), trace.skipped) == (2, 2)
    assert trace.first_skipped.startswith("line 2 is not a request")


@pytest.mark.parametrize("content", ["", "\n\n", '{"request_id": "a", "timestamp_ms": 1, "blocks": []}\n'])
def test_nothing_to_replay_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"trace\.jsonl: the trace holds no request with tokens"):
        trace_file(path, skip_bad=True)


@pytest.mark.parametrize("bound", ["MAX_REQUESTS", "MAX_BLOCK_USES"])
def test_too_much_is_refused(line: Callable[..., TraceLine], monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(trace_module, bound, 2)
    assert len(trace_of([line(0, "a", [1])] * 2)) == 2
    with pytest.raises(ConfigurationError, match="replay a part of it"):
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
