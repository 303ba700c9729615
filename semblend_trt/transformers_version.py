"""The installed Transformers: its names, for any thread, and whether the embedded engine runs with it."""

from __future__ import annotations

import importlib
import threading
from typing import Any

from packaging.version import Version

MIN_TRANSFORMERS = Version("5.0")
_lock = threading.Lock()


def imported(name: str, module: str = "transformers") -> Any:
    """`name` of a module of Transformers, or of a package that imports Transformers itself. Any thread may ask first.

    At the end of its import Transformers replaces its module by another. An import statement that waits in a second
    thread gets the first one, which lacks the names. Raises ImportError without the module.
    """
    with _lock:
        return getattr(importlib.import_module(module), name)


def embedded_engine_refusal() -> str | None:
    """Why the embedded engine does not run with the installed Transformers. The connector works with older ones too."""
    version = imported("__version__")
    if Version(version) >= MIN_TRANSFORMERS:
        return None
    return (
        f"Transformers {version} is installed; the embedded engine and the validation need {MIN_TRANSFORMERS} or "
        "later: pip install 'semblend-trt[embedded]'. The connector alone works without"
    )
