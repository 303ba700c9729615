"""Train the shipped model: text, then tasks at 4,096 tokens, then tasks at 8,192.

`python -m benchmarks.yardstick_model.train --text FILE --out DIR --seed N [--minutes M]`. Then
`python -m validation quality --model DIR/model --arms cold` says how often it answers exactly.

It reads books, by a byte-level BPE tokenizer in which every digit is a token, and training rows: documents under one
instruction, then questions with answers, written ahead by worker processes."""

import argparse
import gzip
import hashlib
import importlib.resources
import itertools
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from semblend_trt.errors import ConfigurationError
from validation import documents, prompts
from validation.arguments import settings_in_text
from validation.cases import grouped
from validation.documents import Document
from validation.results import describe, versions

SEPARATOR = "<|endoftext|>"
SPECIAL_TOKENS = (SEPARATOR, *prompts.MARKS)
END_OF_TEXT_ID = 0
ANSWER_ID = SPECIAL_TOKENS.index(prompts.ANSWER_MARK)
END_ID = SPECIAL_TOKENS.index(prompts.END_MARK)
# Qwen2's own splitting rule: transformers puts it in place of any other when it loads a tokenizer beside a Qwen2 model.
SPLIT_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_books(path: Path) -> list[str]:
    """Return the books of a UTF-8 text file (plain or .gz) separated by `<|endoftext|>`, without that of the shipped
    excerpt. Raises ConfigurationError if the file is missing, is not UTF-8 text or holds fewer than 100,000 characters.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The text file {path} cannot be read: {error}.") from error
    excerpt = importlib.resources.files("validation") / "assets" / "excerpt.txt"
    opening = excerpt.read_text(encoding="utf-8")[1_000:1_200]
    books = [book.strip() for book in text.split(SEPARATOR) if opening not in book]
    if sum(map(len, books)) < 100_000:
        raise ConfigurationError(
            f"The text file {path} holds fewer than 100,000 characters besides the shipped excerpt."
        )
    return [book for book in books if book]


def paragraphs(books: list[str], characters: int) -> list[str]:
    """Return the books cut at blank lines into parts of about `characters`; books end with the separator."""
    parts: list[str] = []
    for book in books:
        start = 0
        while len(book) - start > characters:
            cut = book.rfind("\n\n", start + 1, start + characters)
            end = cut if cut > start else start + characters
            parts.append(book[start:end])
            start = end
        parts.append(book[start:] + SEPARATOR)
    return parts


def train_tokenizer(books: list[str], seed: int, size: int = 2_048) -> Tokenizer:
    """Return a tokenizer of `size` tokens, trained on a sample of the books and on generated documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_RULE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(books, random.Random(seed)), trainer)
    return tokenizer


def _sample(books: list[str], rng: random.Random) -> Iterator[str]:
    parts = paragraphs(books, characters=5_000)
    rng.shuffle(parts)
    yield from (part.removesuffix(SEPARATOR) for part in itertools.islice(parts, 2_000))
    # The generated words must become short tokens too, or names would fill the context.
    for _ in range(4_000):
        for document in (documents.stock_list(rng), fact_sheet(rng, people=1)):
            yield document.text
            yield from (question.text for question in document.questions)


Batch = tuple[NDArray[np.uint16], NDArray[np.uint8]]
# Weights of predicted tokens in quarters, so that they fit into a byte.
TEXT_WEIGHT, PROMPT_WEIGHT, ANSWER_WEIGHT = 4, 1, 32
# The shares of stock lists, fact sheets and prose among a prompt's documents, and how many prompts have them.
_MIXTURES = {(1.0, 0.0, 0.0): 0.45, (0.6, 0.2, 0.2): 0.30, (0.7, 0.0, 0.3): 0.15, (0.0, 0.9, 0.1): 0.10}
_UNKNOWN_SHARE, _RECENCY_SHARE = 0.04, 0.2


class TaskWriter(IterableDataset[Batch]):
    """Batches of training rows without end; equal seeds write equal ones, and each worker of a DataLoader its own.

    What the documents of a prompt so far say is kept by place, or by text: a later list of a place replaces the one
    before."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        books: Sequence[str],
        corpus: NDArray[np.uint16],
        seed: int,
        shape: tuple[int, int, float],
    ) -> None:
        """`corpus`: the books' tokens. `shape`: rows, length, and the share of the rows that are plain prose."""
        self._tokenizer, self._books, self._corpus = tokenizer, books, corpus
        self._seed, self._shape, self._rng = seed, shape, random.Random()
        self._openings = (*prompts.INSTRUCTIONS, *prompts.SYSTEM_PROMPTS)
        self._sentences = [sentence for text in self._openings for sentence in re.split(r"(?<=\.) ", text)]

    def __iter__(self) -> Iterator[Batch]:
        """Yield ids and weights of shape (rows, length)."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        worker, (rows, length, text_share) = get_worker_info(), self._shape
        self._rng.seed((self._seed * 1_000 + (0 if worker is None else worker.id)) * 10_000 + length)
        while True:
            ids, weights = zip(*(self._row(length, text_share) for _ in range(rows)), strict=True)
            yield np.stack(ids), np.stack(weights)

    def _row(self, length: int, text_share: float) -> Batch:
        if self._rng.random() < text_share:
            return self._prose_row(length), np.full(length, TEXT_WEIGHT, dtype=np.uint8)
        ids = np.asarray(self._prompts(length)[:length], dtype=np.uint16)
        return ids, answer_weights(ids)

    def _prompts(self, length: int) -> list[int]:
        """Return prompts with answers, one after the other, of at least `length` tokens together."""
        rng, row = self._rng, list[int]()
        alone = rng.random() < 0.5
        while len(row) < length:
            left = length - len(row)
            budget = left if alone or left < 400 else min(left, int(200 * (length / 200) ** rng.random()))
            if row:
                row.append(END_OF_TEXT_ID)
            row += self._dialogue(budget) if rng.random() < 0.4 else self._examination(budget)
        return row

    def _prose_row(self, length: int) -> NDArray[np.uint16]:
        rng, row = self._rng, list[int]()
        if rng.random() < 0.6:
            start = rng.randrange(len(self._corpus) - length)
            return self._corpus[start : start + length]
        while len(row) < length:
            texts = [self._passage(rng.randint(300, 4_000)) for _ in range(rng.randint(1, 6))]
            row += self._encode(self._opening() + "".join(prompts.DOCUMENT_MARK + text for text in texts))
        return np.asarray(row[:length], dtype=np.uint16)

    def _examination(self, budget: int) -> list[int]:
        """Return documents in random order, some places with a later list, then questions on all of them."""
        rng, row = self._rng, self._encode(self._opening())
        room, used, shown = budget - len(row) - max(50, budget // 5), 0, list[tuple[float, Document, list[int]]]()
        shares, renewed = self._mixture(), rng.random() < _RECENCY_SHARE
        while used < room or not shown:
            document, position = self._document(shares), rng.random()
            made = [(position, document)]
            if renewed and _place(document) and rng.random() < 0.4:
                made.append((rng.uniform(position, 1.0), self._later_list(document)))
            for at, each in made:
                shown.append((at, each, self._encode(prompts.DOCUMENT_MARK + each.text)))
                used += len(shown[-1][2])
        known = dict[str, Document]()
        for _, document, ids in sorted(shown, key=itemgetter(0)):
            known[_place(document) or document.text] = document
            row += ids
        row += self._asked(known)
        while len(row) < budget:
            row += self._asked(known)
        return row

    def _dialogue(self, budget: int) -> list[int]:
        """Return turns of documents, question and answer, in about `budget` tokens."""
        rng, row = self._rng, self._encode(self._opening())
        shares, renewed = self._mixture(), rng.random() < _RECENCY_SHARE * 1.5
        chatty, known, recent = rng.uniform(0.3, 0.8), dict[str, Document](), None
        while len(row) < budget:
            for _ in range(rng.randint(1, 3) if recent is None or rng.random() > chatty else 0):
                recent, lists = self._document(shares), [each for each in known.values() if _place(each)]
                if renewed and lists and rng.random() < 0.4:
                    recent = self._later_list(rng.choice(lists))
                known[_place(recent) or recent.text] = recent
                row += self._encode(prompts.DOCUMENT_MARK + recent.text)
            row += self._asked(known, recent if rng.random() < 0.3 else None)
        return row

    def _mixture(self) -> tuple[float, float, float]:
        return self._rng.choices(list(_MIXTURES), list(_MIXTURES.values()))[0]

    def _document(self, shares: tuple[float, float, float]) -> Document:
        rng = self._rng
        kind = rng.choices(("stock", "facts", "prose"), shares)[0]
        if kind == "stock":
            return documents.stock_list(rng, rows=self._rows())
        if kind == "facts":
            return fact_sheet(rng, people=rng.randint(1, 6))
        return Document(self._passage(rng.randint(150, 1_500)), ())

    def _rows(self) -> int:
        return self._rng.randint(13, 24) if self._rng.random() < 0.15 else self._rng.randint(2, 12)

    def _later_list(self, earlier: Document) -> Document:
        """Return another list of the same place, mostly of the same items."""
        rng, place = self._rng, _place(earlier)
        if rng.random() >= 0.7:
            return documents.stock_list(rng, rows=self._rows(), place=place)
        items = [row.partition(":")[0] for row in earlier.text.split("\n")[1:]]
        rng.shuffle(items)
        return documents.counted_list(place, {item: rng.randint(2, 999) for item in items})

    def _opening(self) -> str:
        rng = self._rng
        kind = rng.random()
        if kind < 0.5:
            text = rng.choice(self._openings)
        elif kind < 0.8:
            text = " ".join(rng.sample(self._sentences, rng.randint(1, 6)))
        else:
            text = self._passage(rng.randint(10, 450))
        return prompts.INSTRUCTION_MARK + text

    def _passage(self, characters: int) -> str:
        """Return the whole sentences of `characters` characters from a random place in a book; all of these without."""
        book = self._rng.choice(self._books)
        start = self._rng.randrange(max(1, len(book) - characters))
        part = book[start : start + characters]
        whole = re.search(r'[.!?]"?\s+(["A-Z].*[.!?]"?)(?=\s|$)', part, re.DOTALL)
        return whole[1] if whole else part

    def _asked(self, known: Mapping[str, Document], recent: Document | None = None) -> list[int]:
        """Return a question with its answer, on what is known, on `recent`, or now and then on a place never named."""
        rng = self._rng
        answers = {each.text: each.answer for document in known.values() for each in document.questions}
        if not answers or rng.random() < _UNKNOWN_SHARE:
            text = f"How many {rng.choice(documents.SHIPPED_VOCABULARY.items)} are in {documents.place_name(rng)}?"
        else:
            text = rng.choice([each.text for each in recent.questions] if recent and recent.questions else [*answers])
        answer = answers.get(text, "unknown")
        return self._encode(prompts.QUESTION_MARK + text + prompts.ANSWER_MARK + answer + prompts.END_MARK)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


def answer_weights(ids: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return a weight for each token as a target: answers and their `<|end|>` count most, in one row of ids."""
    ended = np.concatenate(([False], ids[:-1] == END_ID))
    inside = np.cumsum(ids == ANSWER_ID) - np.cumsum(ended) > 0
    return np.where(inside & (ids != ANSWER_ID), ANSWER_WEIGHT, PROMPT_WEIGHT).astype(np.uint8)


def fact_sheet(rng: random.Random, people: int) -> Document:
    """Return `documents.biographies` as one document, a paragraph each."""
    found = documents.biographies(rng, people)
    return Document("\n".join(each.text for each in found), tuple(q for each in found for q in each.questions))


def _place(document: Document) -> str:
    """Return the place of a stock list, or "" for other documents."""
    found = re.match(r"Stock list of (.*)\.\n", document.text)
    return found[1] if found else ""


# What the shipped model was trained with.
RATE, BATCH_TOKENS = 1.6e-3, 131_072
SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 416,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Layers after which a row must know its place, and the weight of that auxiliary task.
PROBE_LAYERS, PROBE_WEIGHT = 2, 0.3
WORKERS, LOG_EVERY = 14, 20


_DOCUMENT_ID = SPECIAL_TOKENS.index(prompts.DOCUMENT_MARK)
# Offsets from the document mark: `Stock list of` fills 1 to 3, the place is at 4 to 6 and a little beyond.
_PLACE_OFFSETS, _FIRST_ROW_OFFSET = (4, 5, 6), 8
_STRIDE = 4


class PlaceProbe(nn.Module):
    """Linear heads that are thrown away after training."""

    def __init__(self, width: int, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._first_id: int = tokenizer.encode("Stock list of").ids[0]
        self.heads = nn.ModuleList(nn.Linear(width, tokenizer.get_vocab_size()) for _ in _PLACE_OFFSETS)

    def labels(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return place tokens, shape (offsets, rows, length), and which tokens are in rows of a stock list."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device).expand_as(ids)
        marks = torch.where(ids < len(SPECIAL_TOKENS), positions, 0).cummax(dim=1).values
        opening = ids.gather(1, marks) == _DOCUMENT_ID
        stock = ids.gather(1, (marks + 1).clamp(max=length - 1)) == self._first_id
        places = [ids.gather(1, (marks + offset).clamp(max=length - 1)) for offset in _PLACE_OFFSETS]
        return torch.stack(places), opening & stock & (positions - marks >= _FIRST_ROW_OFFSET)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a fourth of the tokens; hidden: (rows, length, width), ids: (rows, length)."""
        places, inside = self.labels(ids)
        scale = inside[:, ::_STRIDE].flatten().float()
        total = scale.new_zeros(())
        for head, place in zip(self.heads, places, strict=True):
            logits = head(hidden[:, ::_STRIDE]).float().flatten(0, 1)
            each = functional.cross_entropy(logits, place[:, ::_STRIDE].flatten(), reduction="none")
            total = total + (each * scale).sum() / scale.sum().clamp(min=1.0)
        return total / len(self.heads)


class Stage(NamedTuple):
    """A stretch of the run: it lasts until `until` of the run's time, on rows of `length` tokens."""

    until: float
    length: int
    text_share: float
    worker_share: float


STAGES = (Stage(0.15, 2_048, 1.0, 0.15), Stage(0.80, 4_096, 1 / 6, 0.55), Stage(1.0, 8_192, 1 / 6, 0.30))
WARM_UP_STEPS = 150


def build_model(vocabulary: int) -> PreTrainedModel:
    """Return a fresh float32 model."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_TEXT_ID)
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    more: dict[str, Any] = {"max_position_embeddings": 8_192, "tie_word_embeddings": True, "rope_parameters": rope}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **SIZES, **ends, **more))


def losses(hidden: torch.Tensor, embedding: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [weighted loss, mean loss of answer tokens, share of answer tokens that are the likeliest]. hidden: (rows,
    length, width); embedding: (vocabulary, width); ids and weights: (rows, length)."""
    logits = functional.linear(hidden[:, :-1], embedding).float().flatten(0, 1)
    targets, scale = ids[:, 1:].flatten(), weights[:, 1:].flatten().float()
    each = functional.cross_entropy(logits, targets, reduction="none")
    answers = (scale > TEXT_WEIGHT).float()
    count = answers.sum().clamp(min=1.0)
    hits = ((logits.argmax(-1) == targets).float() * answers).sum() / count
    return torch.stack([(each * scale).sum() / scale.sum(), (each * answers).sum() / count, hits])


class Trainer:
    """Runs the stages by the share of minutes or steps gone, and writes the log."""

    def __init__(self, arguments: argparse.Namespace, model: PreTrainedModel, probe: PlaceProbe, log: IO[str]) -> None:
        self._arguments = arguments
        self._device, self._is_compiled = arguments.device, arguments.device == "cuda"
        self._model = model.to(self._device).train()
        self._probe = probe.to(self._device)
        self._parameters = [*model.parameters(), *probe.parameters()]
        # Only matrices decay.
        decays = grouped(self._parameters, lambda each: 0.1 if each.dim() > 1 else 0.0)
        groups = [{"params": each, "weight_decay": decay} for decay, each in decays.items()]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=self._is_compiled)
        self._losses, self._log, self.step = losses, log, 0
        if self._is_compiled:
            # Layer by layer: the layers share their code, so one compilation serves all of them.
            for layer in model.model.layers:
                layer.compile(dynamic=False)
            self._probe.compile(dynamic=False)
            self._losses = torch.compile(losses, dynamic=False)

    def run(self, streams: Sequence[Iterator[Any]]) -> None:
        """Train on the stages' batches until the minutes or steps are used up."""
        # Every shape is compiled before the clock starts.
        for stream in streams if self._is_compiled else []:
            self._update(next(stream), rate=0.0)
        started, tokens = (marked := time.monotonic()), 0
        steps, seconds = self._arguments.steps, 60.0 * self._arguments.minutes
        while (progress := self.step / steps if steps else (time.monotonic() - started) / seconds) < 1.0:
            batch = next(next(stream for stream, stage in zip(streams, STAGES, strict=True) if progress < stage.until))
            cosine, warm_up = 0.5 * (1.0 + math.cos(math.pi * progress)), min(1.0, (self.step + 1) / WARM_UP_STEPS)
            values = self._update(batch, RATE * warm_up * (0.02 + 0.98 * cosine))
            self.step += 1
            tokens += batch[0].numel()
            if self.step % LOG_EVERY == 0:
                now, entry = time.monotonic(), {"step": self.step, "length": batch[0].shape[1]}
                names = ("loss", "answer_loss", "answer_hits", "probe_loss")
                entry |= {name: round(value, 4) for name, value in zip(names, values.tolist(), strict=True)}
                entry |= {"tokens_per_second": round(tokens / (now - marked)), "wall_seconds": round(now - started, 1)}
                for file in (self._log, sys.stdout):
                    print(json.dumps(entry), file=file, flush=True)
                tokens, marked = 0, now

    def _update(self, batch: tuple[torch.Tensor, torch.Tensor], rate: float) -> torch.Tensor:
        ids, weights = (each.to(self._device, non_blocking=True) for each in batch)
        ids = ids.long()
        with torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda"):
            found = self._model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
            values = self._losses(found.last_hidden_state, self._model.lm_head.weight, ids, weights)
            probe_loss = self._probe(found.hidden_states[PROBE_LAYERS], ids)
        torch.autograd.backward(values[0] + PROBE_WEIGHT * probe_loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.cat([values.detach(), probe_loss.detach().reshape(1)])


def save(model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer: no token is added to a prompt, special ones are known."""
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=[END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), SEPARATOR)
    more: dict[str, Any] = {"extra_special_tokens": list(prompts.MARKS), "clean_up_tokenization_spaces": False}
    packaged = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8_192, **ends, **more)
    packaged.save_pretrained(directory)


def main(values: list[str] | None = None) -> None:
    """Train, log and save."""
    parser = argparse.ArgumentParser(prog="benchmarks.yardstick_model.train", description="Train the shipped model.")
    parser.add_argument("--text", type=Path, required=True, help="books in UTF-8, separated by <|endoftext|>, or a .gz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8.0, help="training time without compilation")
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of --minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="compiled on cuda")
    arguments = parser.parse_args(values)
    if arguments.minutes <= 0 or arguments.steps < 0:
        parser.error("--minutes must be above 0 and --steps not below 0.")
    try:
        books = read_books(arguments.text)
    except ConfigurationError as error:
        sys.exit(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    tokenizer = train_tokenizer(books, arguments.seed)
    # Token ids of all books, each followed by <|endoftext|>.
    ids = [np.asarray(it.ids, dtype=np.uint16) for it in tokenizer.encode_batch(paragraphs(books, characters=20_000))]
    source = tokenizer, books, np.concatenate(ids)
    # Forked workers share the books; the parent must not have touched the GPU yet.
    loaders: list[DataLoader[Any]] = [
        DataLoader(
            TaskWriter(*source, arguments.seed, (BATCH_TOKENS // stage.length, stage.length, stage.text_share)),
            batch_size=None,
            num_workers=max(1, round(WORKERS * stage.worker_share)),
            prefetch_factor=32,
            multiprocessing_context="fork",
        )
        for stage in STAGES
    ]
    streams = list(map(iter, loaders))
    torch.set_float32_matmul_precision("high")
    model = build_model(tokenizer.get_vocab_size())
    with (arguments.out / "training_log.jsonl").open("w", encoding="utf-8") as log:
        given = settings_in_text(arguments, text=arguments.text.name, out=arguments.out.name)
        known: dict[str, Any] = {"arguments": given, "versions": versions(), "machine": describe(arguments.device)}
        known["text_sha256"] = hashlib.sha256(arguments.text.read_bytes()).hexdigest()
        log.write(json.dumps(known) + "\n")
        Trainer(arguments, model, PlaceProbe(model.config.hidden_size, tokenizer), log).run(streams)
        save(model, tokenizer, arguments.out / "model")


if __name__ == "__main__":
    main()
