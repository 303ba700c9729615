"""Files whose places users name: regular ones appear whole or not at all, anything else there is written in place."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from semblend_trt.errors import ConfigurationError

_PREFIX = ".semblend-"
# Written to find a full disk: more than a file system may keep beside a file's name.
_TRIAL = bytes(1 << 16)
_FULL_DEVICE = os.makedev(1, 7)  # /dev/full


def check_writable(path: Path) -> None:
    """Raises ConfigurationError when `path` could not be written at the end of a long run.

    A file is made in its folder for a moment, or in what exists of the way to it; nothing is left. What is neither a
    file nor a folder is only asked for its permissions.
    """
    try:
        target, status = _found(path)
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


def write_bytes(path: Path, content: bytes) -> None:
    """Writes `content`. Symlinks are followed; a regular file is replaced by a new one with a rename in its own folder,
    folders are made, and a device or a pipe is written to as it is. Raises OSError."""
    target, status = _found(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        path.write_bytes(content)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=_PREFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        # mkstemp makes files for the owner only; a result is for everybody whom the umask lets read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _found(path: Path) -> tuple[Path, os.stat_result | None]:
    """Where `path` leads, and what is there; None when nothing is."""
    target = Path(os.path.realpath(path))
    try:
        return target, path.stat()
    except FileNotFoundError:
        return target, None


def _try(target: Path) -> None:
    folder = next(parent for parent in target.parents if parent.exists())
    longest = os.pathconf(folder, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest for part in target.relative_to(folder).parts):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=_PREFIX, buffering=0) as file:
        if file.write(_TRIAL) < len(_TRIAL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
