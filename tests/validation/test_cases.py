"""Cases are read whole or refused with the line that is at fault, and told in the words that a model knows."""

import json
import random
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from semblend_trt.errors import ConfigurationError
from validation import documents, prompts
from validation.cases import MAX_FORCED_TOKENS, Case, Expectation, Tokeniser, equal_start, log_cases, read_cases

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
        (GOOD | {"id": "b", "prompt": []}, "prompt"),
        (GOOD | {"id": "b", "prompt": [{"role": "user", "content": "text"}]}, "no chat template"),
        (GOOD | {"id": "b", "group": "a", "donors": ["other"]}, "group 'a' has other donors"),
        (GOOD | {"id": "b", "group": "a", "family": "other"}, "group 'a' has other donors or another family"),
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


USER = [{"role": "user", "content": "Why?"}]


@pytest.mark.promise(
    "commands",
    "Your own cases need a prompt alone; a log's donors are what came before, and one in which nothing is shared is "
    "refused",
)
def test_a_line_needs_a_prompt_alone_and_may_hold_messages(tmp_path, chat_tokenizer):
    lines = [{"prompt": "text"}, {"family": "mine", "group": "g", "donors": [USER, "text"], "prompt": USER}]
    lines.append(lines[1] | {"reference": "7", "donor_answer": "8"})
    plain, chat, trap = read_cases(written(tmp_path, *lines), chat_tokenizer())
    assert (plain.id, plain.workload, plain.group, plain.donors) == ("1", "prompts", "1", ())
    assert chat.prompt == chat.donors[0] == "<|start|>user\nWhy?<|stop|>\n<|start|>assistant\n"
    assert (chat.workload, chat.group, trap.group) == ("mine", "2", "2")
    assert (chat.is_timed, trap.is_timed, trap.donor_answer) == (True, False, "8")


def test_messages_that_a_template_does_not_take_are_refused(tmp_path, chat_tokenizer):
    path = written(tmp_path, {"prompt": [{"role": "user", "content": 7}]})
    with pytest.raises(ConfigurationError, match=r"line 1: the messages cannot be rendered: messages\.0\.content"):
        read_cases(path, chat_tokenizer())


SHARED = "".join(random.Random(1).choices("abcdefgh ", k=200))


def log_of(folder, *contents):
    return written(folder, *({"model": "m", "messages": [{"role": "user", "content": each}]} for each in contents))


@pytest.mark.promise("commands", "Your own cases need a prompt...")
def test_donors_are_the_latest_earlier_requests_that_share_text(tmp_path, chat_model_path):
    alone = "".join(random.Random(2).choices("ijklmnop ", k=300))
    log = log_of(tmp_path, "1 " + SHARED, alone, *(f"{n} {SHARED} {n}" for n in range(2, 7)))
    cases = log_cases(log, chat_model_path, 64)
    assert [case.id for case in cases] == [f"line-{line}" for line in range(3, 8)]
    assert [len(case.donors) for case in cases] == [1, 2, 3, 3, 3]
    assert cases[-1].donors == tuple(case.prompt for case in cases[1:4])
    assert cases[0].prompt == f"<|start|>user\n2 {SHARED} 2<|stop|>\n<|start|>assistant\n"
    assert all(case.reference is None and case.is_timed for case in cases)


@pytest.mark.promise("commands", "Your own cases need a prompt...")
@pytest.mark.parametrize("contents", [["one text", "quite another"], [SHARED], []])
def test_a_log_in_which_nothing_is_shared_is_refused(tmp_path, chat_model_path, contents):
    with pytest.raises(ConfigurationError, match=f"none of its {len(contents)} prompts shares a run of 64 tokens"):
        log_cases(log_of(tmp_path, *contents), chat_model_path, 64)


def test_a_log_that_cannot_be_read_is_refused(tmp_path, chat_model_path):
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        log_cases(tmp_path / "missing.jsonl", chat_model_path, 64)
    with pytest.raises(ConfigurationError, match="Passed over: 1 not JSON"):
        log_cases(written(tmp_path, "{"), chat_model_path, 64)


def test_a_chat_gets_no_special_tokens_and_ends_with_its_turn(shipped, chat_tokenizer):
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
    )
    tokeniser = Tokeniser(SimpleNamespace(tokenizer=tokenizer, facts=shipped.facts), 8)
    chat = prompts.form_for(tokenizer).render("Answer.", ["one"], "Why?")
    case = Case("a", "mine", "any", ("plain text",), chat, None, False, Expectation.ANY, "a")
    tokens = tokeniser.tokenise(case)
    assert tokens.prompt == tokenizer.encode(chat, add_special_tokens=False)
    assert tokens.donors[0][0] == tokenizer.bos_token_id
    assert tokeniser.stop_token_ids == (tokenizer.convert_tokens_to_ids("<|stop|>"),)


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
