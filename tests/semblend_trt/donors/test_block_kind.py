"""The rules name the kind of plain cases, shares always add up, and texts are read in the background."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.donors.block_kind import (
    MAX_WAITING,
    UNREAD,
    BlockKind,
    KindReader,
    kind_reader_for,
    kinds_of,
    main_kind,
)
from semblend_trt.donors.eviction import Eviction

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
    assert main_kind(kinds_of(text)) is kind


def test_a_conversation_is_a_mix():
    mix = kinds_of(f"System: be brief.\nUser: {PROSE}\n\nwhen was it built?\nAssistant: long ago.")
    assert set(mix) == {
        BlockKind.SYSTEM_PROMPT,
        BlockKind.RETRIEVED_CONTEXT,
        BlockKind.USER_QUERY,
        BlockKind.ASSISTANT_HISTORY,
    }


@given(st.text())
def test_shares_add_up(text):
    mix = kinds_of(text)
    assert sum(mix.values()) == pytest.approx(1.0)
    assert mix == UNREAD if not text.strip() else mix


class Letters:
    def decode(self, ids):
        return "".join(map(chr, ids))


def ids(text):
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)


def test_text_is_read_with_the_tokenizer_that_is_loaded_once():
    loads = []
    reader = KindReader(lambda: loads.append(1) or Letters())
    reader.read("a", ids("System: be brief."))
    reader.read("b", ids("User: why?"))
    reader.drain()
    assert reader.known() == [("a", {BlockKind.SYSTEM_PROMPT: 1.0}), ("b", {BlockKind.USER_QUERY: 1.0})]
    assert (reader.known(), loads) == ([], [1])
    reader.close()


def test_without_a_tokenizer_nothing_is_known_and_nothing_is_tried_again():
    loads = []

    def fail():
        loads.append(1)
        raise OSError("no files")

    reader = KindReader(fail)
    for number in range(2 * MAX_WAITING):
        reader.read(str(number), ids("x"))
    reader.drain()
    reader.read("later", ids("x"))
    assert (reader.known(), len(loads)) == ([], 1)
    reader.close()


def test_only_policies_that_weigh_kinds_have_a_reader():
    assert kind_reader_for(Eviction.LRU, None) is None
    reader = kind_reader_for(Eviction.ADAPTIVE_SEMANTIC, None)
    assert reader is not None
    reader.close()
