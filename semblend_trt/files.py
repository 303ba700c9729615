"""Whether a file whose place a user names can be written; `kernels.files` writes it."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from typing import TYPE_CHECKING

from kernels.files import TEMPORARY_PREFIX, target_of
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

# Written to find a full disk: more than a file system may keep beside a file's name.
_TRIAL = bytes(1 << 16)
_FULL_DEVICE = os.makedev(1, 7)  # /dev/full


def check_writable(path: Path) -> None:
    """Raises ConfigurationError when `path` could not be written at the end of a long run.

    A file is made in its folder for a moment, or in what exists of the way to it; nothing is left. What is neither a
    file nor a folder is only asked for its permissions.
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


def _try(target: Path) -> None:
    folder = next(parent for parent in target.parents if parent.exists())
    longest = os.pathconf(folder, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest for part in target.relative_to(folder).parts):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=TEMPORARY_PREFIX, buffering=0) as file:
        if file.write(_TRIAL) < len(_TRIAL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
