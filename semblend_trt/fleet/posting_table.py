"""The table from a sketch's entries to who holds them: open addressing with linear probing (compiled).

A slot (uint64) is entry << 32 | reference, 0 when it is empty; an entry has one slot, whoever holds it. References,
of 31 bits and never 0, are those of owner_sets.py. A place (int64) is reference << 32 | slot number. Taking a slot out
moves those behind it up, so that none is left that searches would have to pass (Knuth, "The Art of Computer
Programming" 3, 6.4, algorithm R).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry, inner
from semblend_trt.discovery.raw_memory import prefetch

# The reference of an entry that nobody holds yet or any more.
NONE = (1 << 31) - 1
_Entries = npt.NDArray[np.uint32]
_Places = npt.NDArray[np.int64]
_EMPTY = np.uint64(0)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
# Slots are fetched from memory while this many entries before them are looked up.
_AHEAD = 16


class Table(NamedTuple):
    """A power of two of slots, of which `used` (int64 [1]) are not empty; `factor`, odd and secret, spreads the entries
    over them by their high bits.
    """

    slots: npt.NDArray[np.uint64]
    used: npt.NDArray[np.int64]
    factor: np.uint64
    shift: np.uint64


def table_of(bits: int, factor: int) -> Table:
    """An empty table of 2**`bits` slots."""
    slots, used = np.zeros(1 << bits, dtype=np.uint64), np.zeros(1, dtype=np.int64)
    return Table(slots, used, np.uint64(factor), np.uint64(32 - bits))


def places_of(table: Table, before: _Places) -> _Places:
    """The places of the same slots as `before`, after references have changed."""
    numbers = before & int(_LOW)
    references: _Places = (table.slots[numbers] & _LOW).astype(np.int64)
    return references << 32 | numbers


@inner
def _home(table: Table, of_entry: np.uint64) -> int:
    spread = (of_entry * table.factor) & _LOW
    home: int = np.int64(spread >> table.shift)
    return home


@inner
def _fetch(table: Table, of_entry: np.uint32) -> None:
    """Asks for the slot where an entry's search begins, so that it is there when it is needed."""
    prefetch(table.slots.ctypes.data + 8 * _home(table, np.uint64(of_entry)))


@inner
def _slot_of(table: Table, of_entry: np.uint64) -> int:
    """The slot of an entry, or the empty one where it belongs."""
    at, mask = _home(table, of_entry), len(table.slots) - 1
    while table.slots[at] != _EMPTY and table.slots[at] >> _HALF != of_entry:
        at = (at + 1) & mask
    return at


@inner
def _place(table: Table, at: int) -> int:
    place: int = np.int64(table.slots[at] & _LOW) << 32 | at
    return place


@inner
def _take_out(table: Table, at: int) -> None:
    mask = len(table.slots) - 1
    hole, behind = at, (at + 1) & mask
    while table.slots[behind] != _EMPTY:
        home = _home(table, table.slots[behind] >> _HALF)
        if (behind - home) & mask >= (behind - hole) & mask:
            table.slots[hole] = table.slots[behind]
            hole = behind
        behind = (behind + 1) & mask
    table.slots[hole] = _EMPTY
    table.used[0] -= 1


@entry
def enter(table: Table, entries: _Entries) -> _Places:
    """The places of `entries` (uint32 [n], ascending), each once; those that had none get one, for NONE.

    There is room for them.
    """
    places = np.empty(len(entries), dtype=np.int64)
    count = 0
    for number in range(len(entries)):
        if number + _AHEAD < len(entries):
            _fetch(table, entries[number + _AHEAD])
        if number and entries[number] == entries[number - 1]:
            continue
        at = _slot_of(table, np.uint64(entries[number]))
        if table.slots[at] == _EMPTY:
            table.slots[at] = np.uint64(entries[number]) << _HALF | np.uint64(NONE)
            table.used[0] += 1
        places[count] = _place(table, at)
        count += 1
    return places[:count]


@entry
def find(table: Table, entries: _Entries) -> _Places:
    """The places of those of `entries` (uint32 [n], ascending) that have one, each once."""
    places = np.empty(len(entries), dtype=np.int64)
    count = 0
    for number in range(len(entries)):
        if number + _AHEAD < len(entries):
            _fetch(table, entries[number + _AHEAD])
        at = _slot_of(table, np.uint64(entries[number]))
        if table.slots[at] != _EMPTY and (not number or entries[number] != entries[number - 1]):
            places[count] = _place(table, at)
            count += 1
    return places[:count]


@entry
def used_places(table: Table, start: int, stop: int) -> tuple[_Places, _Entries]:
    """The places of the slots `start` .. `stop` - 1 that are not empty, and their entries: int64 [n], uint32 [n]."""
    places, entries = np.empty(stop - start, dtype=np.int64), np.empty(stop - start, dtype=np.uint32)
    count = 0
    for at in range(start, stop):
        if table.slots[at] != _EMPTY:
            places[count], entries[count] = _place(table, at), np.uint32(table.slots[at] >> _HALF)
            count += 1
    return places[:count], entries[:count]


@entry
def clear(table: Table, entries: _Entries) -> None:
    """Takes out those of `entries` (uint32 [n]) that nobody holds."""
    for number in range(len(entries)):
        at = _slot_of(table, np.uint64(entries[number]))
        if table.slots[at] & _LOW == np.uint64(NONE):
            _take_out(table, at)


@entry
def copy(table: Table, larger: Table) -> None:
    """Copies everything into an empty table. Slots keep their order, so that both are gone through once."""
    for at in range(len(table.slots)):
        slot = table.slots[at]
        if slot != _EMPTY:
            larger.slots[_slot_of(larger, slot >> _HALF)] = slot
    larger.used[0] = table.used[0]


@entry
def look_up(table: Table, entries: _Entries, levels: npt.NDArray[np.uint8], least: int) -> _Places:
    """Which of a prompt's `entries` (uint32 [n]), of `levels` (uint8 [n]), are held: reference << 32 | level, int64.

    Entries below level `least` are passed over.
    """
    asked, hits = np.empty(len(entries), dtype=np.int64), np.empty(len(entries), dtype=np.int64)
    wanted = 0
    for number in range(len(entries)):
        asked[wanted] = number
        wanted += levels[number] >= least
    count = 0
    for turn in range(wanted):
        if turn + _AHEAD < wanted:
            _fetch(table, entries[asked[turn + _AHEAD]])
        at = _slot_of(table, np.uint64(entries[asked[turn]]))
        hits[count] = np.int64(table.slots[at] & _LOW) << 32 | np.int64(levels[asked[turn]])
        count += table.slots[at] != _EMPTY
    return hits[:count]
