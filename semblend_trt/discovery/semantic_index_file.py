"""The file of a semantic index: a line of JSON, the vectors of every namespace, and a digest of both.

Layout: magic, 8 bytes; length of the JSON, uint64 little-endian; the JSON; the vectors in its order; SHA-256 of all
that. Namespaces stand there as their keys, which are digests: no salt can be read from the file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

MAGIC = b"SBLNDVEC"
VERSION = 2

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class ShelfRecord:
    """One namespace: its key, its entries by row, and its vectors as the index library writes them."""

    namespace_key: str
    entry_ids: list[str]
    vectors: bytes


def write_index(path: Path, identity: str, dim: int, records: list[ShelfRecord]) -> None:
    """Writes the file in the place of an earlier one in one step, on disk before that. Symlinks are followed.

    Raises ConfigurationError naming the path when it cannot be written; an earlier file is then untouched.
    """
    shelves = [
        {"namespace": record.namespace_key, "entries": record.entry_ids, "bytes": len(record.vectors)}
        for record in records
    ]
    header = json.dumps({"version": VERSION, "identity": identity, "dim": dim, "shelves": shelves}).encode()
    parts = [MAGIC, len(header).to_bytes(8, "little"), header, *(record.vectors for record in records)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    try:
        # Vectors tell of texts: the file is for its owner only.
        write_bytes(path, *parts, digest.digest(), mode=0o600, is_durable=True)
    except OSError as error:
        raise ConfigurationError(f"the index {path} cannot be written: {error.strerror or error}") from error


def read_index(path: Path, identity: str, namespace_keys: Collection[str] | None) -> tuple[int, list[ShelfRecord]]:
    """The vectors' size and every namespace of a file. Raises ConfigurationError saying what is wrong with it."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"the index {path} cannot be read: {error.strerror or error}") from error
    body = content[:-_DIGEST_BYTES]
    if len(content) < len(MAGIC) + 8 + _DIGEST_BYTES or bytes(content[: len(MAGIC)]) != MAGIC:
        raise ConfigurationError(f"{path} is no semantic index")
    if hashlib.sha256(body).digest() != bytes(content[-_DIGEST_BYTES:]):
        raise ConfigurationError(f"the index {path} is damaged: its digest does not fit; delete it")
    begin = len(MAGIC) + 8
    end = begin + int.from_bytes(body[len(MAGIC) : begin], "little")
    try:
        header = json.loads(bytes(body[begin:end]))
        if header["version"] != VERSION:
            raise ConfigurationError(f"the index {path} has version {header['version']}, not {VERSION}; delete it")
        if header["identity"] != identity:
            raise ConfigurationError(f"the index {path} was made by {header['identity']}, not by {identity}; delete it")
        records = []
        for shelf in header["shelves"]:
            begin, end = end, end + int(shelf["bytes"])
            entry_ids = [str(entry_id) for entry_id in shelf["entries"]]
            records.append(ShelfRecord(str(shelf["namespace"]), entry_ids, bytes(body[begin:end])))
        dim = int(header["dim"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"the index {path} has a header of another form: {error}; delete it") from error
    strange = [
        record.namespace_key
        for record in records
        if namespace_keys is not None and record.namespace_key not in namespace_keys
    ]
    if strange:
        raise ConfigurationError(
            f"the index {path} has the namespace {strange[0]}, which is not served here; delete it"
        )
    return dim, records
