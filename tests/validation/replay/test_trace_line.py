"""Lines of traces: what is written is read, and kinds of text by either system's names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.replay.trace_line import BlockKind, TraceBlock, TraceLine

short = st.text(min_size=1, max_size=20)
blocks = st.builds(
    TraceBlock,
    content_hash=st.none() | short,
    semantic_type=st.sampled_from([kind.value for kind in BlockKind]),
    token_count=st.integers(0, 1 << 20),
    text=st.none() | st.text(max_size=20),
)
lines = st.builds(
    TraceLine,
    request_id=short,
    timestamp_ms=st.floats(0, 1e13),
    blocks=st.lists(blocks, max_size=4),
)


@given(lines)
def test_what_is_written_is_read(line):
    assert TraceLine.model_validate_json(line.to_json()) == line


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("system", BlockKind.SYSTEM_PROMPT),
        ("user", BlockKind.USER_QUERY),
        ("Assistant", BlockKind.ASSISTANT_HISTORY),
        ("legal_evidence", BlockKind.LEGAL_EVIDENCE),
        *((name, BlockKind.OTHER) for name in ("poem", "developer", "function", "ipython", "observation")),
    ],
)
def test_kinds_have_either_systems_names(name, kind):
    assert TraceBlock(semantic_type=name, token_count=1).kind is kind
