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

from semblend_trt.donors.own_files import open_file, open_folder, refuse_others

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
        folder = open_folder(self._folder)
        try:
            refuse_others(folder, self._folder, _WRITABLE_BY_OTHERS)
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
    file = open_file(name, folder=folder)
    try:
        refuse_others(file, name, _WRITABLE_BY_OTHERS)
        if os.fstat(file).st_nlink != 1:
            raise PermissionError(f"{name} is no file of the cache's own")
        return os.read(file, _MAX_BYTES)
    finally:
        os.close(file)


def _write(name: str, content: bytes, folder: int) -> None:
    with os.fdopen(open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder), "wb") as file:
        file.write(content)
