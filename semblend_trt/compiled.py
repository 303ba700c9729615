"""Functions that numba compiles: loops over arrays, in microseconds and without the interpreter's lock."""

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


def compiled(function: Function) -> Function:
    """Compile a function, to run without the interpreter's lock; the code is kept on disk where a folder is writable.

    It is compiled again only when its own file changes, so it may use nothing of another one."""
    try:
        return cast("Function", numba.njit(nogil=True, cache=True)(function))
    except RuntimeError as error:
        logger.info("compiled code of %s is not kept on disk: %s", function.__name__, error)
        return cast("Function", numba.njit(nogil=True)(function))
