"""What a method of another package does, as far as the names in its code tell."""

from __future__ import annotations

import inspect
from typing import Any


def names_in(owner: Any, method: str) -> frozenset[str]:
    """Attributes and globals that `method` of the owner's class uses; empty when it has no such method in Python."""
    function = inspect.unwrap(getattr(type(owner), method, None))  # type: ignore[arg-type]
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)
