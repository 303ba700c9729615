"""Documents of a run, in files whose places its user names."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from kernels.files import write_bytes
from semblend_trt.files import check_writable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["beside", "check_writable", "write_bytes", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Writes `text` in UTF-8 as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def beside(path: Path, suffix: str) -> Path | None:
    """Where a document with another suffix goes by default; None where `path` is a device or a pipe, which has no
    place beside it."""
    return None if path.exists() and not path.is_file() else path.with_suffix(suffix)


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
