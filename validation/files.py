"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from semblend_trt.errors import ConfigurationError


def check_writable(path: Path) -> None:
    """Raises ConfigurationError when `path` could not be written at the end of a long run; creates nothing."""
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; name a file.")
    folder = next(parent for parent in (path.absolute()).parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{path} cannot be written: {folder} is not a folder that you may write to.")


def write_text(path: Path, text: str) -> None:
    """Writes `text` in UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes `content` beside `path` and renames it into place; folders are made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        # mkstemp makes files for the owner only; a result is for everybody whom the umask lets read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON; NaN and infinities, which JSON does not have, become null."""
    write_text(path, json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
