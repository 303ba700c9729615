"""Loops compiled by numba, without the interpreter's lock; the code is kept on disk where a folder is writable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite.binding import ffi

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# llvmlite answers any attribute with a function, `__dict__` too, and vLLM 0.32 reads that of every loaded object.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})


def inner(function: Function) -> Function:
    """Compile a function that only compiled functions of its own file call; it becomes part of each of them."""
    return cast("Function", numba.njit(nogil=True)(function))


def entry(function: Function) -> Function:
    """Compile a function that Python calls. The result is kept on disk, or in memory where no folder is writable.

    Kept code is compiled again only when the function's own file changes. So the function may use nothing of another
    file: no compiled function, and no constant that could change.
    """
    try:
        return cast("Function", numba.njit(nogil=True, cache=True)(function))
    except RuntimeError as error:
        logger.info("compiled code of %s is not kept on disk: %s", function.__name__, error)
        return inner(function)
