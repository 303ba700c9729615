"""Cases are read whole or refused with the line that is at fault, and told in the words that a model knows."""

import json
import random

import pytest

from semblend_trt.errors import ConfigurationError
from validation import documents, prompts
from validation.cases import MAX_FORCED_TOKENS, Case, Expectation, Tokeniser, equal_start, read_cases
from validation.families.catalog import FamilyRequest, write_cases

GOOD = {"id": "a", "donors": ["first donor", "second"], "prompt": "prompt", "reference": None}


def written(folder, *lines):
    path = folder / "cases.jsonl"
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(text.encode() if isinstance(text, str) else text for text in texts))
    return path


def test_a_line_becomes_a_case(tmp_path):
    first, second = read_cases(written(tmp_path, GOOD, "", GOOD | {"id": "b", "reference": "42", "donors": []}))
    assert first == Case("a", "prompts", "any", ("first donor", "second"), "prompt", None, False, Expectation.ANY, "a")
    assert first.is_timed
    assert second.known_answer
    assert second.donors == ()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "EOF"),
        ("[]", "object"),
        (GOOD | {"prompt": ""}, "prompt"),
        (GOOD | {"donors": [""]}, r"donors\.0"),
        (GOOD | {"donors": "text"}, "donors"),
        (GOOD | {"id": 7}, "id"),
        (GOOD | {"prompts": "x"}, "prompts"),
        ({key: GOOD[key] for key in ("id", "donors")}, "prompt"),
        (b'{"id": "\xff\xfe"}', "line 2"),
        (GOOD, "'a' is used twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem):
    with pytest.raises(ConfigurationError, match="line 2") as refused:
        read_cases(written(tmp_path, GOOD, line))
    assert refused.match(problem)
    assert "\n" not in str(refused.value)


def test_an_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no case"):
        read_cases(written(tmp_path, "", " "))
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_cases(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_cases(tmp_path)


def a_case(reference="42"):
    document = documents.stock_list(random.Random(1), rows=3)
    prompt = prompts.render("Answer briefly.", [document.text], document.questions[0].text)
    donor = prompts.render("Answer briefly.", ["Another text."], "Why?")
    return Case("case", "reordered", "1k", (donor, prompt), prompt, reference, True, Expectation.REUSE, "case")


def test_the_shipped_model_gets_its_marks_and_a_prompt_shares_its_start_with_donors(shipped):
    tokeniser, case = Tokeniser(shipped, 8), a_case()
    tokens = tokeniser.tokenise(case)
    assert shipped.tokenizer.decode(tokens.prompt) == case.prompt
    [end] = tokeniser.stop_token_ids
    assert tokeniser.text([*shipped.tokenizer.encode(" 42 "), end]) == "42"
    shared = equal_start(tokens.donors[0], tokens.prompt)
    assert tokens.donors[0][:shared] == tokens.prompt[:shared]
    assert tokens.donors[0][shared] != tokens.prompt[shared]
    assert equal_start(tokens.donors[1], tokens.prompt) == len(tokens.prompt)
    # A long reference is scored in part.
    assert len(tokeniser.tokenise(a_case(reference="word " * 100)).forced or ()) == MAX_FORCED_TOKENS
    assert tokeniser.tokenise(a_case(reference=None)).forced is None


def test_cases_that_are_tokenised_together_have_the_ids_of_each_alone(shipped):
    tokeniser, cases = Tokeniser(shipped, 8), write_cases(shipped, FamilyRequest(("reordered", "prose"), 3, 2, 640))
    found = tokeniser.tokenise_all(cases)
    assert found == list(map(tokeniser.tokenise, cases))
    for case, tokens in zip(cases, found, strict=True):
        assert list(tokens.texts) == [shipped.tokenizer.encode(text) for text in (*case.donors, case.prompt)]
    assert tokeniser.tokenise_all([]) == []
