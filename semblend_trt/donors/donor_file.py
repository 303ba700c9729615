"""A donor's file: safetensors with `kv` [layers, tokens, kv_factor, kv_heads, head_dim] and `tokens` int32 [tokens].

KV lies in the file as in host memory and begins at a page boundary, so it is read straight to its place. The header's
metadata name the donor and hold a SHA-256 of every layer and of the tokens. An HMAC-SHA256 seals the whole header: the
seal binds the header, and the header binds every other byte, its place and the file's length. Without the key no file
can be made that is read.

The safetensors package is not used. It writes from a second copy in memory, and it maps what it reads: a page that the
disk cannot give would then end the process.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from semblend_trt.donors.host_tier import HostKv


PAGE = 4096
_TOKEN_ID_BYTES = 4
# A header holds names and numbers of fixed length, and of each layer a digest in hexadecimal.
_HEADER_FIXED, _HEADER_PER_LAYER = 1536, 65
FORMAT = "semblend-donor-3"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
_LENGTH_BYTES = 8
# Far above the header of any model's file; what claims more is none.
_MOST_HEADER_BYTES = 1 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True, eq=False)
class DonorText:
    """`tokens`: int32 [n]; `generation` is above 0 where the KV was built from approximate KV."""

    namespace_key: str
    tokens: npt.NDArray[np.int32]
    generation: int = 0


FILE_REASONS = ("other_version", "other_key", "other_geometry", "corrupt", "unreadable", "unfinished")


class DonorFileError(SemBlendError):
    """A file cannot be used; `reason` is one of FILE_REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class KvForm:
    """What all donors of one rank have in common: their sizes and dtype."""

    num_layers: int
    kv_factor: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def shape(self, tokens: int) -> tuple[int, ...]:
        """[layers, kv_factor, kv_heads, tokens, head_dim], as tiers take it."""
        return self.num_layers, self.kv_factor, self.kv_heads, tokens, self.head_dim

    def in_file(self, tokens: int) -> list[int]:
        return [self.num_layers, tokens, self.kv_factor, self.kv_heads, self.head_dim]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.kv_factor * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes before the KV, whole pages, so that it begins where a block of the disk does."""
        return _header_bytes(self.num_layers)


def file_bytes(num_layers: int, token_bytes: int, tokens: int) -> int:
    """Bytes on disk, whole pages, of a donor with `token_bytes` bytes of KV a token; known before it is written."""
    return _header_bytes(num_layers) + _pages(tokens * (token_bytes + _TOKEN_ID_BYTES))


@dataclass(frozen=True, slots=True)
class _Header:
    """What a file's header says beside its form: `tokens` of them, and the digests of all layers and of the tokens, in
    hexadecimal and in this order."""

    donor_id: str
    namespace_key: str
    tokens: int
    digests: str
    generation: int

    def sealed(self, form: KvForm, key: bytes) -> tuple[bytes, str]:
        """All bytes before the KV, more than are set aside for them where the names are too long; and their seal."""
        end = self.tokens * form.token_bytes
        about: dict[str, Any] = {
            "format": FORMAT,
            "key": _key_name(key),
            "donor_id": self.donor_id,
            "namespace_key": self.namespace_key,
            "digests": self.digests,
        }
        if self.generation:  # a version that does not know of generations then refuses the file
            about["generation"] = self.generation
        header = {
            "__metadata__": about,
            "kv": {"dtype": _DTYPES[form.dtype], "shape": form.in_file(self.tokens), "data_offsets": [0, end]},
            "tokens": {"dtype": "I32", "shape": [self.tokens], "data_offsets": [end, end + 4 * self.tokens]},
        }
        about["seal"] = seal = hmac.digest(key, _encoded(header), "sha256").hex()
        room = form.header_bytes - _LENGTH_BYTES
        return room.to_bytes(_LENGTH_BYTES, "little") + _encoded(header).ljust(room), seal


def write_donor(descriptor: int, donor_id: str, text: DonorText, kv: HostKv, form: KvForm, key: bytes) -> str:
    """Fills an empty file and returns its seal once all bytes are on the disk. `text` holds as many tokens as `kv`.

    Raises OSError; the file is then incomplete.
    """
    tokens = len(text.tokens)
    end = form.header_bytes + tokens * form.token_bytes
    # A full disk is met before anything is copied.
    os.posix_fallocate(descriptor, 0, end + 4 * tokens)
    digests = _of_layers(form, lambda layer: _moved(_write_all, descriptor, layer, form, kv))
    token_bytes = _token_bytes(text.tokens)
    _write_all(descriptor, token_bytes, end)
    digests.append(hashlib.sha256(token_bytes).hexdigest())
    named = _Header(donor_id, text.namespace_key, tokens, " ".join(digests), text.generation)
    header, seal = named.sealed(form, key)
    if len(header) > form.header_bytes:
        raise OSError(
            f"donor {donor_id:.140}: its header has {len(header)} bytes; {form.header_bytes} are set aside for it"
        )
    _write_all(descriptor, memoryview(header), 0)
    os.fsync(descriptor)
    return seal


def read_text(descriptor: int, form: KvForm, key: bytes) -> tuple[str, DonorText, str]:
    """The donor's id, its text and the file's seal, checked. Raises DonorFileError; OSError where reading fails."""
    header, seal = _header_of(descriptor, form, key)
    end = form.header_bytes + header.tokens * form.token_bytes
    token_ids = np.frombuffer(_bytes_at(descriptor, end, 4 * header.tokens), dtype="<i4").astype(np.int32)
    if hashlib.sha256(_token_bytes(token_ids)).hexdigest() != header.digests.split()[-1]:
        raise DonorFileError("corrupt", "the file does not hold the tokens that were written")
    text = DonorText(header.namespace_key, token_ids, header.generation)
    return header.donor_id, text, seal


def read_kv(descriptor: int, seal: str, form: KvForm, key: bytes, held: HostKv) -> None:
    """Reads the KV of the file that has the seal into `held` and checks what arrived there, some layers at a time.

    Raises DonorFileError, and OSError where the file cannot be read; `held` is then worth nothing.
    """
    header, found = _header_of(descriptor, form, key)
    if found != seal:
        raise DonorFileError("corrupt", "another file of ours has come in its place")
    written = header.digests.split()[: form.num_layers]
    if _of_layers(form, lambda layer: _moved(_read_all, descriptor, layer, form, held)) != written:
        raise DonorFileError("corrupt", "the file does not hold the KV that was written")


def _of_layers(form: KvForm, work: Callable[[int], str]) -> list[str]:
    """The results of `work` for each layer, on several threads. An error is raised once all threads have ended: behind
    it the file is closed and the memory given away."""
    results, errors = [""] * form.num_layers, []

    def run(layers: range) -> None:
        try:
            for layer in layers:
                results[layer] = work(layer)
        except Exception as error:
            errors.append(error)

    shares = [range(first, form.num_layers, _THREADS) for first in range(_THREADS)]
    # Daemons: a disk that never answers must not keep the process from ending.
    threads = [threading.Thread(target=run, args=(share,), name="semblend-layers", daemon=True) for share in shares]
    try:
        for thread in threads:
            thread.start()
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return results


def _moved(move: Callable[[int, memoryview, int], None], descriptor: int, layer: int, form: KvForm, kv: HostKv) -> str:
    """Writes a layer to its place in the file, or reads it from there; returns the digest of its bytes in memory."""
    at, digest = form.header_bytes + layer * kv.capacity * form.layer_bytes, hashlib.sha256()
    for part in kv.parts:
        rows = part.tensor[layer].permute(2, 0, 1, 3)  # [tokens, kv_factor, kv_heads, head_dim], without a copy
        view = _bytes_of(rows.view(-1).view(torch.uint8).numpy())
        move(descriptor, view, at)
        digest.update(view)
        at += len(view)
    return digest.hexdigest()


def _header_of(descriptor: int, form: KvForm, key: bytes) -> tuple[_Header, str]:
    """The header and its seal. Checked are key, form and the file's length; tokens and KV are not."""
    length = int.from_bytes(_bytes_at(descriptor, 0, _LENGTH_BYTES), "little")
    if length > _MOST_HEADER_BYTES:
        raise DonorFileError("corrupt", f"the file claims a header of {length} bytes")
    written = _bytes_at(descriptor, 0, _LENGTH_BYTES + length)
    try:
        header = _claimed(written[_LENGTH_BYTES:], form, key)
        expected, seal = header.sealed(form, key)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DonorFileError("corrupt", f"this is no donor's file: {error!r:.140}") from error
    # Nothing that a header says is used before this: a header that another key sealed is forged.
    if not hmac.compare_digest(expected, written):
        raise DonorFileError("corrupt", "the file's header is not the one that was sealed")
    size = form.header_bytes + header.tokens * (form.token_bytes + 4)
    if os.fstat(descriptor).st_size != size:
        raise DonorFileError("corrupt", f"the file has {os.fstat(descriptor).st_size} bytes; {size} were written")
    return header, seal


def _claimed(encoded: bytes, form: KvForm, key: bytes) -> _Header:
    """The header as the file claims it. Refuses another version, key or form; a forged one may raise anything that
    `_header_of` catches."""
    said = json.loads(encoded)
    about = said.get("__metadata__", {})
    if about.get("format") != FORMAT:
        raise DonorFileError("other_version", f"the file is of format {about.get('format')!r:.40}, not {FORMAT}")
    if about["key"] != _key_name(key):
        raise DonorFileError("other_key", "the file was sealed with another key; engines that share files share a key")
    (tokens,) = said["tokens"]["shape"]
    found, needed = (said["kv"]["dtype"], said["kv"]["shape"]), (_DTYPES[form.dtype], form.in_file(tokens))
    if found != needed:
        raise DonorFileError("other_geometry", f"the file holds KV of {found!s:.140}; {needed!s:.140} is needed")
    generation = about.get("generation", 0)
    return _Header(about["donor_id"], about["namespace_key"], tokens, about["digests"], generation)


def _header_bytes(num_layers: int) -> int:
    return _pages(_HEADER_FIXED + _HEADER_PER_LAYER * num_layers)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _encoded(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode("ascii")


def _key_name(key: bytes) -> str:
    """A name by which keys are told apart; it says nothing about them."""
    return hmac.digest(key, b"semblend donor key", "sha256").hex()[:16]


def _token_bytes(tokens: npt.NDArray[np.int32]) -> memoryview:
    return _bytes_of(np.ascontiguousarray(tokens, dtype="<i4").view(np.uint8))


def _bytes_of(array: npt.NDArray[np.uint8]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs know buffers from Python 3.12 on


def _write_all(descriptor: int, view: memoryview, start: int) -> None:
    """Writes everything: the system takes at most 2 GiB at once, and may take less."""
    while view:
        taken = os.pwrite(descriptor, view, start)
        view, start = view[taken:], start + taken


def _bytes_at(descriptor: int, start: int, length: int) -> bytes:
    data = bytearray(length)
    _read_all(descriptor, memoryview(data), start)
    return bytes(data)


def _read_all(descriptor: int, view: memoryview, start: int) -> None:
    """Fills `view` with the file's bytes from `start` on. Raises DonorFileError where it ends before, and OSError."""
    while view:
        taken = os.preadv(descriptor, [view], start)
        if not taken:
            raise DonorFileError("corrupt", f"the file ends at byte {start}")
        view, start = view[taken:], start + taken
