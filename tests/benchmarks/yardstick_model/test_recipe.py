"""The recipe's tasks are seeded and right: the answers that the model learns follow from the documents before them."""

import gzip
import json
import re

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig

from benchmarks.yardstick_model import train
from benchmarks.yardstick_model.train import SEPARATOR, PlaceProbe, read_books
from semblend_trt.errors import ConfigurationError
from validation.models import shipped_model


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(shipped_model() / "tokenizer.json"))


@pytest.fixture
def prose():
    return (shipped_model().parent / "excerpt.txt").read_text(encoding="utf-8")


def written(tokenizer, prose, seed, rows, length, text_share=0.0):
    ids = np.asarray(tokenizer.encode(prose[:40_000]).ids, dtype=np.uint16)
    return next(iter(train.TaskWriter(tokenizer, [prose], ids, seed, (rows, length, text_share))))


def test_equal_seeds_write_equal_rows(tokenizer, prose):
    made = (written(tokenizer, prose, seed, 4, 1_024, text_share=0.25) for seed in (1, 1, 2))
    (first, weights), (again, _), (other, _) = made
    assert first.shape == weights.shape == (4, 1_024)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_answers_follow_the_latest_list_of_a_place(tokenizer, prose):
    rows, _ = written(tokenizer, prose, 3, 24, 2_048)
    checked = replaced = unknown = 0
    for row in rows:
        for prompt in tokenizer.decode(row.tolist(), skip_special_tokens=False).split(SEPARATOR):
            stock = {}
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


def test_only_answers_and_their_ends_weigh_most(tokenizer):
    encoding = tokenizer.encode("<|inst|>Go.<|doc|>lamps: 12<|q|>How many?<|a|>12<|end|><|q|>And?<|a|>7<|end|><|doc|>x")
    weights = train.answer_weights(np.asarray(encoding.ids, dtype=np.uint16))
    heavy = [token for token, weight in zip(encoding.tokens, weights, strict=True) if weight == train.ANSWER_WEIGHT]
    assert heavy == ["1", "2", "<|end|>", "7", "<|end|>"]


def test_the_book_of_the_excerpt_is_left_out_and_unusable_text_is_refused(tmp_path, prose):
    other = "It was a fine day. " * 6_000
    path, short = tmp_path / "books.txt.gz", tmp_path / "short.txt"
    path.write_bytes(gzip.compress(f"{other}{SEPARATOR}{prose}".encode()))
    assert read_books(path) == [other.strip()]
    short.write_text("Too short.", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="fewer than 100,000 characters"):
        read_books(short)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_books(tmp_path / "missing.txt")


def test_the_probe_labels_rows_with_the_place_of_their_own_list(tokenizer):
    lists = "<|doc|>Stock list of Depot Oslo.\nlamps: 12<|doc|>Some prose.<|doc|>Stock list of Yard Riga.\nnets: 7<|q|>"
    ids = torch.tensor([tokenizer.encode(f"<|inst|>Go.{lists}").ids])
    places, inside = PlaceProbe(8, tokenizer).labels(ids)
    named = {tokenizer.decode(each).strip() for each in places[:, 0, inside[0]].T.tolist()}
    assert {name.split()[0] for name in named} == {"Depot", "Yard"}
    covered = tokenizer.decode(ids[0, inside[0]].tolist())
    assert "12" in covered
    assert "prose" not in covered


def test_a_model_is_trained_and_saved(tmp_path, prose, monkeypatch):
    text = tmp_path / "books.txt"
    text.write_text("It was a fine day. " * 6_000 + SEPARATOR + prose, encoding="utf-8")
    for name, value in (("BATCH_TOKENS", 2_048), ("WORKERS", 1), ("LOG_EVERY", 1)):
        monkeypatch.setattr(train, name, value)
    for name, value in zip(train.SIZES, (4, 32, 48, 2, 1), strict=True):
        monkeypatch.setitem(train.SIZES, name, value)
    train.main(["--text", str(text), "--out", str(tmp_path), "--steps", "1", "--device", "cpu"])
    assert AutoConfig.from_pretrained(tmp_path / "model").num_hidden_layers == 4
    first, step = (json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines())
    assert (first["arguments"]["seed"], step["step"]) == (1, 1)
