"""A donor's file: safetensors with `kv` [layers, tokens, kv_factor, kv_heads, head_dim] and `tokens` int32 [tokens].

KV lies in it as in host memory, from a whole page on, so that it is mapped rather than parsed. The header's metadata
say whose it is, and hold a CRC-32 of every layer and one of the tokens together with the names. The library writes
safetensors only from a second copy in memory, so the header is written here; everything is read by the library.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from semblend_trt.donors.donor_text import DonorText
from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    import numpy.typing as npt

    from semblend_trt.donors.file_size import FileSize
    from semblend_trt.donors.host_kv import HostKv

FORMAT = "semblend-donor-1"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_LENGTH_BYTES = 8


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


def write_donor(path: Path, donor_id: str, text: DonorText, kv: HostKv, form: KvForm, size: FileSize) -> None:
    """Writes the file; its bytes are on the disk when this returns. Raises OSError, and leaves what there is then.

    Only the owner may read it. `text` holds as many tokens as `kv`.
    """
    tokens = len(text.tokens)
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
        file.seek(0)
        _write_all(file, memoryview(_header(donor_id, text, checksums, form, size)))
        os.fsync(descriptor)


def read_text(path: Path, form: KvForm) -> tuple[str, DonorText]:
    """Returns the donor's id and text, checked. Raises DonorFileError, and OSError where the file cannot be opened."""
    with _opened(path) as file:
        about = _about(file, form)
        tokens = np.array(file.get_tensor("tokens").numpy(), dtype=np.int32)
    text = DonorText(about["namespace_key"], tokens, bytes.fromhex(about["digest"]))
    if _text_checksum(about["donor_id"], text) != int(about["text_checksum"]):
        raise DonorFileError("corrupt", f"{path.name} does not hold the tokens that were written")
    return about["donor_id"], text


def read_kv(path: Path, donor_id: str, form: KvForm, held: HostKv, threads: Executor) -> None:
    """Copies the file's KV into `held` and checks what arrived there, layer by layer on `threads`.

    Raises DonorFileError, and OSError where the file cannot be opened; `held` is then worth nothing.
    """
    with _opened(path) as file:
        about = _about(file, form)
        checksums = [int(word) for word in about["checksums"].split()]
        kv = file.get_tensor("kv")
        if about["donor_id"] != donor_id or kv.shape[1] != held.capacity or len(checksums) != form.num_layers:
            raise DonorFileError("corrupt", f"{path.name} is not the file of donor {donor_id}")

        def copy(layer: int) -> bool:
            start, checksum = 0, 0
            for part in held.parts:
                part.tensor[layer].permute(2, 0, 1, 3).copy_(kv[layer, start : start + part.capacity])
                start += part.capacity
            for arrived in _layer_bytes(held, layer):
                checksum = zlib.crc32(arrived, checksum)
            return checksum == checksums[layer]

        if not all(threads.map(copy, range(form.num_layers))):
            raise DonorFileError("corrupt", f"{path.name} does not hold the KV that was written")


def _header(donor_id: str, text: DonorText, checksums: list[int], form: KvForm, size: FileSize) -> bytes:
    tokens = len(text.tokens)
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
    if len(encoded) > room:
        raise OSError(f"the header of donor {donor_id} has {len(encoded)} bytes; {room} are set aside for it")
    return room.to_bytes(_LENGTH_BYTES, "little") + encoded.ljust(room)


def _about(file: Any, form: KvForm) -> dict[str, str]:
    """The file's metadata, once they say that it is one of ours, of this geometry, and complete."""
    about: dict[str, str] = file.metadata() or {}
    if about.get("format") != FORMAT:
        raise DonorFileError("other_version", f"the file is of format {about.get('format')!r:.40}, not {FORMAT}")
    try:
        kv, tokens = file.get_slice("kv"), file.get_slice("tokens")
        found = (kv.get_dtype(), kv.get_shape())
        needed = (_DTYPES[form.dtype], form.in_file(tokens.get_shape()[0]))
    except SafetensorError as error:
        raise DonorFileError("corrupt", f"the file lacks a tensor: {error}") from error
    if found != needed:
        raise DonorFileError("other_geometry", f"the file holds KV of {found}; {needed} is needed")
    names = ("donor_id", "namespace_key", "digest", "text_checksum", "checksums")
    if not all(name in about for name in names) or tokens.get_dtype() != "I32":
        raise DonorFileError("corrupt", f"the file's header lacks one of {', '.join(names)}")
    return about


class _opened:  # noqa: N801 - used like a function
    """`safe_open` with the library's errors in our words."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None

    def __enter__(self) -> Any:
        try:
            self._file = safe_open(str(self._path), framework="pt", device="cpu")
            return self._file.__enter__()
        except SafetensorError as error:
            raise DonorFileError("corrupt", f"{self._path.name} is no whole safetensors file: {error}") from error

    def __exit__(self, *raised: object) -> None:
        self._file.__exit__(*raised)


def _layer_bytes(kv: HostKv, layer: int) -> Iterator[memoryview]:
    """One layer's memory, part by part in the order of its tokens, without a copy."""
    for part in kv.parts:
        rows = part.tensor[layer].permute(2, 0, 1, 3)  # [tokens, kv_factor, kv_heads, head_dim]
        yield _bytes_of(rows.reshape(-1).view(torch.uint8).numpy())


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
