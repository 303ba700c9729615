"""The recipe's tasks are seeded and right: the answers that the model learns follow from the documents before them."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig

import validation
from benchmarks.yardstick_model import evaluate, headers, tasks
from benchmarks.yardstick_model.tokenizer import SEPARATOR, CorpusError, read_books
from benchmarks.yardstick_model.train import PlaceProbe, hidden_states, main, parse

ASSETS = Path(validation.__file__).parent / "assets"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "model" / "tokenizer.json"))


@pytest.fixture
def prose() -> str:
    return (ASSETS / "excerpt.txt").read_text(encoding="utf-8")


def written(tokenizer: Tokenizer, prose: str, seed: int, rows: int, length: int, text_share: float = 0.0) -> Any:
    """Ids and weights of a batch."""
    ids = np.asarray(tokenizer.encode(prose[:40_000]).ids, dtype=np.uint16)
    return tasks.TaskWriter(tokenizer, [prose], ids, seed).batch(rows, length, text_share)


def test_equal_seeds_write_equal_rows(tokenizer: Tokenizer, prose: str) -> None:
    (first, weights), (again, _), (other, _) = (
        written(tokenizer, prose, seed, 4, 1_024, text_share=0.25) for seed in (1, 1, 2)
    )
    assert first.shape == weights.shape == (4, 1_024)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_answers_follow_the_latest_list_of_a_place(tokenizer: Tokenizer, prose: str) -> None:
    rows, _ = written(tokenizer, prose, 3, 24, 2_048)
    checked = replaced = unknown = 0
    for row in rows:
        for prompt in tokenizer.decode(row.tolist(), skip_special_tokens=False).split(SEPARATOR):
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


@pytest.mark.parametrize("family", tasks.WRITERS)
def test_answers_to_families_follow_from_their_documents(tokenizer: Tokenizer, prose: str, family: str) -> None:
    ids = np.asarray(tokenizer.encode(prose[:40_000]).ids, dtype=np.uint16)
    source = tasks.Source(tokenizer, [prose], ids, 1, (family,))
    rows, _ = tasks.FamilyWriter(source, 5).batch(4, 2_048, 0.0)
    assert np.array_equal(rows, tasks.FamilyWriter(source, 5).batch(4, 2_048, 0.0)[0])
    checked = 0
    texts = (tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in rows)
    for prompt in SEPARATOR.join(texts).split(SEPARATOR):
        shown, *asked = prompt.split("<|q|>")
        for question, answer in re.findall(r"(.*)\?<\|a\|>(.*)<\|end", "\n".join(asked)):
            assert answered(shown, question) == answer
            checked += 1
    assert checked > 60


def answered(shown: str, question: str) -> str:
    """What the documents say."""
    if asked := re.match(r"On which floor does (\w+) leave (\w+)", question):
        steps = re.search(rf"Round of {asked[1]}, from floor (\d)\.([\s\S]*?)\nLeave {asked[2]}\.", shown)
        return str(int(steps[1]) + steps[2].count("Go up.") - steps[2].count("Go down."))
    owners = dict(re.findall(r"(List \w+) belongs to (\w+ \w+)\.", shown))
    places = {}
    for title, rest in re.findall(r"<\|doc\|>(?:Stock list of )?([\w ]+)\.\n([^<]*)", shown):
        owner = owners.get(title, title)
        rows = dict(re.findall(r"(\w+): (\d+)", rest))
        places |= {f"{item} are in {name}": count for item, count in rows.items() for name in (title, owner)}
        places[f"Who owns {title}"] = owner
    return places[question.removeprefix("How many ")]


def test_only_answers_and_their_ends_weigh_most(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode("<|inst|>Go.<|doc|>lamps: 12<|q|>How many?<|a|>12<|end|><|q|>And?<|a|>7<|end|><|doc|>x")
    weights = tasks.answer_weights(np.asarray(encoding.ids, dtype=np.uint16))
    heavy = [token for token, weight in zip(encoding.tokens, weights, strict=True) if weight == tasks.ANSWER_WEIGHT]
    assert heavy == ["1", "2", "<|end|>", "7", "<|end|>"]


def test_the_book_of_the_excerpt_is_left_out_and_unusable_text_is_refused(tmp_path: Path, prose: str) -> None:
    other = "It was a fine day. " * 6_000
    path, short = tmp_path / "books.txt.gz", tmp_path / "short.txt"
    path.write_bytes(gzip.compress(f"{other}{SEPARATOR}{prose}".encode()))
    assert read_books(path) == [other.strip()]
    short.write_text("Too short.", encoding="utf-8")
    with pytest.raises(CorpusError, match="fewer than 100,000 characters"):
        read_books(short)
    with pytest.raises(CorpusError, match="cannot be read"):
        read_books(tmp_path / "missing.txt")


def test_the_probe_labels_rows_with_the_place_of_their_own_list(tokenizer: Tokenizer) -> None:
    text = (
        "<|inst|>Go.<|doc|>Stock list of Depot Oslo.\nlamps: 12"
        "<|doc|>Some prose.<|doc|>Stock list of Yard Riga.\nnets: 7<|q|>"
    )
    encoding = tokenizer.encode(text)
    ids = torch.tensor([encoding.ids])
    places, inside = PlaceProbe(8, tokenizer).labels(ids)
    named = {tokenizer.decode(each).strip() for each in places[:, 0, inside[0]].T.tolist()}
    assert {name.split()[0] for name in named} == {"Depot", "Yard"}
    covered = tokenizer.decode(ids[0, inside[0]].tolist())
    assert "12" in covered
    assert "prose" not in covered


SMALL = ["--layers", "4", "--hidden", "32", "--mlp", "48", "--heads", "2", "--questions", "1", "--workers", "1"]


@pytest.mark.parametrize("window", [0, 48])
def test_a_model_is_trained_saved_and_evaluated(
    window: int, tmp_path: Path, prose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "books.txt"
    text.write_text("It was a fine day. " * 6_000 + SEPARATOR + prose, encoding="utf-8")
    few = ["--text", str(text), "--out", str(tmp_path), "--steps", "1", "--batch-tokens", "8192", *SMALL]
    main([*few, "--window", str(window), "--no-compile", "--log-every", "1", "--device", "cpu"])
    assert '"exact_match": {"stock_1k": 0.0' in capsys.readouterr().out
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.model_type == ("gemma3_text" if window else "qwen2")
    assert config.layer_types == [("sliding_attention" if window else "full_attention"), "full_attention"] * 2
    if window:
        assert config.sliding_window == window


def test_states_are_taken_behind_the_probed_layer() -> None:
    model, tokenizer = evaluate.load(ASSETS / "model")
    ids = tokenizer("<|inst|>Go.<|doc|>Stock list of Depot Oslo.\nlamps: 12<|q|>", return_tensors="pt").input_ids
    behind: list[torch.Tensor] = []
    model.model.layers[1].register_forward_hook(lambda *called: behind.append(called[-1]))
    with torch.inference_mode():
        last, early = hidden_states(model, ids, probed=2)
        assert torch.equal(model.lm_head(last), model(ids).logits)
    assert torch.equal(early, behind[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--batch-tokens", "100"], "at least 8192"),
        (["--minutes", "0"], "must be above 0"),
        (["--window", "-1"], "not below 0"),
        (["--window", "64", "--resume", "model"], "--window is for a new model"),
        (["--kv-dtype", "int8"], "invalid choice: 'int8'"),
        (["--families", "link,prose"], "--families names prose; there are reordered, link"),
    ],
)
def test_wrong_arguments_are_refused(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--text", "books.txt", "--out", "out", *wrong])
    assert message in capsys.readouterr().err


def test_rows_under_an_exchanged_header_need_more_than_the_donor() -> None:
    model, tokenizer = evaluate.load(ASSETS / "model")
    measured = headers.measure(model, tokenizer, count=2)
    assert measured["exact_match_by_fresh_layers"][0] == 0.0
    assert measured["exact_match_by_fresh_layers"][-1] == 1.0
    deviation = measured["value_deviation_by_layer"]
    assert deviation["header exchanged"][2][1] > 5 * deviation["header kept"][2][2]
