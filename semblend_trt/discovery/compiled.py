"""How the index's loops become machine code: numba, without the interpreter's lock, kept on disk where that is safe."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic as _intrinsic

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED_MODULES = (
    "anchor_table",
    "compiled",
    "donor_pages",
    "index_memory",
    "index_writing",
    "raw_memory",
    "span_search",
    "winnowing",
)
# numba's cache knows when an entry's own file changes, but not when a file does whose functions are compiled into it.
# Entries hold this number in their closure, and the closure is part of the cache's key.
SOURCES_STAMP = int.from_bytes(
    hashlib.blake2b(
        b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in COMPILED_MODULES), digest_size=7
    ).digest(),
    "little",
)


def inner(function: Function) -> Function:
    """Compiles a function that only compiled functions call; it becomes part of each of them."""
    return cast("Function", numba.njit(nogil=True)(function))


def entry(function: Function) -> Function:
    """Compiles a function that Python calls. The result is kept on disk, or in memory where no folder is writable."""
    try:
        return cast("Function", numba.njit(nogil=True, cache=True)(function))
    except RuntimeError as error:
        logger.info("compiled code of %s is not kept on disk: %s", function.__name__, error)
        return inner(function)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that writes LLVM instructions callable from compiled functions."""
    return cast("Callable[..., Any]", _intrinsic(function))
