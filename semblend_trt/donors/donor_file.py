"""A donor's file: safetensors with `kv` [layers, tokens, kv_factor, kv_heads, head_dim] and `tokens` int32 [tokens].

KV lies in it as in host memory, from a whole page on, so that it is read to its place. The header's metadata say whose
it is, and hold a CRC-32 of every layer and one of the tokens together with the names. The library writes safetensors
only from a second copy in memory, and maps what it reads: a page that the disk cannot give would then end the process.
So both are done here, with plain reads.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from semblend_trt.donors.donor_text import DonorText
from semblend_trt.donors.file_size import FileSize
from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from semblend_trt.donors.host_kv import HostKv

FORMAT = "semblend-donor-1"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LENGTH_BYTES = 8
# Far above the header of any model's file; what claims more is none.
_MOST_HEADER_BYTES = 1 << 20
_READING_THREADS = 4


class DonorFileError(SemBlendError):
    """A file cannot be used; `reason` is other_version, other_geometry, corrupt, unreadable or unfinished."""

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
    def file_size(self) -> FileSize:
        return FileSize(self.num_layers, self.num_layers * self.layer_bytes)


def write_donor(path: Path, donor_id: str, text: DonorText, kv: HostKv, form: KvForm) -> None:
    """Writes the file; its bytes are on the disk when this returns. Raises OSError, and leaves what there is then.

    Only the owner may read it. `text` holds as many tokens as `kv`.
    """
    tokens, size = len(text.tokens), form.file_size
    kv_bytes = tokens * size.bytes_per_token
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        # A full disk is met before anything is copied.
        os.posix_fallocate(descriptor, 0, size.header_bytes + kv_bytes + 4 * tokens)
        file.seek(size.header_bytes)
        checksums = []
        for layer in range(form.num_layers):
            checksum = 0
            for part in _layer_bytes(kv, layer):
                checksum = zlib.crc32(part, checksum)
                _write_all(file, part)
            checksums.append(checksum)
        _write_all(file, _token_bytes(text))
        header = _header(donor_id, text, checksums, form)
        if len(header) > size.header_bytes:
            raise OSError(
                f"the header of donor {donor_id:.140} has {len(header)} bytes; {size.header_bytes} are set aside for it"
            )
        file.seek(0)
        _write_all(file, memoryview(header))
        os.fsync(descriptor)


def read_text(path: Path, form: KvForm) -> tuple[str, DonorText]:
    """Returns the donor's id and text, checked. Raises DonorFileError, and OSError where the file cannot be read."""
    with path.open("rb", buffering=0) as file:
        donor_id, text, _ = _about(file.fileno(), path.name, form)
    return donor_id, text


def read_kv(path: Path, donor_id: str, form: KvForm, held: HostKv) -> None:
    """Reads the file's KV into `held` and checks what arrived there, some layers at a time.

    Raises DonorFileError, and OSError where the file cannot be read; `held` is then worth nothing.
    """
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        found, text, checksums = _about(descriptor, path.name, form)
        if found != donor_id or len(text.tokens) != held.capacity:
            raise DonorFileError("corrupt", f"{path.name} is not the file of donor {donor_id}")
        errors: list[Exception] = []

        def read(layers: range) -> None:
            try:
                for layer in layers:
                    if _layer_read(descriptor, layer, form, held) != checksums[layer]:
                        raise DonorFileError("corrupt", f"{path.name} does not hold the KV that was written")
            except Exception as error:
                errors.append(error)

        shares = [range(first, form.num_layers, _READING_THREADS) for first in range(_READING_THREADS)]
        # Daemons: a disk that never answers must not keep the process from ending.
        threads = [threading.Thread(target=read, args=(share,), name="semblend-read", daemon=True) for share in shares]
        try:
            for thread in threads:
                thread.start()
        finally:
            # An error closes the file and gives `held` away: nobody may read by then.
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if errors:
            raise errors[0]


def _layer_read(descriptor: int, layer: int, form: KvForm, held: HostKv) -> int:
    """Reads a layer into `held`; returns the checksum of what arrived."""
    at, checksum = form.file_size.header_bytes + layer * held.capacity * form.layer_bytes, 0
    for part in _layer_bytes(held, layer):
        _read_all(descriptor, part, at)
        at, checksum = at + len(part), zlib.crc32(part, checksum)
    return checksum


def _header(donor_id: str, text: DonorText, checksums: list[int], form: KvForm) -> bytes:
    """All bytes before the KV; more than are set aside for them where the names are too long."""
    tokens, size = len(text.tokens), form.file_size
    end = tokens * size.bytes_per_token
    header = {
        "__metadata__": {
            "format": FORMAT,
            "donor_id": donor_id,
            "namespace_key": text.namespace_key,
            "digest": text.digest.hex(),
            "text_checksum": str(_text_checksum(donor_id, text)),
            "checksums": " ".join(map(str, checksums)),
        },
        "kv": {"dtype": _DTYPES[form.dtype], "shape": form.in_file(tokens), "data_offsets": [0, end]},
        "tokens": {"dtype": "I32", "shape": [tokens], "data_offsets": [end, end + 4 * tokens]},
    }
    room = size.header_bytes - _LENGTH_BYTES
    encoded = json.dumps(header, separators=(",", ":")).encode("ascii")
    return room.to_bytes(_LENGTH_BYTES, "little") + encoded.ljust(room)


def _about(descriptor: int, name: str, form: KvForm) -> tuple[str, DonorText, list[int]]:
    """The donor's id, its text and its layers' checksums, once the file is one of ours, of this form, and whole but for
    the KV, at which nobody has looked."""
    length = int.from_bytes(_bytes_at(descriptor, 0, _LENGTH_BYTES), "little")
    if length > _MOST_HEADER_BYTES:
        raise DonorFileError("corrupt", f"{name} claims a header of {length} bytes")
    written = _bytes_at(descriptor, _LENGTH_BYTES, length)
    try:
        return _checked(descriptor, name, form, written)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DonorFileError("corrupt", f"{name} is no whole donor's file: {error!r:.140}") from error


def _checked(descriptor: int, name: str, form: KvForm, written: bytes) -> tuple[str, DonorText, list[int]]:
    """As `_about`, of the header behind its length. Its words are trusted only where they give the same header again;
    before, they may raise anything that `_about` catches."""
    header, size = json.loads(written), form.file_size
    about = header.get("__metadata__", {})
    if about.get("format") != FORMAT:
        raise DonorFileError("other_version", f"{name} is of format {about.get('format')!r:.40}, not {FORMAT}")
    (tokens,) = header["tokens"]["shape"]
    found, needed = (header["kv"]["dtype"], header["kv"]["shape"]), (_DTYPES[form.dtype], form.in_file(tokens))
    if found != needed:
        raise DonorFileError("other_geometry", f"{name} holds KV of {found!s:.140}; {needed!s:.140} is needed")
    end = size.header_bytes + tokens * size.bytes_per_token
    if tokens < 1 or os.fstat(descriptor).st_size != end + 4 * tokens:
        raise ValueError(f"{tokens} tokens take {end + 4 * tokens} bytes")
    token_ids = np.frombuffer(_bytes_at(descriptor, end, 4 * tokens), dtype="<i4").astype(np.int32)
    text = DonorText(about["namespace_key"], token_ids, bytes.fromhex(about["digest"]))
    donor_id, checksums = about["donor_id"], [int(word) for word in about["checksums"].split()]
    if _header(donor_id, text, checksums, form)[_LENGTH_BYTES:] != written or len(checksums) != form.num_layers:
        raise ValueError("its text is not the one that was written")
    return donor_id, text, checksums


def _layer_bytes(kv: HostKv, layer: int) -> Iterator[memoryview]:
    """One layer's memory, part by part in the order of its tokens, without a copy."""
    for part in kv.parts:
        rows = part.tensor[layer].permute(2, 0, 1, 3)  # [tokens, kv_factor, kv_heads, head_dim]
        yield _bytes_of(rows.view(-1).view(torch.uint8).numpy())


def _text_checksum(donor_id: str, text: DonorText) -> int:
    names = json.dumps([donor_id, text.namespace_key, text.digest.hex()]).encode("ascii")
    return zlib.crc32(_token_bytes(text), zlib.crc32(names))


def _token_bytes(text: DonorText) -> memoryview:
    return _bytes_of(np.ascontiguousarray(text.tokens, dtype="<i4").view(np.uint8))


def _bytes_of(array: npt.NDArray[np.uint8]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs know buffers from Python 3.12 on


def _write_all(file: Any, view: memoryview) -> None:
    """Writes everything: the system takes at most 2 GiB at once, and may take less."""
    while view:
        view = view[file.write(view) :]


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
