"""The rules name the kind of plain cases, and of a conversation the kind of most of its characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.fleet.block_kind import BlockKind, kind_of

PROSE = "The harbour was built when the old bridge had been carried away by ice. " * 8
CASES = [
    ("<|im_start|>system\nYou are a careful clerk.<|im_end|>\n<|im_start|>user\nHi", BlockKind.SYSTEM_PROMPT),
    ("<|start_header_id|>assistant<|end_header_id|>\nIt was in 1907.", BlockKind.ASSISTANT_HISTORY),
    ('Tool: {"rows": 3}', BlockKind.TOOL_OUTPUT),
    ('<|im_start|>user\n{"temperature": 21, "unit": "C"}', BlockKind.TOOL_OUTPUT),
    ("User: why?\n\n```python\nprint(1)\n```", BlockKind.CODE),
    ("import os\n\ndef run(path):\n    return os.stat(path)", BlockKind.CODE),
    ("Pursuant to § 12 the defendant, herein named, was heard in Smith v. Jones.", BlockKind.LEGAL_EVIDENCE),
    ("Respond only in the following format, one line each.", BlockKind.TEMPLATE),
    ("Document 3: harbour dues\nShips pay by length.", BlockKind.RETRIEVED_CONTEXT),
    ("User: " + PROSE, BlockKind.RETRIEVED_CONTEXT),
    ("User: when was the harbour built?", BlockKind.USER_QUERY),
    ("when was the harbour built?", BlockKind.OTHER),
]


@pytest.mark.parametrize(("text", "kind"), CASES)
def test_plain_cases(text, kind):
    assert kind_of(text) is kind


def test_a_conversation_is_of_the_kind_of_most_of_its_characters():
    said = "System: be brief.\nUser: {}\nAssistant: long ago."
    assert kind_of(said.format("why?")) is BlockKind.SYSTEM_PROMPT
    assert kind_of(said.format(PROSE)) is BlockKind.RETRIEVED_CONTEXT


@given(st.text())
def test_any_text_has_a_kind(text):
    assert kind_of(text) is BlockKind.OTHER or text.strip()
