"""Writes files whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

TEMPORARY_PREFIX = ".semblend-"


def write_bytes(path: Path, content: bytes) -> None:
    """Writes `content` to a new file, which then replaces `path` by a rename in its folder.

    Follows symlinks and makes folders. A device or a pipe is written to directly. Raises OSError.
    """
    target, status = target_of(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        path.write_bytes(content)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=TEMPORARY_PREFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        # mkstemp lets only the owner read; the file gets the mode that open() would give it.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def target_of(path: Path) -> tuple[Path, os.stat_result | None]:
    """Where `path` leads, and what is there; None when nothing is."""
    target = Path(os.path.realpath(path))
    try:
        return target, path.stat()
    except FileNotFoundError:
        return target, None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
