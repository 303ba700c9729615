"""Digests of whole files: read by several threads, and read once as long as the files stay as they are."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from semblend_trt.connector.digest_cache import DigestCache

logger = logging.getLogger(__name__)

# A file is a tree of chunks, so that one large file keeps all threads busy too.
CHUNK_BYTES = 32 << 20
READ_BYTES = 1 << 20
MAX_THREADS = 32
PROGRESS_SECONDS = 5.0
# Two writes may share one time stamp where a file system counts in steps; the coarsest counts in two seconds.
SETTLED_NS = 2_000_000_000

_lock = threading.Lock()
_known: dict[FileState, str] = {}


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file shows without being read. No write leaves all of it as it was: only the kernel sets `ctime_ns`."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Follows symlinks. Raises OSError, also for what is no regular file."""
        resolved = os.path.realpath(path)
        found = os.stat(resolved)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return cls(resolved, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)

    @property
    def is_settled(self) -> bool:
        """Whether another write would show."""
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > SETTLED_NS


def digest_of_files(files: Mapping[str, Path], cache: DigestCache | None = None) -> str:
    """SHA-256 over names and every byte of the files, whatever their order; hex.

    What was read before and has not changed is taken from this process' memory or from `cache`. Raises OSError when a
    file cannot be read, or changes meanwhile.
    """
    states = {name: FileState.of(path) for name, path in sorted(files.items())}
    with _lock:  # a second engine that starts beside this one finds what is read here
        digests = {state: found for state in states.values() if (found := _remembered(state, cache)) is not None}
        unread = list(dict.fromkeys(state for state in states.values() if state not in digests))
        for state, digest in zip(unread, _read(unread), strict=True):
            if FileState.of(Path(state.path)) != state:
                raise OSError(errno.EBUSY, "it changed while it was read", state.path)
            digests[state] = digest
            if state.is_settled:
                _known[state] = digest
                if cache is not None:
                    cache.keep(state, digest)
    lines = "".join(f"{len(name)}:{name}:{digests[state]}\n" for name, state in states.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def _remembered(state: FileState, cache: DigestCache | None) -> str | None:
    if not state.is_settled:
        return None
    if state not in _known and cache is not None and (kept := cache.find(state)) is not None:
        _known[state] = kept
    return _known.get(state)


def _read(states: Sequence[FileState]) -> list[str]:
    """The digest of each file: SHA-256 over its size and the digests of its chunks."""
    chunks = [(state, start) for state in states for start in range(0, state.size, CHUNK_BYTES)]
    progress = _Progress(sum(state.size for state in states))
    trees = {state: hashlib.sha256(f"{CHUNK_BYTES}:{state.size}\n".encode()) for state in states}
    if chunks:
        with ThreadPoolExecutor(min(MAX_THREADS, _usable_cores(), len(chunks))) as threads:
            digests = threads.map(lambda chunk: _chunk(chunk[0], chunk[1], progress), chunks)
            for (state, _), digest in zip(chunks, digests, strict=True):
                trees[state].update(digest)
    return [tree.hexdigest() for tree in trees.values()]


def _chunk(state: FileState, start: int, progress: _Progress) -> bytes:
    digest, end = hashlib.sha256(), min(start + CHUNK_BYTES, state.size)
    # A pipe in the file's place would keep an open that waits for its writer.
    file = os.open(state.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for offset in range(start, end, READ_BYTES):
            wanted = min(READ_BYTES, end - offset)
            piece = os.pread(file, wanted, offset)
            if len(piece) < wanted:
                raise OSError(errno.EIO, "it is shorter than it was", state.path)
            digest.update(piece)
    finally:
        os.close(file)
    progress.add(end - start)
    return digest.digest()


class _Progress:
    """Says every few seconds how far the reading is."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._begin = self._told = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._told < PROGRESS_SECONDS:
                return
            self._told = now
            rate = self._done / (now - self._begin)
            logger.info(
                "digest of the model's files: %.1f of %.1f GB read, %.1f GB/s",
                self._done / 1e9,
                self._total / 1e9,
                rate / 1e9,
            )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
