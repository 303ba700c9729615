"""Built-in prompts are told in the words that a model knows; the user's own are left as they are."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from engine_wrapper.embedded.model_runner import ModelRunner
from validation import documents, prompts
from validation.cases import Case, Expectation
from validation.cli import shipped_model
from validation.tokenised import MAX_FORCED_TOKENS, Tokeniser

if TYPE_CHECKING:
    from pathlib import Path


def a_case(workload: str = "reordered", reference: str | None = "42") -> Case:
    document = documents.stock_list(random.Random(1), rows=3)
    prompt = prompts.render("Answer briefly.", [document.text], document.questions[0].text)
    donor = prompts.render("Answer briefly.", ["Another text."], "Why?")
    return Case("case", workload, "1k", (donor, prompt), prompt, reference, True, Expectation.REUSE, "case")


@pytest.fixture(scope="module")
def shipped() -> ModelRunner:
    return ModelRunner(shipped_model(), "float32", "cpu")


@pytest.fixture(scope="module")
def other(tiny_model_paths: dict[str, Path]) -> ModelRunner:
    return ModelRunner(tiny_model_paths["llama"], "float32", "cpu")


def test_the_shipped_model_gets_its_marks(shipped: ModelRunner) -> None:
    tokeniser, case = Tokeniser(shipped, 8), a_case()
    tokens = tokeniser.tokenise(case)
    assert shipped.tokenizer.decode(tokens.prompt) == case.prompt
    [end] = tokeniser.stop_token_ids
    assert tokeniser.text([*shipped.tokenizer.encode(" 42 "), end]) == "42"


def test_another_model_gets_plain_text_and_its_users_own_prompts_untouched(other: ModelRunner) -> None:
    tokeniser = Tokeniser(other, 8)
    assert tokeniser.stop_token_ids == ()
    built_in = other.tokenizer.decode(tokeniser.tokenise(a_case()).prompt)
    assert "<|" not in built_in
    assert built_in.endswith("?\nAnswer: ")
    case = a_case("prompts")
    assert other.tokenizer.decode(tokeniser.tokenise(case).prompt) == case.prompt


def test_what_a_prompt_shares_with_each_donor(shipped: ModelRunner) -> None:
    tokens = Tokeniser(shipped, 8).tokenise(a_case())
    shared = tokens.shared_prefix(0)
    assert tokens.donors[0][:shared] == tokens.prompt[:shared]
    assert tokens.donors[0][shared] != tokens.prompt[shared]
    assert tokens.shared_prefix(1) == len(tokens.prompt)


def test_a_long_reference_is_scored_in_part(shipped: ModelRunner) -> None:
    tokeniser = Tokeniser(shipped, 8)
    forced = tokeniser.tokenise(a_case(reference="word " * 100)).forced
    assert forced is not None
    assert len(forced) == MAX_FORCED_TOKENS
    assert tokeniser.tokenise(a_case(reference=None)).forced is None
