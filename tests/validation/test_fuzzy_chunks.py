"""A document with edited numbers, served from a donor that holds the old ones, is answered as cold would answer."""

from __future__ import annotations

import random
from importlib.resources import files

import pytest

from engine_wrapper.embedded.llm import LLM, KvCacheConnectorConfig, SamplingParams
from validation.documents import Document, counted_list, stock_list
from validation.prompts import render

MODEL = files("validation") / "assets" / "model"
ANSWER = SamplingParams(max_tokens=8)
EDITED_ROWS = (3, 8)
OTHER_ROWS = (0, 4)


def with_other_numbers(document: Document) -> Document:
    """The document with another count of as many digits in each edited row."""
    header, *rows = document.text.split("\n")
    counts = {item: int(count) for item, _, count in (row.partition(": ") for row in rows)}
    for item in [list(counts)[row] for row in EDITED_ROWS]:
        first_digit, rest = divmod(counts[item], 10 ** (len(str(counts[item])) - 1))
        counts[item] = (first_digit % 9 + 1) * 10 ** (len(str(counts[item])) - 1) + rest
    return counted_list(header.removeprefix("Stock list of ").removesuffix("."), counts)


@pytest.fixture
def engine(monkeypatch):
    engines = []

    def build(policy, fuzzy):
        monkeypatch.setenv("SEMBLEND_POLICY", policy)
        monkeypatch.setenv("SEMBLEND_FUZZY_CHUNKS", fuzzy)
        monkeypatch.setenv("SEMBLEND_MIN_REUSE_RATIO", "0.3")
        monkeypatch.setenv("SEMBLEND_LOOKUP_DEADLINE_MS", "10000")  # tests share their processors
        connector = KvCacheConnectorConfig.ours()
        engines.append(LLM(model=MODEL, kv_connector_config=connector if policy else None))
        return engines[-1]

    yield build
    for llm in engines:
        llm.shutdown()


def serve(llm, prompt):
    (output,) = llm.generate(prompt, ANSWER)
    llm.settle()
    return output


@pytest.mark.parametrize("policy", ["position_fix", "cacheblend"])
def test_edited_numbers_are_answered_as_cold(engine, policy):
    generator = random.Random(0)
    before = [stock_list(generator, rows=12) for _ in range(5)]
    now = [with_other_numbers(document) for document in before]
    texts = [document.text for document in now]
    donor = render("Answer briefly.", [document.text for document in before], before[0].questions[0].text)
    reusing, cold = engine(policy, "1"), engine("", "0")
    serve(reusing, donor)
    for old, document in zip(before[::2], now[::2], strict=True):
        for row in EDITED_ROWS + OTHER_ROWS:
            question = document.questions[row]
            assert (question.answer != old.questions[row].answer) == (row in EDITED_ROWS)
            prompt = render("Look up what is asked for.", texts, question.text)
            output, expected = serve(reusing, prompt), serve(cold, prompt)
            assert output.outputs[0].text == expected.outputs[0].text
            assert output.outputs[0].text.strip() == question.answer
            report = reusing.connector_scheduler.reuse_of(output.request_id)
            assert report.offered_tokens > 400
            # Pieces of a chunk are checked as any span is, where the policy checks.
            assert report.checked_tokens == (report.offered_tokens if policy == "cacheblend" else 0)


def test_without_the_setting_little_of_such_a_document_is_reused(engine):
    generator = random.Random(0)
    before = [stock_list(generator, rows=12) for _ in range(5)]
    plain = engine("position_fix", "0")
    serve(plain, render("Answer briefly.", [document.text for document in before], before[0].questions[0].text))
    texts = [with_other_numbers(document).text for document in before]
    prompt = render("Look up what is asked for.", texts, before[0].questions[0].text)
    assert serve(plain, prompt).reused_tokens < 200
