"""Prose is cut at whole sentences."""

import random

import pytest

from validation import documents


@pytest.mark.parametrize("characters", [200, 1_000, 5_000])
def test_excerpt_is_whole_sentences_within_the_limit(characters):
    rng = random.Random(characters)
    texts = [documents.excerpt(rng, characters) for _ in range(50)]
    assert all(text[0] == '"' or text[0].isupper() for text in texts)
    assert all(text.rstrip('"')[-1] in ".!?" for text in texts)
    assert sum(len(text) <= characters for text in texts) >= 30
    assert max(map(len, texts)) > characters * 0.7
