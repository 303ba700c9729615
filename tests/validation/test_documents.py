"""The documents are seeded, distinct, and answer their own questions."""

import random

import pytest

from validation import documents


def test_restock_keeps_place_and_items_and_changes_counts():
    rng = random.Random(6)
    earlier = documents.stock_list(rng, rows=12)
    later = documents.restock(rng, earlier)
    assert later.text.split("\n")[0] == earlier.text.split("\n")[0]
    assert {question.text for question in later.questions} == {question.text for question in earlier.questions}
    assert later.text != earlier.text
    assert earlier.text.count("\n") == len(earlier.questions) == 12


def test_fact_sheet_states_every_answer():
    document = documents.fact_sheet(random.Random(7), people=6)
    assert len({question.text for question in document.questions}) == len(document.questions) == 24
    assert all(question.answer in document.text for question in document.questions)
    assert document == documents.fact_sheet(random.Random(7), people=6) != documents.fact_sheet(random.Random(8), 6)


@pytest.mark.parametrize("characters", [200, 1_000, 5_000])
def test_excerpt_is_whole_sentences_within_the_limit(characters):
    rng = random.Random(characters)
    texts = [documents.excerpt(rng, characters).text for _ in range(50)]
    assert all(text[0] == '"' or text[0].isupper() for text in texts)
    assert all(text.rstrip('"')[-1] in ".!?" for text in texts)
    assert sum(len(text) <= characters for text in texts) >= 30
    assert max(map(len, texts)) > characters * 0.7


def test_prose_without_a_sentence_is_refused():
    with pytest.raises(ValueError, match="no whole sentence"):
        documents.passage(random.Random(1), "no sentence at all", 10)
