"""What share of a prompt each worker holds, from the sets of owners that hold its entries (compiled)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry, inner
from semblend_trt.fleet.owner_sets import SHARED, Sets
from semblend_trt.fleet.posting_table import NONE

_Words = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_LOW = 0xFFFFFFFF


class _Tally(NamedTuple):
    """By level: an entry's share, and how many entries of one reference have this level or a higher one. By worker: the
    shares and the entries so far, and the last reference that it was met with (start << 8 | level).
    """

    shares: _Floats
    held: _Words
    found: _Floats
    matches: _Words
    met: _Words


@inner
def _credit(tally: _Tally, reached: int, start: int, highest: int) -> None:
    """Adds what an owner says of its worker, which counts at its lowest level alone."""
    worker, level = reached >> 8, reached & 255
    if reached < 0 or level > highest:
        return
    before = tally.met[worker]
    if before >> 8 == start:
        counted = before & 255
        if level >= counted:
            return
        tally.found[worker] -= tally.shares[counted] * tally.held[counted]
        tally.matches[worker] -= tally.held[counted]
    tally.found[worker] += tally.shares[level] * tally.held[level]
    tally.matches[worker] += tally.held[level]
    tally.met[worker] = start << 8 | level


@entry
def add_up(sets: Sets, reached: _Words, hits: _Words, shares: _Floats, found: _Floats, matches: _Words) -> None:
    """Adds up, for each worker, what share of a prompt its donors hold.

    `reached` int64 [owners]: of an owner that counts, worker << 8 | level; else -1. `hits`: `posting_table.look_up`'s,
    sorted. An entry that several donors of a worker hold counts once, as `shares` (float64 [levels]) says for the
    lowest of their levels. Added to: `found` (float64 [workers]) the shares, `matches` (int64 [workers]) the entries.
    """
    held, met = np.zeros(len(shares), dtype=np.int64), np.full(len(found), -1, dtype=np.int64)
    tally = _Tally(shares, held, found, matches, met)
    start = 0
    while start < len(hits):
        reference = hits[start] >> 32
        end = at = start
        while end < len(hits) and hits[end] >> 32 == reference:
            end += 1
        highest = hits[end - 1] & 255
        for level in range(highest + 1):
            while hits[at] & 255 < level:
                at += 1
            held[level] = end - at
        if reference < SHARED:
            _credit(tally, reached[reference], start, highest)
        elif reference != NONE:
            first = reference - SHARED + 1
            for word in sets.words[first : first + (sets.words[first - 1] & _LOW)]:
                _credit(tally, reached[word & _LOW], start, highest)
        start = end
