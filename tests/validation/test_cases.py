"""Cases are read whole or refused with the line that is at fault."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError
from validation import documents, prompts
from validation.cases import MAX_FORCED_TOKENS, Case, Expectation, Tokeniser, read_cases
from validation.cli import shipped_model

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"id": "a", "donors": ["first donor", "second"], "prompt": "prompt", "reference": None}


def written(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "cases.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_a_line_becomes_a_case(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(GOOD), "", json.dumps(GOOD | {"id": "b", "reference": "42", "donors": []}))
    first, second = read_cases(path)
    assert (first.id, first.donors, first.prompt) == ("a", ("first donor", "second"), "prompt")
    assert first.reference is None
    assert not first.known_answer
    assert first.expects is Expectation.ANY
    assert first.is_timed
    assert second.known_answer
    assert second.donors == ()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "EOF"),
        ("[]", "object"),
        (json.dumps(GOOD | {"prompt": ""}), "prompt"),
        (json.dumps(GOOD | {"donors": [""]}), r"donors\.0"),
        (json.dumps(GOOD | {"donors": "text"}), "donors"),
        (json.dumps(GOOD | {"id": 7}), "id"),
        (json.dumps(GOOD | {"prompts": "x"}), "prompts"),
        (json.dumps({key: GOOD[key] for key in ("id", "donors")}), "prompt"),
        (b'{"id": "\xff\xfe"}', "line 2"),
        (json.dumps(GOOD), "'a' is used twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, problem: str) -> None:
    path = written(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(ConfigurationError, match="line 2") as refused:
        read_cases(path)
    assert refused.match(problem)
    assert "\n" not in str(refused.value)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no case"):
        read_cases(written(tmp_path, "", " "))
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_cases(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_cases(tmp_path)


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
