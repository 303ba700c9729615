"""The files of a model: where they are, and their digests.

Several threads read only files that have changed: a folder that only this user can write keeps the digests."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import open_file, open_folder, read_input, refuse_others, write_bytes
from semblend_trt.model_tokenizer import imported
from semblend_trt.namespace import content_value

logger = logging.getLogger(__name__)

# A file is a tree of chunks, so that one large file keeps all threads busy too.
CHUNK_BYTES = 32 << 20
READ_BYTES = 1 << 20
MAX_THREADS = 32
# The coarsest step of a file system's clock: two writes within it may have one time stamp.
STAMP_NS = 2_000_000_000

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file shows without being read. Every write changes it: only the kernel sets `ctime_ns`."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the state of what `path` links to. Raises OSError, also for what is no regular file."""
        resolved = os.path.realpath(path)
        found = os.stat(resolved)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return cls(resolved, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)

    @property
    def shows_writes(self) -> bool:
        """True if another write would change the state: the last one was not just now."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > STAMP_NS


def digest_of_files(files: Mapping[str, Path], cache: DigestCache | None = None) -> str:
    """Return SHA-256 over names and every byte of the files, in any order; hex.

    `cache` gives an unchanged file's digest. Raises OSError if a file is unreadable or changes meanwhile."""
    states = {name: FileState.of(path) for name, path in sorted(files.items())}
    with _lock:  # a second engine that starts beside this one finds what is read here
        digests = dict[FileState, str]()
        for state in states.values():
            if cache is not None and state.shows_writes and (found := cache.find(state)) is not None:
                digests[state] = found
        unread = list(dict.fromkeys(state for state in states.values() if state not in digests))
        for state, digest in zip(unread, _read(unread), strict=True):
            if FileState.of(Path(state.path)) != state:
                raise OSError(errno.EBUSY, "it changed while it was read", state.path)
            digests[state] = digest
            if cache is not None and state.shows_writes:
                cache.keep(state, digest)
    lines = "".join(f"{len(name)}:{name}:{digests[state]}\n" for name, state in states.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def _read(states: Sequence[FileState]) -> list[str]:
    """Return the digest of each file: SHA-256 over its size and the digests of its chunks."""
    chunks = [(state, start) for state in states for start in range(0, state.size, CHUNK_BYTES)]
    trees = {state: hashlib.sha256(f"{CHUNK_BYTES}:{state.size}\n".encode()) for state in states}
    logger.info("%.1f GB of the model's files are read for their digest", sum(state.size for state in states) / 1e9)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(MAX_THREADS, cores)) as threads:
        for (state, _), digest in zip(chunks, threads.map(lambda chunk: _chunk(*chunk), chunks), strict=True):
            trees[state].update(digest)
    return [tree.hexdigest() for tree in trees.values()]


def _chunk(state: FileState, start: int) -> bytes:
    digest, end = hashlib.sha256(), min(start + CHUNK_BYTES, state.size)
    # A pipe in the file's place would keep an open that waits for its writer.
    file = os.open(state.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for offset in range(start, end, READ_BYTES):
            read = os.pread(file, min(READ_BYTES, end - offset), offset)
            if len(read) < min(READ_BYTES, end - offset):
                raise OSError(errno.EIO, "it is shorter than it was", state.path)
            digest.update(read)
    finally:
        os.close(file)
    return digest.digest()


_MAX_BYTES = 16384
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class DigestCache:
    """Digests in `folder`, one small file for each file that was read; the folder has mode 700, its files 600.

    What others own or can write is not used. Nothing raises: what cannot be read or kept is computed again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def from_setting(cls, path: Path | None) -> DigestCache | None:
        """Return the cache of SEMBLEND_DIGEST_CACHE, or of `user_folder`. None for `off`, and without a home."""
        path = path or user_folder()
        return None if path is None or str(path) == "off" else cls(path)

    def find(self, state: FileState) -> str | None:
        """Return the digest of the file in this very state, None if it is not known."""
        try:
            with self._opened() as folder, open_file(_entry(state), folder=folder, refused=_WRITABLE_BY_OTHERS) as file:
                # A second link may be in a folder that others can write.
                kept = json.loads(os.read(file, _MAX_BYTES)) if os.fstat(file).st_nlink == 1 else {}
            digest = kept.pop("digest")
            is_known = kept == asdict(state) and re.fullmatch("[0-9a-f]{64}", digest)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return str(digest) if is_known else None

    def keep(self, state: FileState, digest: str) -> None:
        """Write the digest in place of what was known of the same path."""
        content = json.dumps({**asdict(state), "digest": digest}).encode()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened():
                write_bytes(self._folder / _entry(state), content, is_private=True)
        except OSError as error:
            logger.info("the digest of %s is not kept in %s: %s", state.path, self._folder, error)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Return the folder's descriptor. Raises OSError; PermissionError if others could have written there."""
        with open_folder(self._folder) as folder:
            refuse_others(folder, self._folder, _WRITABLE_BY_OTHERS)
            yield folder


def user_folder() -> Path | None:
    """Return the folder of digests by default; None without a home."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    path = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~/.cache"))
    return path / "semblend-trt" if path.is_absolute() else None


def _entry(state: FileState) -> str:
    return hashlib.sha256(os.fsencode(state.path)).hexdigest()[:32] + ".json"


# An engine loads the first kind that it finds. All kinds count, so that it does not matter which.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_INDEX = "*.index.json"
# What engines read beside these: quantisation, and Mistral's own form of a configuration.
PARAMETER_FILES = ("*quant*.json", "dtypes.json", "params.json")
TOKENIZER_FILES = (
    *("added_tokens.json", "chat_template*", "merges.txt", "special_tokens_map.json", "spiece.model"),
    *("sentencepiece*.model", "tekken.json", "tokenizer*", "*.tiktoken", "vocab.*"),
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_local(model: str | Path) -> bool:
    """Return True for a directory, False for a hub id. Raises ConfigurationError for what can be neither."""
    if str(model) and Path(model).is_dir():
        return True
    if isinstance(model, str) and not Path(model).exists() and _HUB_ID.fullmatch(model):
        return False
    raise ConfigurationError(f"model {str(model)!r} is neither a directory that exists nor a hub id such as org/name")


def snapshot(model: str | Path, revision: str | None = None) -> Path | None:
    """Return the directory of `model`'s files on this machine: its own, or the hub cache's; None without one."""
    return Path(model) if is_local(model) else in_hub_cache(str(model), "config.json", revision)


def in_hub_cache(hub_id: str, file: str, revision: str | None = None) -> Path | None:
    """Return the directory of the hub's cache that holds this `file` of a model; None without one."""
    cached_file = imported("cached_file", "transformers.utils")
    try:
        found = cached_file(hub_id, file, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def weights_digest(path: str | Path, cache: DigestCache | None = None) -> str:
    """Return a digest of every byte of a model directory's weights, their indexes, and the files that those name.
    Raises ConfigurationError if there are no weights, or one of their files cannot be read."""
    directory = Path(path)
    try:
        if not (files := weight_files(directory)):
            raise ConfigurationError(f"{directory} holds no weights ({', '.join(_WEIGHTS)})")
        return digest_of_files(files, cache)
    except OSError as error:
        place = error.filename or directory
        raise ConfigurationError(f"weights {place} cannot be read: {error.strerror or error}") from error


def weight_files(directory: Path) -> dict[str, Path]:
    """Return weights and their indexes by name. Raises OSError, and ConfigurationError for a broken index."""
    files = _files_in(directory, (*_WEIGHTS, _INDEX))
    for index in [path for name, path in files.items() if fnmatchcase(name, _INDEX)]:
        try:
            shards = sorted(set(json.loads(read_input(index))["weight_map"].values()))
            if not all(isinstance(shard, str) and "\0" not in shard for shard in shards):
                raise ValueError("a shard has no name of a file")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"{index} is no index of weights; download it again") from error
        files.update({shard: directory / shard for shard in shards})
    return files


def tokenizer_digest(model: str | Path, revision: str | None = None) -> str | None:
    """Return the namespace's `tokenizer_revision` for a folder or a hub id; None where no files are on this machine."""
    with suppress(ConfigurationError, OSError):
        directory = snapshot(model, revision)
        if directory is not None and (digest := digest_in(directory, TOKENIZER_FILES)) is not None:
            return content_value(digest)
    return None


def digest_in(directory: Path, patterns: tuple[str, ...]) -> str | None:
    """Return a digest of every byte of a directory's files whose names fit, None if it has none. Raises OSError."""
    files = _files_in(directory, patterns)
    return digest_of_files(files) if files else None


def file_states(directory: Path) -> dict[str, FileState]:
    """Return the states of a directory's model files, by name. Raises OSError and ConfigurationError."""
    files = {**_files_in(directory, ("config.json", "config.*.json", *PARAMETER_FILES)), **weight_files(directory)}
    return {name: FileState.of(path) for name, path in files.items()}


def adapter_files(place: Path) -> dict[str, Path]:
    """Return the files of a LoRA adapter, a file or a directory. Raises OSError and ConfigurationError."""
    if not place.is_dir():
        return {place.suffix: place}
    if not (weights := weight_files(place)):
        raise ConfigurationError(f"adapter {place} holds no weights ({', '.join(_WEIGHTS)})")
    return {**weights, **_files_in(place, ("adapter_config.json",))}


def _files_in(directory: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    """Return the files by name, sorted. A link to nothing is among them: reading it must fail."""
    with os.scandir(directory) as entries:
        # The name comes first: `is_dir` follows links, and one with another name may lead nowhere or in a circle.
        fitting = [
            each.name for each in entries if any(fnmatchcase(each.name, one) for one in patterns) and not each.is_dir()
        ]
    return {name: directory / name for name in sorted(fitting)}
