"""The public-domain books that the shipped model reads, without the book behind the shipped excerpt."""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SEPARATOR = "<|endoftext|>"


class CorpusError(ValueError):
    """Raised with one sentence when the text file cannot be used."""


def read_books(path: Path) -> list[str]:
    """Return the books of a UTF-8 text file (plain or .gz) separated by `<|endoftext|>`.

    The book that holds the shipped excerpt is left out, so that the excerpt stays unseen by the model.
    Raises CorpusError if the file is missing, is not UTF-8 text or holds fewer than 100,000 characters.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"The text file {path} cannot be read: {error}.") from error
    opening = _excerpt_opening()
    books = [book.strip() for book in text.split(SEPARATOR) if opening not in book]
    if sum(map(len, books)) < 100_000:
        raise CorpusError(f"The text file {path} holds fewer than 100,000 characters besides the shipped excerpt.")
    return [book for book in books if book]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def paragraphs(books: list[str], characters: int) -> list[str]:
    """Return the books cut at blank lines into pieces of about `characters`; books end with the separator."""
    pieces: list[str] = []
    for book in books:
        start = 0
        while len(book) - start > characters:
            cut = book.rfind("\n\n", start + 1, start + characters)
            end = cut if cut > start else start + characters
            pieces.append(book[start:end])
            start = end
        pieces.append(book[start:] + SEPARATOR)
    return pieces


def _excerpt_opening() -> str:
    file = importlib.resources.files("validation") / "assets" / "excerpt.txt"
    return file.read_text(encoding="utf-8")[1_000:1_200]
