"""Lines of a trace: written and read back, the SemanticKV system's own, and what is no line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.donors.block_kind import BlockKind
from semblend_trt.fleet.telemetry import MAX_LINE_BYTES, TraceBlock, TraceError, TraceLine, read_trace

blocks = st.builds(
    TraceBlock,
    content_hash=st.none() | st.text("0123456789abcdef", min_size=1, max_size=32),
    semantic_type=st.sampled_from([kind.value for kind in BlockKind]),
    token_count=st.integers(0, 1 << 20),
    text=st.none() | st.text(max_size=20),
    position=st.none() | st.integers(0, 1 << 20),
)
lines = st.builds(
    TraceLine,
    request_id=st.text(min_size=1, max_size=20),
    timestamp_ms=st.floats(0, 1e13),
    session_id=st.none() | st.text(min_size=1, max_size=20),
    blocks=st.lists(blocks, max_size=4),
    observed_ttft_ms=st.none() | st.floats(0, 1e6),
    metadata=st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@given(st.lists(lines, max_size=4))
def test_what_is_written_is_read(written: list[TraceLine]) -> None:
    assert list(read_trace(line.to_json() for line in written)) == written


def test_what_is_unknown_is_left_out() -> None:
    line = TraceLine(request_id="1", timestamp_ms=5, blocks=[TraceBlock(token_count=3)])
    block = {"semantic_type": "other", "token_count": 3, "metadata": {}}
    assert json.loads(line.to_json()) == {"request_id": "1", "timestamp_ms": 5, "blocks": [block], "metadata": {}}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("system", BlockKind.SYSTEM_PROMPT),
        ("user", BlockKind.USER_QUERY),
        ("Assistant", BlockKind.ASSISTANT_HISTORY),
        ("retrieved_context", BlockKind.RETRIEVED_CONTEXT),
        ("legal_evidence", BlockKind.LEGAL_EVIDENCE),
        ("poem", BlockKind.OTHER),
    ],
)
def test_kinds_have_either_systems_names(name: str, kind: BlockKind) -> None:
    assert TraceBlock(semantic_type=name, token_count=1).kind is kind


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not a request, the line: Invalid JSON"),
        ('{"request_id": "a", "timestamp_ms": 1}', "line 2 is not a request, blocks: Field required"),
        (
            '{"request_id": "a", "timestamp_ms": 1, "blocks": [{"token_count": -1}]}',
            "line 2 is not a request, blocks.0.token_count: Input should be greater than or equal to 0",
        ),
        (" " * (MAX_LINE_BYTES + 1), f"line 2 has {MAX_LINE_BYTES + 1} bytes; at most {MAX_LINE_BYTES} are read"),
    ],
)
def test_what_is_no_line_is_named(line: str, problem: str) -> None:
    with pytest.raises(TraceError, match="^" + problem.replace(".", r"\.")):
        list(read_trace(["", line]))


def test_bad_lines_can_be_passed_over() -> None:
    good = TraceLine(request_id="a", timestamp_ms=1, blocks=[])
    problems: list[TraceError] = []
    assert list(read_trace(["{", good.to_json(), "[]"], problems.append)) == [good]
    assert [str(problem).split(" is")[0] for problem in problems] == ["line 1", "line 3"]
