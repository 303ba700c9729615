"""Checks that a file can be written (`kernels.files` writes it), and opens files and folders that only this user owns.

Opening never follows a link, and never waits for the other end of a pipe.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kernels.files import TEMPORARY_PREFIX, target_of
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Written to find a full disk: more than a file system may keep beside a file's name.
_TRIAL = bytes(1 << 16)
_FULL_DEVICE = os.makedev(1, 7)  # /dev/full
_NO_LINK_NO_WAIT = os.O_NOFOLLOW | os.O_NONBLOCK


def check_writable(path: Path) -> None:
    """Raises ConfigurationError when `path` could not be written at the end of a long run.

    A temporary file is made, and removed, in the nearest folder that exists. Of a device or a pipe only the permissions
    are looked at.
    """
    try:
        target, status = target_of(path)
        if status is None or stat.S_ISREG(status.st_mode):
            _try(target)
        elif stat.S_ISDIR(status.st_mode):
            raise ConfigurationError(f"{path} is a folder; name a file.")
        elif stat.S_ISSOCK(status.st_mode) or not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif status.st_rdev == _FULL_DEVICE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ConfigurationError(
            f"{str(path)[:200]} cannot be written ({error.strerror or error}); name another file."
        ) from error


@contextmanager
def open_file(
    path: str | Path, flags: int = os.O_RDONLY, folder: int | None = None, *, refused: int = 0
) -> Iterator[int]:
    """Descriptor, within the block, of a regular file that this user owns. A new file has mode 600.

    With `folder`, a folder's descriptor, `path` is a name in it. A mode with any of the bits `refused` is refused.
    Raises OSError.
    """
    try:
        descriptor = os.open(path, flags | _NO_LINK_NO_WAIT, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a symbolic link; only a file itself is used") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        refuse_others(descriptor, path, refused)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_folder(path: str | Path, folder: int | None = None) -> Iterator[int]:
    """Descriptor, within the block, of a folder; with `folder`, `path` is a name in that one. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK_NO_WAIT, dir_fd=folder)
    except NotADirectoryError as error:  # said of a link too
        raise NotADirectoryError(f"{path} is a symbolic link or no folder; name a folder itself") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def refuse_others(descriptor: int, path: str | Path, rights: int) -> None:
    """Raises OSError where another user owns it, or its mode has one of `rights`."""
    about, user = os.fstat(descriptor), os.geteuid()
    if about.st_uid != user:
        raise PermissionError(
            f"{path} belongs to user {about.st_uid}, and this process is user {user}: take one of its own"
        )
    if about.st_mode & rights:
        raise PermissionError(
            f"{path} has mode {stat.S_IMODE(about.st_mode):03o}, open to others; make it anew for its owner alone"
        )


def _try(target: Path) -> None:
    folder = next(parent for parent in target.parents if parent.exists())
    longest = os.pathconf(folder, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest for part in target.relative_to(folder).parts):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY_PREFIX, buffering=0) as file:
        if file.write(_TRIAL) < len(_TRIAL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
