"""Cold exact match of the shipped model: greedy answers on prompts that no training run has seen.

`python -m benchmarks.yardstick_model.evaluate --model DIR [--questions N] [--device cuda]` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from validation import documents, prompts
from validation.models import shipped_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EVALUATION_SEED = 20_260_000


def stock_case(rng: random.Random, tokenizer: Any, tokens: int) -> documents.Question:
    """Return a question on one of the stock lists that fill about `tokens` tokens."""
    return _examination(rng, _fill(rng, tokenizer, tokens, _any_stock_list))


def mixed_case(rng: random.Random, tokenizer: Any, tokens: int) -> documents.Question:
    """Return a question on a stock list among stock lists, fact sheets and prose that fill about `tokens` tokens."""
    shown = [_any_stock_list(rng), *_fill(rng, tokenizer, tokens, _any_document)]
    rng.shuffle(shown)
    stock = [document for document in shown if document.text.startswith("Stock list of ")]
    return _examination(rng, shown, rng.choice(stock))


def people_case(rng: random.Random, tokenizer: Any, tokens: int) -> documents.Question:
    """Return a question on one person among fact sheets that fill about `tokens` tokens."""
    return _examination(rng, _fill(rng, tokenizer, tokens, documents.fact_sheet))


def recency_case(rng: random.Random, tokenizer: Any, tokens: int) -> documents.Question:
    """Return a question on a place with two lists of the same items in about `tokens` tokens; the later list counts."""
    earlier = _any_stock_list(rng)
    later = documents.restock(rng, earlier)
    shown = _fill(rng, tokenizer, tokens - 2 * _length(tokenizer, earlier.text), _any_stock_list)
    first, second = sorted(rng.choices(range(len(shown) + 1), k=2))
    return _examination(rng, [*shown[:first], earlier, *shown[first:second], later, *shown[second:]], later)


def unknown_case(rng: random.Random, tokenizer: Any, tokens: int) -> documents.Question:
    """Return a question on a place that none of the stock lists names."""
    shown = _fill(rng, tokenizer, tokens, _any_stock_list)
    return _case(rng, shown, documents.missing_stock_question(rng))


def conversation_case(rng: random.Random, tokenizer: Any, tokens: int) -> documents.Question:
    """Return the last question of a conversation in which every turn shows stock lists, about `tokens` tokens long."""
    turns: list[prompts.Turn] = []
    asked: list[documents.Question] = []
    used = 0
    while used < tokens - 250 or not turns:
        shown = [_any_stock_list(rng) for _ in range(rng.randint(1, 2))]
        asked.extend(question for document in shown for question in document.questions)
        question = rng.choice(asked)
        turns.append(prompts.Turn(question.text, question.answer, tuple(document.text for document in shown)))
        used += _length(tokenizer, prompts.render_conversation("", turns[-1:], ""))
    last = rng.choice(asked)
    return documents.Question(
        prompts.render_conversation(rng.choice(prompts.SYSTEM_PROMPTS), turns, last.text), last.answer
    )


SUITES: dict[str, tuple[Callable[[random.Random, Any, int], documents.Question], int]] = {
    "stock_1k": (stock_case, 1_000),
    "stock_2k": (stock_case, 2_000),
    "stock_4k": (stock_case, 4_000),
    "stock_8k": (stock_case, 7_800),
    "mixed_4k": (mixed_case, 4_000),
    "conversation_4k": (conversation_case, 4_000),
    "people_2k": (people_case, 2_000),
    "recency_2k": (recency_case, 2_000),
    "recency_4k": (recency_case, 4_000),
    "unknown_2k": (unknown_case, 2_000),
}


def cases(suite: str, tokenizer: Any, count: int) -> list[documents.Question]:
    """Return `count` seeded cases of a suite, the same on every machine. Raises KeyError for an unknown suite."""
    make, tokens = SUITES[suite]
    rng = random.Random(f"{EVALUATION_SEED} {suite}")
    return [make(rng, tokenizer, tokens) for _ in range(count)]


@torch.inference_mode()
def exact_match(model: Any, tokenizer: Any, examples: Sequence[documents.Question]) -> float:
    """Return the share of cases, prompts up to `<|a|>`, that greedy decoding answers exactly, `<|end|>` included. Every
    answer token must be the likeliest one. Neighbouring cases with the same text share its prefill."""
    right, shared, cache = 0, "", None
    for case in examples:
        context, mark, question = case.text.rpartition(prompts.QUESTION_MARK)
        if cache is None or context != shared:
            ids = torch.tensor([tokenizer(context).input_ids], device=model.device)
            shared, cache = context, model(ids, use_cache=True, logits_to_keep=1).past_key_values
        expected = tokenizer(case.answer + prompts.END_MARK).input_ids
        ids = torch.tensor([tokenizer(mark + question).input_ids + expected], device=model.device)
        logits = model(ids, past_key_values=cache, use_cache=True).logits[0, -len(expected) - 1 : -1]
        cache.crop(-ids.shape[1])
        right += int(logits.argmax(-1).tolist() == expected)
    return right / len(examples)


def evaluate(model: Any, tokenizer: Any, count: int) -> dict[str, float]:
    """Return the exact match of every suite over `count` cases each."""
    return {suite: round(exact_match(model, tokenizer, cases(suite, tokenizer, count)), 4) for suite in SUITES}


def load(directory: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer. Raises OSError if the directory holds no model."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval(), tokenizer


def _examination(
    rng: random.Random, shown: list[documents.Document], about: documents.Document | None = None
) -> documents.Question:
    return _case(rng, shown, rng.choice((about or rng.choice(shown)).questions))


def _case(rng: random.Random, shown: list[documents.Document], question: documents.Question) -> documents.Question:
    instruction = rng.choice(prompts.INSTRUCTIONS)
    return documents.Question(
        prompts.render(instruction, [document.text for document in shown], question.text), question.answer
    )


def _any_stock_list(rng: random.Random) -> documents.Document:
    return documents.stock_list(rng, rows=rng.randint(4, 12))


def _any_document(rng: random.Random) -> documents.Document:
    kind = rng.randrange(4)
    if kind == 0:
        return documents.fact_sheet(rng, people=rng.randint(1, 4))
    if kind == 1:
        return documents.excerpt(rng, rng.randint(200, 1_000))
    return _any_stock_list(rng)


def _fill(
    rng: random.Random, tokenizer: Any, tokens: int, make: Callable[[random.Random], documents.Document]
) -> list[documents.Document]:
    """Return documents that, with instruction and question, take at most about `tokens` tokens; at least one."""
    shown = [make(rng)]
    used = _length(tokenizer, shown[0].text)
    while True:
        document = make(rng)
        used += _length(tokenizer, document.text) + 1
        if used > tokens - 150:
            return shown
        shown.append(document)


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text).input_ids)


def main() -> None:
    """Print the exact match of a model directory on every suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=shipped_model())
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, arguments.device)
    print(json.dumps(evaluate(model, tokenizer, arguments.questions), indent=1))


if __name__ == "__main__":
    main()
