"""The books that the shipped model reads, and its tokenizer: byte-level BPE in which every digit is its own token."""

import gzip
import importlib.resources
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from validation import documents, prompts

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


class CorpusError(ValueError):
    """Raised with one sentence when the text file cannot be used."""


def read_books(path: Path) -> list[str]:
    """Return the books of a UTF-8 text file (plain or .gz) separated by `<|endoftext|>`. The book with the shipped
    excerpt is left out, so that the model does not see it. Raises CorpusError if the file is missing, is not UTF-8 text
    or holds fewer than 100,000 characters."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"The text file {path} cannot be read: {error}.") from error
    excerpt = importlib.resources.files("validation") / "assets" / "excerpt.txt"
    opening = excerpt.read_text(encoding="utf-8")[1_000:1_200]
    books = [book.strip() for book in text.split(SEPARATOR) if opening not in book]
    if sum(map(len, books)) < 100_000:
        raise CorpusError(f"The text file {path} holds fewer than 100,000 characters besides the shipped excerpt.")
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


def packaged(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer in Hugging Face form: no token is added to a prompt, special tokens are recognised."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        extra_special_tokens=list(prompts.MARKS),
        model_max_length=8_192,
        clean_up_tokenization_spaces=False,
    )


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
        for document in (documents.stock_list(rng), documents.fact_sheet(rng, people=1)):
            yield document.text
            yield from (question.text for question in document.questions)
