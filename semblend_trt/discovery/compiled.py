"""How the index's loops become machine code: numba, without the interpreter's lock, kept on disk where that is safe."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, TypeVar, cast

import numba
from llvmlite.binding import ffi
from numba.extending import intrinsic as _intrinsic

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parents[1]
# The files of entries, and those whose functions or constants are compiled into them.
COMPILED_MODULES = (
    "discovery/anchor_table.py",
    "discovery/compiled.py",
    "discovery/donor_pages.py",
    "discovery/fingerprint.py",
    "discovery/index_memory.py",
    "discovery/index_writing.py",
    "discovery/raw_memory.py",
    "discovery/span_search.py",
    "discovery/winnowing.py",
    "fleet/sketch.py",
    "fleet/sketch_index.py",
    "semantic/word_embedders.py",
)
# Any name is a function of this library, `__dict__` too, and vLLM 0.32 asks all that is loaded for it before it starts.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})
_SOURCES = hashlib.sha256(b"".join((_PACKAGE / name).read_bytes() for name in COMPILED_MODULES)).digest()


def inner(function: Function) -> Function:
    """Compiles a function that only compiled functions call; it becomes part of each of them."""
    return cast("Function", numba.njit(nogil=True)(function))


def entry(function: Function) -> Function:
    """Compiles a function that Python calls. The result is kept on disk, or in memory where no folder is writable."""
    try:
        return cast("Function", numba.njit(nogil=True, cache=True)(_stamped(function)))
    except RuntimeError as error:
        logger.info("compiled code of %s is not kept on disk: %s", function.__name__, error)
        return inner(function)


def _stamped(function: Any) -> FunctionType:
    """`function` with a digest of all sources in its closure, from which it reads nothing.

    numba's cache knows when an entry's own file changes, but not when a file does of which something is compiled into
    it. The closure is part of the cache's key.
    """
    code = function.__code__.replace(co_freevars=(*function.__code__.co_freevars, "sources"))
    closure = (*(function.__closure__ or ()), CellType(_SOURCES))
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that writes LLVM instructions callable from compiled functions."""
    return cast("Callable[..., Any]", _intrinsic(function))
