"""Host memory that is taken from the system once and given out in ranges.

Page-locked memory is locked where it lies: torch's allocator would round every donor up to a power of two and keep what
was freed, and locking memory while requests run would hold them up.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left
from typing import NamedTuple

import torch

from semblend_trt.errors import CapacityError, ConfigurationError


class Range(NamedTuple):
    """Bytes `start .. end - 1`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class HostMemory:
    """`size` bytes, page-locked for the GPU with `lock`; not thread safe.

    As long as all are taken in rows of one size, every free row can be had: what lies scattered is given out as several
    ranges. Raises ConfigurationError when the memory cannot be had.
    """

    def __init__(self, size: int, *, lock: bool) -> None:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if lock and size > physical:
            raise ConfigurationError(
                f"SEMBLEND_HOST_BYTES is {size}; this machine has {physical} bytes of memory to lock, lower it"
            )
        try:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise ConfigurationError(f"{size} bytes of host memory cannot be had; lower SEMBLEND_HOST_BYTES") from error
        self._holes = [Range(0, size)] if size else []
        if lock and size:
            _lock_pages(self._bytes)
            # The system takes the pages back when the process ends; before, nobody may free them locked.
            weakref.finalize(self, _unlock_pages, self._bytes).atexit = False

    def take(self, rows: int, row_bytes: int) -> list[Range]:
        """Ranges for `rows` rows in order, each a multiple of `row_bytes`: one where that is possible, else few.

        Raises CapacityError when they cannot be had; nothing is taken then.
        """
        fitting = [hole for hole in self._holes if hole.size >= rows * row_bytes]
        chosen = [min(fitting, key=lambda hole: hole.size)] if fitting else sorted(self._holes, key=lambda h: -h.size)
        taken = []
        for hole in chosen:
            part = min(rows, hole.size // row_bytes)
            if part:
                taken.append(Range(hole.start, hole.start + part * row_bytes))
                rows -= part
        if rows:
            raise CapacityError(
                f"{rows} rows of {row_bytes} bytes more than there are free in the {self._bytes.numel()} bytes of host "
                "memory; drop donors or raise SEMBLEND_HOST_BYTES"
            )
        for cut in taken:
            self._cut(cut)
        return taken

    def give_back(self, ranges: list[Range]) -> None:
        """Makes ranges free again that were taken."""
        for start, end in ranges:
            at = bisect_left(self._holes, (start, end))
            if at < len(self._holes) and self._holes[at].start == end:
                end = self._holes.pop(at).end
            if at and self._holes[at - 1].end == start:
                start = self._holes.pop(at - 1).start
                at -= 1
            self._holes.insert(at, Range(start, end))

    def view(self, part: Range, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The bytes of `part` as a contiguous tensor."""
        return self._bytes[part.start : part.end].view(dtype).view(shape)

    def _cut(self, part: Range) -> None:
        at = bisect_left(self._holes, (part.start, part.end))
        hole = self._holes[at]
        self._holes[at : at + 1] = [Range(part.end, hole.end)] if part.end < hole.end else []


def _lock_pages(memory: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        raise ConfigurationError(
            f"{memory.numel()} bytes of host memory cannot be page-locked (CUDA error {code}); lower "
            "SEMBLEND_HOST_BYTES"
        )


def _unlock_pages(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
