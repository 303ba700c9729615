"""The disk tier: a folder of donors' files that one engine owns.

Its calls read and write files and are made in the background only. Files hold token ids and KV, from which prompts can
be recovered: the folder is the owner's alone (0700, files 0600) and belongs where prompts may lie. A key that lies
elsewhere seals the files, so a process that can write the folder can still make no file that is read.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.donors.donor_file import DonorFileError, KvForm, read_kv, read_text, write_donor
from semblend_trt.errors import DonorUnavailableError
from semblend_trt.files import open_file, open_folder, refuse_others
from semblend_trt.once_a_minute import OnceAMinute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.donors.donor_file import DonorText
    from semblend_trt.donors.host_tier import HostKv


logger = logging.getLogger(__name__)
logger.addFilter(OnceAMinute(by_values=False))

FOLDER = "semblend-donors"
_SUFFIX, _UNFINISHED = ".donor.safetensors", ".donor.unfinished"
_DONOR_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class DiskTier:
    """Files of donors of one form in `path`/semblend-donors. Thread safe where each donor is handled by one thread.

    A file appears whole or not at all: it is written under another name, synced and renamed. The folder is locked: a
    second engine gets an OSError. The folder is held by its descriptor: once it, or its lock, is moved or replaced,
    nothing is written or read any more. `key_file` is made where there is none; unset, it is the user's.
    """

    def __init__(self, path: Path, form: KvForm, key_file: Path | None = None) -> None:
        """Makes and locks the folder, and clears what an unfinished write left. Raises OSError."""
        self.form = form
        self._folder = path / FOLDER
        self._key = make_key(key_path(key_file, self._folder))
        if not path.is_symlink():
            path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            self._descriptor = opened.enter_context(_own_folder(path, make=True))
            os.fchmod(self._descriptor, 0o700)
            self._lock = opened.enter_context(open_file("lock", os.O_RDWR | os.O_CREAT, self._descriptor))
            if not _is_lockable(self._lock):
                raise BlockingIOError(
                    f"another engine keeps its donors in {self._folder}; give each one its own folder"
                )
            self._check_place()
            names = sorted(os.listdir(self._descriptor))
            self._unfinished = [name for name in names if name.endswith(_UNFINISHED)]
            for left in self._unfinished:
                self._remove(left)
            self._opened = opened.pop_all()
        # Tokens and seal of each donor's file: a file that was put back or exchanged has another seal.
        self._known: dict[str, tuple[int, str]] = {}

    def write(self, donor_id: str, text: DonorText, kv: HostKv) -> None:
        """Keeps the donor's file, of as many tokens as both have. Raises OSError; there is no file then."""
        if _DONOR_ID.fullmatch(donor_id) is None:
            raise OSError(f"donor id {donor_id!r:.140} cannot be part of a file's name")
        self._check_place()
        unfinished, name = donor_id + _UNFINISHED, donor_id + _SUFFIX
        try:
            with self._file(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                seal = write_donor(file, donor_id, text, kv, self.form, self._key)
            os.rename(unfinished, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            self._sync_folder()
        except BaseException:
            for left in (unfinished, name):
                with suppress(OSError):
                    self._remove(left)
            raise
        self._known[donor_id] = len(text.tokens), seal

    def tokens_of(self, donor_id: str) -> int:
        """Tokens of a donor that was written or scanned; DonorUnavailableError for any other."""
        if donor_id not in self._known:
            raise DonorUnavailableError(f"donor {donor_id} has no file")
        return self._known[donor_id][0]

    def read(self, donor_id: str, held: HostKv) -> None:
        """Copies the donor's KV into `held`, checked, and marks the file as used. Raises DonorFileError and OSError."""
        self.tokens_of(donor_id)
        self._check_place()
        with self._file(donor_id + _SUFFIX) as file:
            read_kv(file, self._known[donor_id][1], self.form, self._key, held)
            with suppress(OSError):  # a folder that has become read-only still serves
                os.utime(file)

    def free_bytes(self) -> int:
        disk = os.fstatvfs(self._descriptor)
        return disk.f_bavail * disk.f_frsize

    def forget(self, donor_id: str) -> None:
        """Removes the donor's file where there is one. Raises OSError."""
        self._known.pop(donor_id, None)
        if _DONOR_ID.fullmatch(donor_id) is not None:
            self._remove(donor_id + _SUFFIX)

    def scan(self) -> Iterator[tuple[str, DonorText] | DonorFileError]:
        """The donors whose files lie in the folder, the longest unused first. A file that cannot be used is removed,
        and its error comes in its place; unfinished files come first. Raises OSError."""
        for left in self._unfinished:
            yield DonorFileError("unfinished", f"{left} was not written to its end")
        self._check_place()
        names = [name for name in os.listdir(self._descriptor) if name.endswith(_SUFFIX)]
        for name in sorted(names, key=self._last_use):
            try:
                with self._file(name) as file:
                    donor_id, text, seal = read_text(file, self.form, self._key)
                if name != donor_id + _SUFFIX:
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
            self._known[donor_id] = len(text.tokens), seal
            yield donor_id, text

    def close(self) -> None:
        """Lets another engine have the folder."""
        self._opened.close()

    def _file(self, name: str, flags: int = os.O_RDONLY) -> AbstractContextManager[int]:
        return open_file(name, flags, self._descriptor)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def _check_place(self) -> None:
        """Raises OSError where the lock under the folder's path is not ours: it, or the folder, was removed, moved or
        replaced, and another engine may have taken its place."""
        there = os.stat(self._folder / "lock", follow_symlinks=False)
        if not os.path.samestat(there, os.fstat(self._lock)):
            raise FileNotFoundError(f"{self._folder} is not the folder any more that this engine locked; start it anew")

    def _sync_folder(self) -> None:
        os.fsync(self._descriptor)

    def _last_use(self, name: str) -> float:
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mtime
        except OSError:
            return 0.0


def is_in_use(path: Path) -> bool:
    """Whether an engine holds the folder in `path` now. Makes nothing. Raises OSError where none could have it."""
    with (
        suppress(FileNotFoundError),
        _own_folder(path, make=False) as folder,
        open_file("lock", os.O_RDWR, folder) as lock,
    ):
        return not _is_lockable(lock)
    return False


@contextmanager
def _own_folder(path: Path, make: bool) -> Iterator[int]:
    with open_folder(path) as parent:
        with suppress(FileExistsError):
            if make:
                os.mkdir(FOLDER, 0o700, dir_fd=parent)
        with open_folder(FOLDER, parent) as folder:
            refuse_others(folder, path / FOLDER, 0o022)
            yield folder


def _is_lockable(lock: int) -> bool:
    """Locks it until it is closed; False where another process has."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


KEY_BYTES = 32


def key_path(given: Path | None, sealed: Path) -> Path:
    """The key's file: the given one, else `semblend-trt/donor-key` in the user's state folder (XDG base directory
    specification). Raises OSError, also where it would lie in `sealed`, the folder of the files."""
    path = given or _state_folder() / "semblend-trt" / "donor-key"
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(sealed)):
        raise OSError(f"the key {path} lies among the files that it seals; set SEMBLEND_DISK_KEY_PATH to one elsewhere")
    return path


def read_key(path: Path) -> bytes:
    """Raises FileNotFoundError where there is none, and OSError where it cannot be used."""
    with open_file(path, refused=0o077) as descriptor:
        key = os.read(descriptor, KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is no key of {KEY_BYTES} bytes; remove it, and a new one is made")
    return key


def make_key(path: Path) -> bytes:
    """The key in the file, made where there is none. Engines that make it at the same time get the same key. Raises
    OSError."""
    with suppress(FileNotFoundError):
        return read_key(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written whole under another name, then linked: half a key is never read, and no key is overwritten.
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


def _state_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        return Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise OSError("this user has no home for the disk tier's key; set SEMBLEND_DISK_KEY_PATH to a file") from error
