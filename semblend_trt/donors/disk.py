"""The disk tier: a folder of donors' files that one engine owns.

Its calls read and write files and are made in the background only. Files hold token ids and KV, from which text can be
recovered: the folder is the owner's alone (0700, files 0600), and is to lie where prompts may lie.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from semblend_trt.donors.donor_file import DonorFileError, KvForm, read_kv, read_text, write_donor
from semblend_trt.errors import DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from semblend_trt.donors.donor_text import DonorText
    from semblend_trt.donors.host_kv import HostKv

logger = logging.getLogger(__name__)

FOLDER = "semblend-donors"
_SUFFIX, _UNFINISHED = ".donor.safetensors", ".donor.unfinished"
_DONOR_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class DiskTier:
    """Files of donors of one form in `path`/semblend-donors. Thread safe where each donor is handled by one thread.

    A file appears whole or not at all: it is written beside its place, synced and renamed. The folder is locked: of
    two engines that are given the same one, the second gets an OSError.
    """

    def __init__(self, path: Path, form: KvForm) -> None:
        """Makes and locks the folder, and clears what an unfinished write left. Raises OSError."""
        self.form = form
        self._folder = path / FOLDER
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._unfinished = sorted(self._folder.glob("*" + _UNFINISHED))
            for left in self._unfinished:
                left.unlink(missing_ok=True)
        except OSError:
            os.close(self._lock)
            raise
        self._tokens: dict[str, int] = {}

    def write(self, donor_id: str, text: DonorText, kv: HostKv) -> None:
        """Keeps the donor's file, of as many tokens as both have. Raises OSError; there is no file then."""
        if _DONOR_ID.fullmatch(donor_id) is None:
            raise OSError(f"donor id {donor_id!r:.140} cannot be part of a file's name")
        unfinished, path = self._folder / (donor_id + _UNFINISHED), self._path(donor_id)
        try:
            write_donor(unfinished, donor_id, text, kv, self.form)
            unfinished.rename(path)
            self._sync_folder()
        except BaseException:
            for left in (unfinished, path):
                left.unlink(missing_ok=True)
            raise
        self._tokens[donor_id] = len(text.tokens)

    def tokens_of(self, donor_id: str) -> int:
        """Tokens of a donor that was written or scanned; DonorUnavailableError for any other."""
        if donor_id not in self._tokens:
            raise DonorUnavailableError(f"donor {donor_id} has no file")
        return self._tokens[donor_id]

    def read(self, donor_id: str, held: HostKv) -> None:
        """Copies the donor's KV into `held`, checked, and marks the file as used. Raises DonorFileError and OSError."""
        read_kv(self._path(donor_id), donor_id, self.form, held)
        with suppress(OSError):  # a folder that has become read-only still serves
            os.utime(self._path(donor_id))

    def forget(self, donor_id: str) -> None:
        """Removes the donor's file where there is one. Raises OSError."""
        self._tokens.pop(donor_id, None)
        if _DONOR_ID.fullmatch(donor_id) is not None:
            self._path(donor_id).unlink(missing_ok=True)

    def scan(self) -> Iterator[tuple[str, DonorText] | DonorFileError]:
        """The donors whose files lie in the folder, the longest unused first. Those that cannot be used are removed,
        and the reason is given in their place; those that nobody finished writing come first."""
        for left in self._unfinished:
            yield DonorFileError("unfinished", f"{left.name} was not written to its end")
        for path in sorted(self._folder.glob("*" + _SUFFIX), key=_last_use):
            try:
                donor_id, text = read_text(path, self.form)
                if path != self._path(donor_id):
                    raise DonorFileError("corrupt", f"{path.name} is the file of another donor")
            except DonorFileError as error:
                logger.warning("%s is removed: %s", path.name, error)
                path.unlink(missing_ok=True)
                yield error
                continue
            except OSError as error:
                yield DonorFileError("unreadable", f"{path.name} cannot be read: {error}")
                continue
            self._tokens[donor_id] = len(text.tokens)
            yield donor_id, text

    def close(self) -> None:
        """Lets another engine have the folder."""
        os.close(self._lock)

    def _path(self, donor_id: str) -> Path:
        return self._folder / (donor_id + _SUFFIX)

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
