"""The installed Transformers: its names, for any thread, and whether the embedded engine runs with it."""

from __future__ import annotations

import importlib
import threading
from typing import Any

from packaging.version import Version

MIN_TRANSFORMERS = Version("5.0")
_lock = threading.Lock()


def imported(name: str, module: str = "transformers") -> Any:
    """Import `name` from Transformers, or from a package that imports it. Raises ImportError. Any thread may ask first.

    Transformers replaces its module at the end of its import: an import statement waiting in another thread gets the
    first module, which lacks the names."""
    with _lock:
        return getattr(importlib.import_module(module), name)


def embedded_engine_refusal() -> str | None:
    """Return why the embedded engine does not run with this Transformers. The connector works with older ones too."""
    version = imported("__version__")
    if Version(version) >= MIN_TRANSFORMERS:
        return None
    return (
        f"Transformers {version} is installed; the embedded engine and the validation need {MIN_TRANSFORMERS} or "
        "later: pip install 'semblend-trt[embedded]'. The connector alone works without"
    )
