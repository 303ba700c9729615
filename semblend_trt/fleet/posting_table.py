"""The table from a sketch's entries to the owners that hold them: open addressing with linear probing (compiled).

An owner is a namespace's donors of one level on one worker. A slot (uint64) is entry << 32 | owner, 0 when it is empty;
`counts` (uint32) says how many of the owner's donors hold the entry. Of an owner that is gone the namespace is DEAD:
its slots are passed over, and emptied as they are met. Taking one out moves those behind it up, so that none is left
that searches would have to pass (Knuth, "The Art of Computer Programming" 3, 6.4, algorithm R).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry, inner
from semblend_trt.discovery.raw_memory import prefetch

DEAD = -1
_Words = npt.NDArray[np.uint64]
_Entries = npt.NDArray[np.uint32]
_EMPTY = np.uint64(0)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
# Slots are fetched from memory while this many entries before them are looked up.
_AHEAD = 12


class Owners(NamedTuple):
    """Per owner number, of which 0 is none: its namespace (int32, or DEAD), worker (int32), level (uint8), slots."""

    namespaces: npt.NDArray[np.int32]
    workers: npt.NDArray[np.int32]
    levels: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.int64]


class Table(NamedTuple):
    """A power of two of slots; `factor`, odd and secret, spreads the entries over them by their high bits."""

    slots: _Words
    counts: npt.NDArray[np.uint32]
    factor: np.uint64
    shift: np.uint64


def table_of(bits: int, factor: int) -> Table:
    """An empty table of 2**`bits` slots."""
    size = 1 << bits
    shift = np.uint64(32 - bits)
    return Table(np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=np.uint32), np.uint64(factor), shift)


@inner
def _home(table: Table, word: np.uint64) -> int:
    spread = ((word >> _HALF) * table.factor) & _LOW
    home: int = np.int64(spread >> table.shift)
    return home


@inner
def _fetch(table: Table, of_entry: np.uint32) -> None:
    """Asks for the slot where an entry's search begins, so that it is there when it is needed."""
    prefetch(table.slots.ctypes.data + 8 * _home(table, np.uint64(of_entry) << _HALF))


@inner
def _place(table: Table, word: np.uint64) -> int:
    """The slot that holds `word`, or the empty one where it belongs."""
    at, mask = _home(table, word), len(table.slots) - 1
    while table.slots[at] != _EMPTY and table.slots[at] != word:
        at = (at + 1) & mask
    return at


@inner
def _take_out(table: Table, at: int) -> None:
    mask = len(table.slots) - 1
    hole, behind = at, (at + 1) & mask
    while table.slots[behind] != _EMPTY:
        home = _home(table, table.slots[behind])
        if (behind - home) & mask >= (behind - hole) & mask:
            table.slots[hole], table.counts[hole] = table.slots[behind], table.counts[behind]
            hole = behind
        behind = (behind + 1) & mask
    table.slots[hole], table.counts[hole] = _EMPTY, np.uint32(0)


@entry
def add(table: Table, owners: Owners, entries: _Entries, owner: int) -> None:
    """Counts one more donor of `owner` under each of `entries` (uint32 [n], ascending); there is room for them."""
    for number in range(len(entries)):
        if number + _AHEAD < len(entries):
            _fetch(table, entries[number + _AHEAD])
        if number and entries[number] == entries[number - 1]:
            continue
        word = np.uint64(entries[number]) << _HALF | np.uint64(owner)
        at = _place(table, word)
        if table.slots[at] == _EMPTY:
            table.slots[at] = word
            owners.slots[owner] += 1
        table.counts[at] += np.uint32(1)


@entry
def remove(table: Table, owners: Owners, entries: _Entries, owner: int) -> None:
    """Takes back one `add` of the same entries and owner."""
    for number in range(len(entries)):
        if number and entries[number] == entries[number - 1]:
            continue
        at = _place(table, np.uint64(entries[number]) << _HALF | np.uint64(owner))
        if table.slots[at] == _EMPTY:
            continue
        table.counts[at] -= np.uint32(1)
        if table.counts[at] == 0:
            _take_out(table, at)
            owners.slots[owner] -= 1


@entry
def sweep(table: Table, owners: Owners, start: int, limit: int) -> int:
    """Empties the slots of dead owners among the `limit` from `start` on; returns where to go on."""
    at, mask = start, len(table.slots) - 1
    for _ in range(limit):
        word = table.slots[at]
        owner = np.int64(word & _LOW)
        if word != _EMPTY and owners.namespaces[owner] == DEAD:
            owners.slots[owner] -= 1
            _take_out(table, at)
        else:
            at = (at + 1) & mask
    return at


@entry
def copy(table: Table, owners: Owners, larger: Table) -> None:
    """Moves everything but the slots of dead owners into an empty table."""
    for at in range(len(table.slots)):
        word = table.slots[at]
        if word == _EMPTY:
            continue
        owner = np.int64(word & _LOW)
        if owners.namespaces[owner] == DEAD:
            owners.slots[owner] -= 1
            continue
        place = _place(larger, word)
        larger.slots[place], larger.counts[place] = word, table.counts[at]


@entry
def search(
    table: Table, owners: Owners, namespace: int, asked: tuple[_Entries, npt.NDArray[np.uint8]],
    shares: npt.NDArray[np.float64], found: npt.NDArray[np.float64], matches: npt.NDArray[np.int64],
) -> None:  # fmt: skip
    """Adds up, for each worker, what share of a prompt its donors of `namespace` hold.

    `asked`: the prompt's entries (uint32 [n]) and levels (uint8 [n]). An entry that several donors of a worker hold
    counts once, as `shares` (float64 [levels]) says for the lowest of their levels. Added to: `found` (float64
    [workers]) the shares, `matches` (int64 [workers]) the entries that were met.
    """
    entries, levels = asked
    mask = len(table.slots) - 1
    # Of each owner worker << 8 | level, -1 in other namespaces; of each worker number << 8 | level of the last entry
    # that it was met with: one load for each slot that is passed.
    reached = np.full(len(owners.slots), -1, dtype=np.int64)
    for owner in range(len(reached)):
        if owners.namespaces[owner] == namespace:
            reached[owner] = np.int64(owners.workers[owner]) << 8 | np.int64(owners.levels[owner])
    met = np.full(len(found), -1, dtype=np.int64)
    for number in range(len(entries)):
        if number + _AHEAD < len(entries):
            _fetch(table, entries[number + _AHEAD])
        wanted, most = np.uint64(entries[number]), np.int64(levels[number])
        at = _home(table, wanted << _HALF)
        while table.slots[at] != _EMPTY:
            word = table.slots[at]
            at = (at + 1) & mask
            if word >> _HALF != wanted:
                continue
            owner = reached[np.int64(word & _LOW)]
            worker, level = owner >> 8, owner & 255
            if owner < 0 or level > most:
                continue
            before = met[worker]
            if before >> 8 != number:
                found[worker] += shares[level]
                matches[worker] += 1
            elif level < before & 255:
                found[worker] += shares[level] - shares[before & 255]
            else:
                continue
            met[worker] = number << 8 | level
