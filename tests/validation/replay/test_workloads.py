"""The built-in traces have the shapes that their names promise."""

from __future__ import annotations

import itertools

import pytest

from semblend_trt.donors.block_kind import BlockKind
from semblend_trt.errors import ConfigurationError
from validation.replay.workloads import WORKLOADS, workload_lines


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
        assert line.session_id is not None
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
