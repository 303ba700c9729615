"""The recipe's tasks are seeded and right: the answers that the model learns follow from the documents before them."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import validation
from validation.assets.recipe import corpus, tasks

ASSETS = Path(validation.__file__).parent / "assets"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "model" / "tokenizer.json"))


@pytest.fixture
def prose() -> str:
    return (ASSETS / "excerpt.txt").read_text(encoding="utf-8")


def _writer(tokenizer: Tokenizer, prose: str, seed: int) -> tasks.TaskWriter:
    ids = np.asarray(tokenizer.encode(prose[:40_000]).ids, dtype=np.uint16)
    return tasks.TaskWriter(tokenizer, [prose], ids, seed)


def test_equal_seeds_write_equal_rows(tokenizer: Tokenizer, prose: str) -> None:
    first, weights = _writer(tokenizer, prose, 1).batch(rows=4, length=1_024, text_share=0.25)
    again, _ = _writer(tokenizer, prose, 1).batch(rows=4, length=1_024, text_share=0.25)
    other, _ = _writer(tokenizer, prose, 2).batch(rows=4, length=1_024, text_share=0.25)
    assert first.shape == weights.shape == (4, 1_024)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_answers_follow_the_latest_list_of_a_place(tokenizer: Tokenizer, prose: str) -> None:
    rows, _ = _writer(tokenizer, prose, 3).batch(rows=24, length=2_048, text_share=0.0)
    checked = replaced = unknown = 0
    for row in rows:
        for prompt in tokenizer.decode(row.tolist(), skip_special_tokens=False).split(corpus.SEPARATOR):
            stock: dict[str, dict[str, str]] = {}
            for mark, body in re.findall(r"<\|(doc|q)\|>((?:(?!<\|(?:doc|q)\|>).)*)", prompt, flags=re.DOTALL):
                if mark == "doc" and body.startswith("Stock list of "):
                    header, *lines = body.split("<|")[0].split("\n")
                    place = header.removeprefix("Stock list of ").removesuffix(".")
                    replaced += place in stock
                    stock[place] = dict(line.split(": ") for line in lines if ": " in line)
                asked = re.match(r"How many (\w+) are in (.*)\?<\|a\|>(\w+)<\|end", body)
                if asked:
                    item, place, answer = asked.groups()
                    assert stock.get(place, {}).get(item, "unknown") == answer
                    checked += 1
                    unknown += answer == "unknown"
    assert checked > 200
    assert replaced > 0
    assert 0 < unknown < checked / 5


def test_only_answers_and_their_ends_weigh_most(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode("<|inst|>Go.<|doc|>lamps: 12<|q|>How many?<|a|>12<|end|><|q|>And?<|a|>7<|end|><|doc|>x")
    weights = tasks.answer_weights(np.asarray(encoding.ids, dtype=np.uint16))
    heavy = [token for token, weight in zip(encoding.tokens, weights, strict=True) if weight == tasks.ANSWER_WEIGHT]
    assert heavy == ["1", "2", "<|end|>", "7", "<|end|>"]


def test_the_book_of_the_excerpt_is_left_out(tmp_path: Path, prose: str) -> None:
    other = "It was a fine day. " * 6_000
    path = tmp_path / "books.txt.gz"
    path.write_bytes(gzip.compress(f"{other}{corpus.SEPARATOR}{prose}".encode()))
    assert corpus.read_books(path) == [other.strip()]


def test_unusable_text_is_refused_in_one_sentence(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.", encoding="utf-8")
    with pytest.raises(corpus.CorpusError, match="fewer than 100,000 characters"):
        corpus.read_books(short)
    with pytest.raises(corpus.CorpusError, match="cannot be read"):
        corpus.read_books(tmp_path / "missing.txt")
