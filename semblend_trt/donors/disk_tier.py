"""The disk tier: one engine's folder of donor files, and the background transfers to and from it.

Files hold token ids and KV, from which prompts can be recovered. So only the owner may read the folder (0700, files
0600). A key outside the folder seals the files: a process that can write the folder cannot forge one.

A file is safetensors with `kv` [layers, tokens, kv_factor, kv_heads, head_dim] and `tokens` int32 [tokens]. KV has the
layout of host memory and begins at a page boundary, so the reader fills its destination directly. The header's metadata
name the donor and hold a SHA-256 of every layer and of the tokens. An HMAC-SHA256 seals the header, which fixes every
other byte, its place and the file's length.

The safetensors package is not used: it writes from a second copy, and maps what it reads. A page that the disk cannot
give would then end the process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from semblend_trt.background import Background, quiet_logger
from semblend_trt.donors.offload import DiskLink, DonorText, OffloadEvent, OffloadEventKind
from semblend_trt.errors import DonorUnavailableError, ReasonedError
from semblend_trt.files import open_file, open_folder, refuse_others

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from kernels.layout import KvGeometry
    from semblend_trt.donors.store import HostKv, HostTier

logger = quiet_logger(__name__)

FOLDER = "semblend-donors"
_SUFFIX, _UNFINISHED = ".donor.safetensors", ".donor.unfinished"
PAGE = 4096
# Names and numbers of fixed length, and a hexadecimal digest of each layer.
_HEADER_FIXED, _HEADER_PER_LAYER = 1536, 65
FORMAT = "semblend-donor-3"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
_LENGTH_BYTES = 8
# Far above the header of any model's file.
_MOST_HEADER_BYTES = 1 << 20
_THREADS = 4
KEY_BYTES = 32
# A donor that waits for its write cannot leave host memory; on a slow disk, more would crowd others out.
MAX_WAITING = 8
_CLOSING_SECONDS = 60.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
FILE_REASONS = ("other_version", "other_key", "other_geometry", "corrupt", "unreadable", "unfinished")


class DonorFileError(ReasonedError):
    """A file cannot be used; `reason` is one of FILE_REASONS."""


@dataclass(frozen=True, slots=True)
class KvForm:
    """Sizes and dtype that all donors of one rank share; blocks do not matter."""

    geometry: KvGeometry
    dtype: torch.dtype

    def in_file(self, tokens: int) -> list[int]:
        layers, kv_factor, kv_heads, _, head_dim = self.geometry.shape(tokens)
        return [layers, tokens, kv_factor, kv_heads, head_dim]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.geometry.bytes_per_token(self.dtype)

    @property
    def header_bytes(self) -> int:
        """Bytes before the KV: whole pages, so that KV begins at a disk block."""
        return _pages(_HEADER_FIXED + _HEADER_PER_LAYER * self.geometry.num_layers)

    def file_bytes(self, tokens: int) -> int:
        """Return a donor's bytes on disk, in whole pages."""
        return self.header_bytes + _pages(tokens * (self.token_bytes + 4))


@dataclass(frozen=True, slots=True)
class _Header:
    """What the header says beside its form. `digests`: of each layer, then of the tokens, in hexadecimal."""

    donor_id: str
    namespace_key: str
    tokens: int
    digests: str
    generation: int

    def sealed(self, form: KvForm, key: bytes) -> tuple[bytes, str]:
        """Return all bytes before the KV (too many where names are too long), and their seal."""
        end = self.tokens * form.token_bytes
        about: dict[str, Any] = {
            "format": FORMAT,
            "key": _key_name(key),
            "donor_id": self.donor_id,
            "namespace_key": self.namespace_key,
            "digests": self.digests,
        }
        if self.generation:  # a version without generations then refuses the file
            about["generation"] = self.generation
        header = {
            "__metadata__": about,
            "kv": {"dtype": _DTYPES[form.dtype], "shape": form.in_file(self.tokens), "data_offsets": [0, end]},
            "tokens": {"dtype": "I32", "shape": [self.tokens], "data_offsets": [end, end + 4 * self.tokens]},
        }
        about["seal"] = seal = hmac.digest(key, _encoded(header), "sha256").hex()
        room = form.header_bytes - _LENGTH_BYTES
        return room.to_bytes(_LENGTH_BYTES, "little") + _encoded(header).ljust(room), seal


class DiskTier:
    """Keep files of donors of one form in `path`/semblend-donors. Thread safe where one thread handles each donor.

    A file appears whole or not at all: it is written under another name, synced and renamed. The tier locks the folder:
    a second engine gets an OSError. It holds the folder by its descriptor: once the folder or its lock is moved or
    replaced, nothing is read or written. Without `key_file` the user's key is used; a missing file is made."""

    def __init__(self, path: Path, form: KvForm, key_file: Path | None = None) -> None:
        """Make and lock the folder. Raises OSError."""
        self.form = form
        self._folder = path / FOLDER
        self._key = make_key(key_path(key_file, self._folder))
        if not path.is_symlink():
            path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            with open_folder(path) as parent:
                with suppress(FileExistsError):
                    os.mkdir(FOLDER, 0o700, dir_fd=parent)
                self._descriptor = opened.enter_context(open_folder(FOLDER, parent))
            refuse_others(self._descriptor, self._folder, 0o022)
            os.fchmod(self._descriptor, 0o700)
            self._lock = opened.enter_context(open_file("lock", os.O_RDWR | os.O_CREAT, self._descriptor))
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"another engine keeps its donors in {self._folder}; give each one its own folder"
                raise BlockingIOError(message) from error
            self._check_place()
            self._opened = opened.pop_all()
        # Tokens and seal of each donor's file: an exchanged file has another seal.
        self._known: dict[str, tuple[int, str]] = {}

    def write(self, text: DonorText, kv: HostKv) -> None:
        """Write the donor's file, of the tokens that both have. After an OSError there is no file."""
        self._check_place()
        unfinished, name = text.donor_id + _UNFINISHED, text.donor_id + _SUFFIX
        try:
            with open_file(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._descriptor) as file:
                seal = write_donor(file, text, kv, self.form, self._key)
            os.rename(unfinished, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            os.fsync(self._descriptor)
        except BaseException:
            for left in (unfinished, name):
                with suppress(OSError):
                    self._remove(left)
            raise
        self._known[text.donor_id] = len(text.tokens), seal

    def tokens_of(self, donor_id: str) -> int:
        """Return the tokens of a written or scanned donor; DonorUnavailableError for any other."""
        if donor_id not in self._known:
            raise DonorUnavailableError(f"donor {donor_id} has no file")
        return self._known[donor_id][0]

    def read(self, donor_id: str, held: HostKv) -> None:
        """Copy the donor's checked KV into `held` and mark the file as used. Raises DonorFileError and OSError."""
        self._check_place()
        with open_file(donor_id + _SUFFIX, folder=self._descriptor) as file:
            read_kv(file, self._known[donor_id][1], self.form, self._key, held)
            with suppress(OSError):  # a folder that has become read-only still serves
                os.utime(file)

    def forget(self, donor_id: str) -> None:
        """Remove the donor's file, if any. Raises OSError."""
        self._known.pop(donor_id, None)
        self._remove(donor_id + _SUFFIX)

    def scan(self) -> Iterator[DonorText | DonorFileError]:
        """Yield the donors' texts in the folder, the longest unused first; errors of unfinished files come before them.

        A file that cannot be used is removed, and its error comes in its place. Raises OSError."""
        self._check_place()
        there = os.listdir(self._descriptor)
        for left in (name for name in there if name.endswith(_UNFINISHED)):
            with suppress(OSError):
                self._remove(left)
            yield DonorFileError("unfinished", f"{left} was not written to its end")

        def last_use(name: str) -> float:
            with suppress(OSError):
                return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mtime
            return 0.0

        for name in sorted((name for name in there if name.endswith(_SUFFIX)), key=last_use):
            try:
                with open_file(name, folder=self._descriptor) as file:
                    text, seal = read_text(file, self.form, self._key)
                if name != text.donor_id + _SUFFIX:
                    raise DonorFileError("corrupt", "it is the file of another donor")
            except DonorFileError as error:
                logger.warning("%s is removed (%s): %s", name, error.reason, error)
                with suppress(OSError):
                    self._remove(name)
                yield DonorFileError(error.reason, f"{name}: {error}")
                continue
            except OSError as error:
                logger.warning("%s is left where it is (unreadable): %s", name, error)
                yield DonorFileError("unreadable", f"{name} cannot be read: {error}")
                continue
            self._known[text.donor_id] = len(text.tokens), seal
            yield text

    def close(self) -> None:
        """Release the folder to other engines."""
        self._opened.close()

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def _check_place(self) -> None:
        """Raise OSError where the folder or its lock was removed or replaced: another engine may own it now."""
        there = os.stat(self._folder / "lock", follow_symlinks=False)
        if not os.path.samestat(there, os.fstat(self._lock)):
            raise FileNotFoundError(f"{self._folder} is not the folder any more that this engine locked; start it anew")


class DiskTransfers:
    """Write donors' files and read them back in the background, on one thread each.

    Every `write` and `fetch` ends in exactly one event, also when it fails."""

    def __init__(self, disk: DiskTier, host: HostTier, link: DiskLink, events: deque[OffloadEvent]) -> None:
        """Begin to scan the folder."""
        self._disk, self._host, self._link, self._events = disk, host, link, events
        self._places = threading.Semaphore(MAX_WAITING)
        self._writer, self._reader = Background("semblend-write"), Background("semblend-fetch")
        self._reader.submit(self._scan)

    def write(self, donor_id: str) -> None:
        """Begin writing a donor of host memory; with MAX_WAITING before it, it gets no file."""
        if self._places.acquire(blocking=False):
            self._writer.submit(lambda: self._write(donor_id))
        else:
            self._report(OffloadEventKind.WRITE_SKIPPED, donor_id, f"{MAX_WAITING} donors wait to be written")

    def fetch(self, donor_id: str) -> None:
        """Begin reading a donor back into host memory."""
        self._reader.submit(lambda: self._fetch(donor_id))

    def drop(self, donor_id: str) -> None:
        """Begin removing a donor's file, after the writes under way."""
        self._writer.submit(lambda: self._drop(donor_id))

    def drain(self) -> None:
        """Wait until all work has ended."""
        self._reader.drain()
        self._writer.drain()

    def close(self) -> None:
        """Wait at most a minute until all work has ended."""
        end = time.monotonic() + _CLOSING_SECONDS
        closed = [thread.close(max(0.0, end - time.monotonic())) for thread in (self._reader, self._writer)]
        if all(closed):
            self._disk.close()
        else:
            logger.warning("the disk does not answer; donors that were being written are lost")

    def _write(self, donor_id: str) -> None:
        text = self._link.texts.get(donor_id)
        try:
            if text is None:
                self._report(OffloadEventKind.WRITE_SKIPPED, donor_id, "the donor is gone")
                return
            with self._host.reading(donor_id) as kv:
                text = replace(text, tokens=text.tokens[: kv.capacity])
                self._disk.write(text, kv)
            self._report(OffloadEventKind.FILE_WRITTEN, donor_id)
        except Exception as error:
            logger.warning("the file of donor %s cannot be written: %s", donor_id, error)
            is_full = isinstance(error, OSError) and error.errno in _NO_ROOM
            self._events.append(OffloadEvent(OffloadEventKind.WRITE_FAILED, donor_id, repr(error), is_full=is_full))
        finally:
            self._places.release()

    def _fetch(self, donor_id: str) -> None:
        try:
            with self._host.writing(donor_id, self._disk.tokens_of(donor_id)) as held:
                self._disk.read(donor_id, held)
            self._report(OffloadEventKind.FETCHED, donor_id)
        except Exception as error:
            logger.warning("donor %s cannot be read back: %s", donor_id, error)
            self._report(OffloadEventKind.FETCH_FAILED, donor_id, f"{type(error).__name__}: {error}")

    def _drop(self, donor_id: str) -> None:
        try:
            self._disk.forget(donor_id)
        except OSError as error:
            logger.warning("the file of donor %s cannot be removed: %s", donor_id, error)

    def _scan(self) -> None:
        found = self._link.found
        try:
            for each in self._disk.scan():
                if isinstance(each, DonorText):
                    found.append(OffloadEvent(OffloadEventKind.FILE_FOUND, each.donor_id, text=each))
                else:
                    found.append(OffloadEvent(OffloadEventKind.FILE_REFUSED, "", f"{each.reason}: {each}"))
            found.append(OffloadEvent(OffloadEventKind.FILES_READ))
        except Exception as error:
            logger.exception("the donors' folder cannot be read; nothing is written to it either")
            self._report(OffloadEventKind.DISK_UNAVAILABLE, "", f"{type(error).__name__}: {error}")

    def _report(self, event: OffloadEventKind, donor_id: str, error: str | None = None) -> None:
        self._events.append(OffloadEvent(event, donor_id, error))


def key_path(given: Path | None, sealed: Path) -> Path:
    """Return `given`, else `semblend-trt/donor-key` in the user's state folder (XDG base directory specification).

    Raises OSError, also where the key would lie in `sealed`, the folder of the files."""
    path = given
    if path is None:
        state = os.environ.get("XDG_STATE_HOME", "")
        try:
            home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        except RuntimeError as error:
            raise OSError(
                "this user has no home for the disk tier's key; set SEMBLEND_DISK_KEY_PATH to a file"
            ) from error
        path = home / "semblend-trt" / "donor-key"
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(sealed)):
        raise OSError(f"the key {path} lies among the files that it seals; set SEMBLEND_DISK_KEY_PATH to one elsewhere")
    return path


def read_key(path: Path) -> bytes:
    """Return the key; FileNotFoundError where the file is missing, OSError where it cannot be used."""
    with open_file(path, refused=0o077) as descriptor:
        key = os.read(descriptor, KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is no key of {KEY_BYTES} bytes; remove it, and a new one is made")
    return key


def make_key(path: Path) -> bytes:
    """Return the key, made where the file is missing; engines that race get the same one. Raises OSError."""
    with suppress(FileNotFoundError):
        return read_key(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written under another name, then linked: half a key is never read, and no key is overwritten.
    unnamed = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open_file(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(unnamed, path)
    finally:
        unnamed.unlink(missing_ok=True)
    return read_key(path)


def write_donor(descriptor: int, text: DonorText, kv: HostKv, form: KvForm, key: bytes) -> str:
    """Fill an empty file and return its seal once all bytes are on disk. `text` and `kv` have equally many tokens.

    After an OSError the file is incomplete."""
    tokens = len(text.tokens)
    end = form.header_bytes + tokens * form.token_bytes
    # So that a full disk fails before any copy.
    os.posix_fallocate(descriptor, 0, end + 4 * tokens)
    digests = _moved(_write_all, descriptor, form, kv)
    token_bytes = _token_bytes(text.tokens)
    _write_all(descriptor, token_bytes, end)
    digests.append(hashlib.sha256(token_bytes).hexdigest())
    named = _Header(text.donor_id, text.namespace_key, tokens, " ".join(digests), text.generation)
    header, seal = named.sealed(form, key)
    if len(header) > form.header_bytes:
        raise OSError(
            f"donor {text.donor_id:.140}: its header has {len(header)} bytes; {form.header_bytes} are set aside for it"
        )
    _write_all(descriptor, memoryview(header), 0)
    os.fsync(descriptor)
    return seal


def read_text(descriptor: int, form: KvForm, key: bytes) -> tuple[DonorText, str]:
    """Return the checked text and seal. Raises DonorFileError, and OSError where reading fails."""
    header, seal = _header_of(descriptor, form, key)
    end = form.header_bytes + header.tokens * form.token_bytes
    token_ids = np.frombuffer(_bytes_at(descriptor, end, 4 * header.tokens), dtype="<i4").astype(np.int32)
    if hashlib.sha256(_token_bytes(token_ids)).hexdigest() != header.digests.split()[-1]:
        raise DonorFileError("corrupt", "the file does not hold the tokens that were written")
    return DonorText(header.donor_id, header.namespace_key, token_ids, header.generation), seal


def read_kv(descriptor: int, seal: str, form: KvForm, key: bytes, held: HostKv) -> None:
    """Read the KV of the file with this seal into `held`, several layers at once, and check what arrived.

    Raises DonorFileError or OSError; `held` is then worthless."""
    header, found = _header_of(descriptor, form, key)
    if found != seal:
        raise DonorFileError("corrupt", "another file of ours has come in its place")
    written = header.digests.split()[: form.geometry.num_layers]
    if _moved(_read_all, descriptor, form, held) != written:
        raise DonorFileError("corrupt", "the file does not hold the KV that was written")


def _moved(move: Callable[[int, memoryview, int], None], descriptor: int, form: KvForm, kv: HostKv) -> list[str]:
    """Write each layer to its place in the file, or read it, on several threads; return digests of bytes in memory."""
    num_layers = form.geometry.num_layers
    layer_bytes = kv.capacity * form.token_bytes // num_layers
    digests, errors = [""] * num_layers, []

    def run(first: int) -> None:
        try:
            for layer in range(first, num_layers, _THREADS):
                at, digest = form.header_bytes + layer * layer_bytes, hashlib.sha256()
                for part in kv.parts:
                    rows = part.tensor[layer].permute(2, 0, 1, 3)  # [tokens, kv_factor, kv_heads, head_dim], no copy
                    view = _bytes_of(rows.view(-1).view(torch.uint8).numpy())
                    move(descriptor, view, at)
                    digest.update(view)
                    at += len(view)
                digests[layer] = digest.hexdigest()
        except Exception as error:
            errors.append(error)

    with ExitStack() as started:  # all end before an error is raised: file and memory go next
        for first in range(_THREADS):
            # A daemon: a disk that never answers must not keep the process from ending.
            thread = threading.Thread(target=run, args=(first,), name="semblend-layers", daemon=True)
            thread.start()
            started.callback(thread.join)
    if errors:
        raise errors[0]
    return digests


def _header_of(descriptor: int, form: KvForm, key: bytes) -> tuple[_Header, str]:
    """Return header and seal, after checks of key, form and file length, but not of tokens and KV."""
    length = int.from_bytes(_bytes_at(descriptor, 0, _LENGTH_BYTES), "little")
    if length > _MOST_HEADER_BYTES:
        raise DonorFileError("corrupt", f"the file claims a header of {length} bytes")
    written = _bytes_at(descriptor, 0, _LENGTH_BYTES + length)
    try:
        said = json.loads(written[_LENGTH_BYTES:])
        about = said.get("__metadata__", {})
        if about.get("format") != FORMAT:
            raise DonorFileError("other_version", f"the file is of format {about.get('format')!r:.40}, not {FORMAT}")
        if about["key"] != _key_name(key):
            raise DonorFileError(
                "other_key", "the file was sealed with another key; engines that share files share a key"
            )
        (tokens,) = said["tokens"]["shape"]
        found, needed = (said["kv"]["dtype"], said["kv"]["shape"]), (_DTYPES[form.dtype], form.in_file(tokens))
        if found != needed:
            raise DonorFileError("other_geometry", f"the file holds KV of {found!s:.140}; {needed!s:.140} is needed")
        generation = about.get("generation", 0)
        header = _Header(about["donor_id"], about["namespace_key"], tokens, about["digests"], generation)
        expected, seal = header.sealed(form, key)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DonorFileError("corrupt", f"this is no donor's file: {error!r:.140}") from error
    # The header is not used before this: one that another key sealed is forged.
    if not hmac.compare_digest(expected, written):
        raise DonorFileError("corrupt", "the file's header is not the one that was sealed")
    size = form.header_bytes + header.tokens * (form.token_bytes + 4)
    if os.fstat(descriptor).st_size != size:
        raise DonorFileError("corrupt", f"the file has {os.fstat(descriptor).st_size} bytes; {size} were written")
    return header, seal


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _encoded(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode("ascii")


def _key_name(key: bytes) -> str:
    """Name a key without revealing it."""
    return hmac.digest(key, b"semblend donor key", "sha256").hex()[:16]


def _token_bytes(tokens: npt.NDArray[np.int32]) -> memoryview:
    return _bytes_of(np.ascontiguousarray(tokens, dtype="<i4").view(np.uint8))


def _bytes_of(array: npt.NDArray[np.uint8]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs know buffers from Python 3.12 on


def _write_all(descriptor: int, view: memoryview, start: int) -> None:
    """Write everything: the system takes at most 2 GiB at once, and may take less."""
    while view:
        taken = os.pwrite(descriptor, view, start)
        view, start = view[taken:], start + taken


def _bytes_at(descriptor: int, start: int, length: int) -> bytes:
    data = bytearray(length)
    _read_all(descriptor, memoryview(data), start)
    return bytes(data)


def _read_all(descriptor: int, view: memoryview, start: int) -> None:
    """Fill `view` from byte `start` on. Raises DonorFileError where the file ends before, and OSError."""
    while view:
        if not (taken := os.preadv(descriptor, [view], start)):
            raise DonorFileError("corrupt", f"the file ends at byte {start}")
        view, start = view[taken:], start + taken
