"""Blocks of a trace: they add up to the prompt, none crosses a paragraph, and hashes belong to a tenant and a key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.donors.block_kind import BlockKind
from semblend_trt.fleet.router.prompts import PromptReader
from semblend_trt.fleet.telemetry import BlockMaker, Hasher

HASHER = Hasher.of(b"a secret of sixteen bytes")


@pytest.fixture(scope="module")
def make(tokenizer: Any) -> Any:
    def maker(block_tokens: int = 8, *, hasher: Hasher = HASHER, keep_text: bool = False) -> BlockMaker:
        return BlockMaker(PromptReader(tokenizer), hasher, block_tokens, keep_text)

    return maker


@settings(max_examples=50)
@given(text=st.text("ab \n", max_size=60), block_tokens=st.integers(1, 9))
def test_blocks_add_up_to_the_prompt(make: Any, text: str, block_tokens: int) -> None:
    blocks = make(block_tokens, keep_text=True).blocks({"prompt": text}, "acme")
    assert "".join(block.text for block in blocks) == text
    ends = [block.position + block.token_count for block in blocks]
    assert [block.position for block in blocks] == [0, *ends][: len(blocks)]
    assert all(1 <= block.token_count <= block_tokens for block in blocks)


def test_a_paragraph_has_the_same_blocks_wherever_it_stands(make: Any) -> None:
    document = "a document of some length\n\n"
    first = make().blocks({"prompt": document + "a question"}, "acme")
    second = make().blocks({"prompt": "An instruction.\n\n" + document + "another"}, "acme")
    hashes = [block.content_hash for block in make().blocks({"prompt": document}, "acme")]
    assert [block.content_hash for block in first[: len(hashes)]] == hashes
    assert [block.content_hash for block in second[3 : 3 + len(hashes)]] == hashes


def test_text_is_kept_only_where_that_is_asked_for(make: Any) -> None:
    body = {"prompt": "something private"}
    assert {block.text for block in make().blocks(body, None)} == {None}
    assert "private" not in str(make().blocks(body, None))
    assert make(100, keep_text=True).blocks(body, None)[0].text == "something private"


def test_hashes_belong_to_a_tenant_and_a_key(make: Any) -> None:
    body = {"prompt": "something"}
    other = Hasher.of(b"another secret of more bytes")
    hashes = {
        make(99, hasher=hasher).blocks(body, tenant)[0].content_hash
        for hasher in (HASHER, other)
        for tenant in (None, "", "acme", "globex")
    }
    assert len(hashes) == 8
    assert make(99).blocks(body, "acme") == make(99).blocks(body, "acme")
    assert len({HASHER.of_text("a", "bc"), HASHER.of_text("ab", "c"), HASHER.of_text(None, "abc")}) == 3


def test_kinds_are_those_of_roles_and_rules(make: Any) -> None:
    code = "```\ndef f():\n    return 1\n```"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is this?\n\n{code}"},
        {"role": "assistant", "content": "A function."},
        {"role": "tool", "content": "1"},
    ]
    blocks = make(1000).blocks({"messages": messages}, None)
    assert [block.kind for block in blocks] == [
        BlockKind.SYSTEM_PROMPT,
        BlockKind.USER_QUERY,
        BlockKind.CODE,
        BlockKind.ASSISTANT_HISTORY,
        BlockKind.TOOL_OUTPUT,
    ]


def test_a_prompt_of_ids_is_of_no_kind(make: Any) -> None:
    blocks = make(2).blocks({"prompt": [1, 2, 3]}, None)
    assert [(block.kind, block.token_count) for block in blocks] == [(BlockKind.OTHER, 2), (BlockKind.OTHER, 1)]
