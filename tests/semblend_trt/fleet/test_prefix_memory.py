"""Prefix memory: what a worker was sent of a prompt's beginning, by tenant, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.fleet.routing_policy import BLOCK_TOKENS, PrefixMemory

A, B = (0, 0), (1, 0)


def test_the_longest_common_beginning_is_known() -> None:
    memory = PrefixMemory()
    prompt = list(range(10 * BLOCK_TOKENS))
    memory.note(memory.prefix_of(prompt, None), A)
    longer = memory.prefix_of(prompt[: 4 * BLOCK_TOKENS + 5] + prompt, None)
    assert memory.known(longer, [A, B]) == {A: 4 * BLOCK_TOKENS, B: 0}
    shifted = memory.prefix_of([7, *prompt], None)
    assert memory.known(shifted, [A]) == {A: 0}


def test_tenants_share_no_beginning() -> None:
    memory = PrefixMemory()
    prompt = list(range(4 * BLOCK_TOKENS))
    memory.note(memory.prefix_of(prompt, "acme"), A)
    for salt in (None, "", "acme "):
        assert memory.known(memory.prefix_of(prompt, salt), [A]) == {A: 0}
    assert memory.known(memory.prefix_of(prompt, "acme"), [A]) == {A: len(prompt)}


def test_the_oldest_blocks_go_first_and_of_a_prompt_its_end() -> None:
    memory = PrefixMemory(max_blocks=5)
    first, second = ([seed] * 3 * BLOCK_TOKENS for seed in (1, 2))
    for prompt in (first, second):
        memory.note(memory.prefix_of(prompt, None), A)
    assert memory.known(memory.prefix_of(second, None), [A]) == {A: 3 * BLOCK_TOKENS}
    assert memory.known(memory.prefix_of(first, None), [A]) == {A: 2 * BLOCK_TOKENS}
    long = [3] * 50 * BLOCK_TOKENS
    memory.note(memory.prefix_of(long, None), A)
    assert memory.known(memory.prefix_of(long, None), [A]) == {A: 5 * BLOCK_TOKENS}


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 1)), max_size=20), st.data())
def test_it_knows_what_a_list_of_all_prompts_would(sent, data) -> None:
    memory = PrefixMemory()
    workers = [A, B]

    def prompt_of(blocks):
        return [token for block in blocks for token in [block] * BLOCK_TOKENS]

    for blocks, worker in sent:
        memory.note(memory.prefix_of(prompt_of(blocks), None), workers[worker])
    asked = data.draw(st.lists(st.integers(0, 1), max_size=6))
    expected = {}
    for number, worker in enumerate(workers):
        common = [
            next((at for at, pair in enumerate(zip(blocks, asked, strict=False)) if pair[0] != pair[1]),
                 min(len(blocks), len(asked)))
            for blocks, to in sent
            if to == number
        ]  # fmt: skip
        expected[worker] = BLOCK_TOKENS * max(common, default=0)
    assert memory.known(memory.prefix_of(prompt_of(asked), None), workers) == expected


def test_bad_tokens_are_refused() -> None:
    with pytest.raises((ValueError, TypeError)):
        PrefixMemory().prefix_of(["a", "b"], None)
