"""What the shipped model reads: books, by a byte-level BPE tokenizer in which every digit is a token, and training
rows: documents under one instruction, then questions with answers, written ahead by worker processes."""

import gzip
import importlib.resources
import itertools
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import IterableDataset, get_worker_info

from semblend_trt.errors import ConfigurationError
from validation import documents, prompts
from validation.documents import Document

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
    """Return the books of a UTF-8 text file (plain or .gz) separated by `<|endoftext|>`. The book with the shipped
    excerpt is left out, so that the model does not see it. Raises ConfigurationError if the file is missing, is not
    UTF-8 text or holds fewer than 100,000 characters."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The text file {path} cannot be read: {error}.") from error
    excerpt = importlib.resources.files("validation") / "assets" / "excerpt.txt"
    opening = excerpt.read_text(encoding="utf-8")[1_000:1_200]
    books = [book.strip() for book in text.split(SEPARATOR) if opening not in book]
    if sum(map(len, books)) < 100_000:
        few = "holds fewer than 100,000 characters besides the shipped excerpt."
        raise ConfigurationError(f"The text file {path} {few}")
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


def encode_books(tokenizer: Tokenizer, books: list[str]) -> NDArray[np.uint16]:
    """Return all books as one array of token ids, each book followed by `<|endoftext|>`."""
    encodings = tokenizer.encode_batch(paragraphs(books, characters=20_000))
    return np.concatenate([np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings])


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
_UNKNOWN_SHARE = 0.04
_RECENCY_SHARE = 0.2


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
        worker = get_worker_info()
        self._rng.seed((self._seed * 1_000 + (0 if worker is None else worker.id)) * 10_000 + self._shape[1])
        while True:
            yield self._batch(*self._shape)

    def _batch(self, rows: int, length: int, text_share: float) -> Batch:
        written, weights = list[NDArray[np.uint16]](), list[NDArray[np.uint8]]()
        for _ in range(rows):
            if self._rng.random() < text_share:
                written.append(self._prose_row(length))
                weights.append(np.full(length, TEXT_WEIGHT, dtype=np.uint8))
            else:
                written.append(np.asarray(self._prompts(length)[:length], dtype=np.uint16))
                weights.append(answer_weights(written[-1]))
        return np.stack(written), np.stack(weights)

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
