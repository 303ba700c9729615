"""DigestCache: digests of files that were read before, kept between processes where only this user writes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.connector.file_digests import FileState

logger = logging.getLogger(__name__)

OFF = "off"
_NAME = "semblend-trt"
_MAX_BYTES = 16384
_HEX = frozenset("0123456789abcdef")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class DigestCache:
    """One small file for each file whose digest is known, in `folder`; its mode is 700, and theirs 600.

    A folder or an entry that belongs to another user, or that others can write, is left alone. Nothing raises: what
    cannot be read or kept is computed again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def from_setting(cls, path: Path | None) -> DigestCache | None:
        """The cache of SEMBLEND_DIGEST_CACHE: unset stands for the user's cache folder. None for off, and without a
        home."""
        if path is None:
            path = user_folder()
        return None if path is None or str(path) == OFF else cls(path)

    def find(self, state: FileState) -> str | None:
        """The digest of the file in this very state, None when it is not known."""
        try:
            with self._opened() as folder:
                content = _own_content(_entry(state), folder)
            kept = json.loads(content)
            digest = kept.pop("digest")
            is_known = kept == asdict(state) and len(digest) == 64 and set(digest) <= _HEX
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return str(digest) if is_known else None

    def keep(self, state: FileState, digest: str) -> None:
        """Writes the digest in place of what was known of the same path."""
        content = json.dumps({**asdict(state), "digest": digest}).encode()
        name = _entry(state)
        partial = f"{name}.{secrets.token_hex(8)}"
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            with self._opened() as folder:
                try:
                    _write(partial, content, folder)
                    os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(partial, dir_fd=folder)
        except OSError as error:
            logger.info("the digest of %s is not kept in %s: %s", state.path, self._folder, error)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder's descriptor. Raises OSError, PermissionError where others could have written there."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _refuse_others(os.fstat(folder), self._folder)
            yield folder
        finally:
            os.close(folder)


def user_folder() -> Path | None:
    """Where digests are kept unless a setting says otherwise; None without a home."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    path = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~/.cache"))
    return path / _NAME if path.is_absolute() else None


def _entry(state: FileState) -> str:
    return hashlib.sha256(os.fsencode(state.path)).hexdigest()[:32] + ".json"


def _own_content(name: str, folder: int) -> bytes:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.fstat(file)
        _refuse_others(found, Path(name))
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise PermissionError(f"{name} is no file of the cache's own")
        return os.read(file, _MAX_BYTES)
    finally:
        os.close(file)


def _write(name: str, content: bytes, folder: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(content)


def _refuse_others(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"{path} belongs to another user, or others can write it")
