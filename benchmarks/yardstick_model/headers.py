"""How deep the shipped model must be recomputed when the rows of a list stand under another list's header.

`python -m benchmarks.yardstick_model.headers [--model DIR] [--prompts N]` prints one JSON object: exact match by the
number of fresh first layers, and the relative deviation of values by layer, for lists with exchanged and kept headers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from validation import documents, prompts
from validation.models import shipped_model

from . import evaluate


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two prompts of equal length whose lists differ in some headers, and a question on an exchanged list."""

    donor: list[list[int]]
    target: list[list[int]]
    exchanged: frozenset[int]
    question: documents.Question


def exchange(rng: random.Random, tokenizer: Any) -> Exchange:
    """Return ten stock lists of which two pairs swap their headers; places of a pair have equally many tokens."""
    while True:
        texts = [documents.stock_list(rng) for _ in range(10)]
        places = [document.text.partition(".\n")[0].removeprefix("Stock list of ") for document in texts]
        partner = _partners(rng, [len(tokenizer(" " + place).input_ids) for place in places], pairs=2)
        if partner:
            break
    names = [places[partner.get(number, number)] for number in range(10)]
    asked = rng.choice(sorted(partner))
    question = rng.choice(texts[asked].questions)
    opening = tokenizer(prompts.render_pages(prompts.INSTRUCTIONS[3], [])).input_ids

    def ids(renamed: list[str]) -> list[list[int]]:
        pairs = zip(texts, places, renamed, strict=True)
        lists = [prompts.DOCUMENT_MARK + document.text.replace(old, new) for document, old, new in pairs]
        return [opening, *(tokenizer(text).input_ids for text in lists)]

    renamed_question = documents.Question(question.text.replace(places[asked], names[asked]), question.answer)
    return Exchange(ids(places), ids(names), frozenset(partner), renamed_question)


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, count: int) -> dict[str, Any]:
    """Return exact match by fresh layers and mean deviations by layer over `count` seeded prompts."""
    rng = random.Random(evaluate.EVALUATION_SEED)
    layers = model.config.num_hidden_layers
    right = [0] * (layers + 1)
    deviations: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(count):
        case = exchange(rng, tokenizer)
        donor_ids, target_ids = (
            torch.tensor([list(itertools.chain.from_iterable(parts))]) for parts in (case.donor, case.target)
        )
        same = (donor_ids == target_ids)[0]
        owner = torch.tensor([number - 1 for number, part in enumerate(case.target) for _ in part])
        donor, target = (model(ids, use_cache=True).past_key_values for ids in (donor_ids, target_ids))
        for fresh in range(layers + 1):
            right[fresh] += _answers(model, tokenizer, _mixed(model, donor, target, same, fresh), case.question)
        each = torch.stack([_deviation(donor, target, layer) for layer in range(layers)])
        for number in range(10):
            deviations[number in case.exchanged].append(each[:, same & (owner == number)].mean(1).tolist())
    return {
        "exact_match_by_fresh_layers": [hits / count for hits in right],
        "value_deviation_by_layer": {
            name: [_spread([one[layer] for one in deviations[kind]]) for layer in range(layers)]
            for name, kind in (("header exchanged", True), ("header kept", False))
        },
    }


def _partners(rng: random.Random, lengths: list[int], pairs: int) -> dict[int, int]:
    order = rng.sample(range(len(lengths)), len(lengths))
    partner: dict[int, int] = {}
    for first in order:
        for second in order:
            free = first not in partner and second not in partner and first != second
            if free and lengths[first] == lengths[second] and len(partner) < 2 * pairs:
                partner[first], partner[second] = second, first
    return partner if len(partner) == 2 * pairs else {}


def _mixed(model: Any, donor: Any, target: Any, same: torch.Tensor, fresh: int) -> Any:
    """Return a cache whose first `fresh` layers are the target's; above, equal tokens keep the donor's entries."""
    cache = DynamicCache(config=model.config)
    for layer, (old, new) in enumerate(zip(donor.layers, target.layers, strict=True)):
        keep = (same & (layer >= fresh))[None, None, :, None]
        cache.update(torch.where(keep, old.keys, new.keys), torch.where(keep, old.values, new.values), layer)
    return cache


def _answers(model: Any, tokenizer: Any, cache: Any, question: documents.Question) -> bool:
    expected = tokenizer(question.answer + prompts.END_MARK).input_ids
    asked = tokenizer(prompts.QUESTION_MARK + question.text + prompts.ANSWER_MARK).input_ids
    logits = model(torch.tensor([asked + expected]), past_key_values=cache, use_cache=True).logits
    return bool(logits[0, -len(expected) - 1 : -1].argmax(-1).tolist() == expected)


def _deviation(donor: Any, target: Any, layer: int) -> torch.Tensor:
    """Return |donor - target| / |target| of every token's values in one layer."""
    old, new = (cache.layers[layer].values[0].transpose(0, 1).flatten(1) for cache in (donor, target))
    relative: torch.Tensor = (old - new).norm(dim=-1) / new.norm(dim=-1)
    return relative


def _spread(values: list[float]) -> list[float]:
    """Return [mean, least, most]."""
    return [round(value, 4) for value in (sum(values) / len(values), min(values), max(values))]


def main() -> None:
    """Print the measurement of a model directory."""
    parser = argparse.ArgumentParser(description="Measure reuse under exchanged headers.")
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("--prompts", type=int, default=16)
    arguments = parser.parse_args()
    print(json.dumps(measure(*evaluate.load(arguments.model), arguments.prompts), indent=1))


if __name__ == "__main__":
    main()
