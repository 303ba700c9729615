"""The policy verified inside vLLM: traps are seen, harmless text is reused, and nothing approximate is left behind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from semblend_trt.reuse_profile import ReuseProfile
from validation.documents import stock_list
from validation.families.catalog import write_family
from validation.prompts import INSTRUCTIONS, form_for, render

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine_wrapper.vllm.conftest import Served
    from validation.cases import Case

GROUPS, TOKENS = 6, 700


def cases_of(served: Served, family: str) -> list[Case]:
    tokenizer = served.llm.get_tokenizer()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return write_family(family, form_for(tokenizer), count, 3, GROUPS, 1, TOKENS)


def answers(served: Served, cases: list[Case], *, donors: bool) -> tuple[int, int, int]:
    """How many prompts are answered rightly, how many with the donor's answer, and how many tokens were reused."""
    tokenizer = served.llm.get_tokenizer()
    encoded = {case.id: tokenizer.encode(case.prompt, add_special_tokens=False) for case in cases}
    if donors:
        texts = [donor for case in cases for donor in case.donors]
        served.ask(*(tokenizer.encode(text, add_special_tokens=False) for text in texts), max_tokens=1)
        served.settle()
    found = served.ask(*encoded.values())
    texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in found]
    right = sum(text.strip() == case.reference for text, case in zip(texts, cases, strict=True))
    wrong = sum(text.strip() == case.donor_answer for text, case in zip(texts, cases, strict=True))
    return right, wrong, sum(each.cached for each in found)


@pytest.mark.parametrize("family", [pytest.param("header_trap", marks=pytest.mark.every_version), "mid_sentence_trap"])
def test_a_trap_is_seen_by_verified_and_not_by_position_fix(engine: Callable[..., Served], family: str) -> None:
    served = engine(None, enable_prefix_caching=False)
    cases = cases_of(served, family)
    cold, _, _ = answers(served, cases, donors=False)
    assert cold >= GROUPS - 1
    served = engine("position_fix")
    assert answers(served, cases, donors=True)[0] == 0
    served = engine("verified")
    right, followed, _ = answers(served, cases, donors=True)
    assert (right, followed) == (cold, 0)
    assert not served.runtime.faults


def test_harmless_text_is_reused_by_verified(engine: Callable[..., Served]) -> None:
    served = engine("verified")
    cases = cases_of(served, "reordered")
    right, _, cached = answers(served, cases, donors=True)
    assert right == GROUPS
    assert cached > 0
    evidence = [settled for settled in map(served.scheduler.outcomes.of, range(1, 40)) if settled is not None]
    assert sum(each.reused_tokens for each in evidence) > 0.25 * GROUPS * TOKENS
    assert not served.runtime.faults


@pytest.mark.parametrize("generations", [0, 1])
def test_lists_first_seen_behind_moved_kv_are_reused_as_the_profile_allows(
    engine: Callable[..., Served], profile: Path, tmp_path: Path, generations: int
) -> None:
    path = tmp_path / "profile.json"
    ReuseProfile.read(profile).model_copy(update={"generations": generations}).write(path)
    served = engine("boundary", {"policy": "verified", "profile": str(path)})
    lists = [stock_list(random.Random(seed), rows=14) for seed in range(5)]
    encode, found = served.llm.get_tokenizer().encode, []
    for number, shown in enumerate([(0, 1, 2), (2, 1, 3), (1, 3, 4)]):
        texts, question = [lists[each].text for each in shown], lists[shown[-1]].questions[3]
        found.append(served.ask(encode(render(INSTRUCTIONS[number], texts, question.text), add_special_tokens=False)))
        served.settle()
        assert served.llm.get_tokenizer().decode(found[-1].tokens).startswith(question.answer)
    assert [answered.cached > 100 for answered in found] == [False, True, generations > 0]
    assert sorted(served.scheduler.donor_index._generations.values()) == [1] * generations
    assert not served.runtime.faults


@pytest.mark.every_version
def test_a_profile_without_this_engine_is_refused_by_name(
    engine: Callable[..., Served], profile: Path, tmp_path: Path
) -> None:
    listed = ReuseProfile.read(profile)
    others = [each for each in listed.engines if not each.startswith("vllm-")]
    listed.model_copy(update={"engines": others}).write(profile_elsewhere := tmp_path / "profile.json")
    served = engine("boundary", {"policy": "verified", "profile": str(profile_elsewhere)})
    cases = cases_of(served, "reordered")
    assert answers(served, cases, donors=True)[0] == GROUPS
    settled = list(filter(None, map(served.scheduler.outcomes.of, range(1, served.last + 1))))
    assert "profile_mismatch" in {each.reason for each in settled}
    assert all(not each.reused_tokens for each in settled)
