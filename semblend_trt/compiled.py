"""How loops become machine code: numba, without the interpreter's lock, kept on disk where a folder is writable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite.binding import ffi

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Any name is a function of this library, `__dict__` too, and vLLM 0.32 asks all that is loaded for it before it starts.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})


def inner(function: Function) -> Function:
    """Compiles a function that only compiled functions of its own file call; it becomes part of each of them."""
    return cast("Function", numba.njit(nogil=True)(function))


def entry(function: Function) -> Function:
    """Compiles a function that Python calls. The result is kept on disk, or in memory where no folder is writable.

    What is kept is made again when the function's own file changes. So it may take in nothing of another file: no
    compiled function, and no constant that could change.
    """
    try:
        return cast("Function", numba.njit(nogil=True, cache=True)(function))
    except RuntimeError as error:
        logger.info("compiled code of %s is not kept on disk: %s", function.__name__, error)
        return inner(function)
