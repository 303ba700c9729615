"""Files and folders of this user, opened by descriptor: never through a link, and never waiting for another side."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NO_LINK_NO_WAIT = os.O_NOFOLLOW | os.O_NONBLOCK


def open_file(path: str | Path, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Descriptor of a regular file that this user owns; one that `flags` make has mode 600.

    `folder` is the descriptor of a folder, and `path` a name in it. Raises OSError.
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
        refuse_others(descriptor, path, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_folder(path: str | Path, folder: int | None = None) -> int:
    """Descriptor of a folder, in another one where `folder` is that one's. Raises OSError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK_NO_WAIT, dir_fd=folder)
    except NotADirectoryError as error:  # said of a link too
        raise NotADirectoryError(f"{path} is a symbolic link or no folder; name a folder itself") from error


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
