"""Who holds an entry: sets of owners that entries share (compiled).

An owner is a namespace's donors of one level on one worker; of an owner that is gone the namespace is DEAD. Texts are
held as a whole, so most entries of a text have the same holders, and one set serves them all: it is changed once when
a donor comes or goes, and read once in a search.

A reference says who holds an entry: below SHARED one donor of the owner of that number, from SHARED on the set that
begins at word reference - SHARED, NONE nobody. A set's first word is slots that refer to it << 32 | owners; a word for
each owner follows, donors that hold the entry << 32 | owner's number. A set has as many words as the power of two above
its number of owners says. Places, sorted, are those of posting_table.py; what changes is written to the table's slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry, inner
from semblend_trt.fleet.posting_table import NONE

DEAD = -1
SHARED = 1 << 30
_Words = npt.NDArray[np.int64]
_Slots = npt.NDArray[np.uint64]
_ENTRY = np.uint64(0xFFFFFFFF00000000)
_LOW = 0xFFFFFFFF
_ONE = 1 << 32
# `state`: heads of the lists of free sets by the log2 of their words, then the first word never used, words in use.
_SIZES = 31
_TOP, _IN_USE = _SIZES, _SIZES + 1


class Owners(NamedTuple):
    """Per owner number, of which 0 is none: its namespace (int32, or DEAD), worker (int32), level (uint8), and the
    number of entries that it holds (int64).
    """

    namespaces: npt.NDArray[np.int32]
    workers: npt.NDArray[np.int32]
    levels: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.int64]


class Sets(NamedTuple):
    """`words` int64 [n] hold the sets, of which word 0 is none, `state` says which are free."""

    words: _Words
    state: _Words


def sets_of(words: int) -> Sets:
    """Room for `words` words of sets."""
    state = np.zeros(_SIZES + 2, dtype=np.int64)
    state[_TOP] = 1
    return Sets(np.zeros(words, dtype=np.int64), state)


def words_in_use(sets: Sets) -> int:
    return int(sets.state[_IN_USE])


@inner
def _size_of(owners: int) -> int:
    """Log2 of the words of a set."""
    size = 0
    while owners >> size:
        size += 1
    return size


@inner
def _take(sets: Sets, size: int) -> int:
    at: int = sets.state[size]
    if at:
        sets.state[size] = sets.words[at]
    else:
        at = sets.state[_TOP]
        sets.state[_TOP] += 1 << size
    sets.state[_IN_USE] += 1 << size
    return at


@inner
def _give_back(sets: Sets, at: int, size: int) -> None:
    sets.words[at] = sets.state[size]
    sets.state[size] = at
    sets.state[_IN_USE] -= 1 << size


@inner
def _release(sets: Sets, at: int, count: int) -> None:
    """Says that `count` slots refer to a set no longer."""
    sets.words[at] -= count * _ONE
    if sets.words[at] < _ONE:
        _give_back(sets, at, _size_of(sets.words[at]))


@inner
def _copy(sets: Sets, at: int, owners: int, count: int) -> int:
    """A copy with room for so many `owners`, to which `count` of the set's slots refer from now on."""
    length = sets.words[at] & _LOW
    new = _take(sets, _size_of(owners))
    sets.words[new] = count * _ONE | length
    for place in range(1, length + 1):
        sets.words[new + place] = sets.words[at + place]
    _release(sets, at, count)
    return new


@inner
def _place_of(sets: Sets, at: int, owner: int) -> int:
    """Where in a set an owner stands; behind the last when it does not."""
    length = sets.words[at] & _LOW
    place = 1
    while place <= length and sets.words[at + place] & _LOW != owner:
        place += 1
    return place


@inner
def _drop(sets: Sets, at: int, place: int) -> None:
    """Takes an owner out of a set; the last one moves to its place."""
    length = sets.words[at] & _LOW
    sets.words[at + place] = sets.words[at + length]
    sets.words[at] -= 1
    size = _size_of(length - 1)
    if size < _size_of(length):
        _give_back(sets, at + (1 << size), size)


@inner
def _settled(sets: Sets, at: int, count: int) -> int:
    """The reference for `count` slots of a set that has become smaller."""
    length = sets.words[at] & _LOW
    if length > 1 or (length and sets.words[at + 1] >= 2 * _ONE):
        return SHARED | at
    left = sets.words[at + 1] & _LOW if length else NONE
    _release(sets, at, count)
    return left


@inner
def _joined(sets: Sets, owners: Owners, reference: int, owner: int, count: int) -> int:
    """The reference for `count` slots of `reference` with one donor of `owner` more."""
    if reference == NONE:
        owners.slots[owner] += count
        return owner
    if reference < SHARED:
        at = _take(sets, 1)
        sets.words[at], sets.words[at + 1] = count * _ONE | 1, _ONE | reference
    else:
        at = reference - SHARED
    length, place = sets.words[at] & _LOW, _place_of(sets, at, owner)
    needed = max(length, place)
    if sets.words[at] >> 32 > count or _size_of(needed) > _size_of(length):
        at = _copy(sets, at, needed, count)
    if place > length:
        sets.words[at] += 1
        sets.words[at + place] = owner
        owners.slots[owner] += count
    sets.words[at + place] += _ONE
    return SHARED | at


@inner
def _left(sets: Sets, owners: Owners, reference: int, owner: int, count: int) -> int:
    """The reference for `count` slots of `reference` with one donor of `owner` less."""
    if reference == owner:
        owners.slots[owner] -= count
        return NONE
    if reference < SHARED or reference == NONE:
        return reference
    at = reference - SHARED
    length, place = sets.words[at] & _LOW, _place_of(sets, at, owner)
    if place > length:
        return reference
    if sets.words[at] >> 32 > count:
        at = _copy(sets, at, length, count)
    sets.words[at + place] -= _ONE
    if sets.words[at + place] < _ONE:
        _drop(sets, at, place)
        owners.slots[owner] -= count
    return _settled(sets, at, count)


@inner
def _living(sets: Sets, owners: Owners, reference: int, count: int) -> int:
    """The reference for `count` slots of `reference` without dead owners; for all of a set's slots these are gone."""
    if reference == NONE:
        return reference
    if reference < SHARED:
        if owners.namespaces[reference] != DEAD:
            return reference
        owners.slots[reference] -= count
        return NONE
    at = reference - SHARED
    for place in range(sets.words[at] & _LOW, 0, -1):
        owner = sets.words[at + place] & _LOW
        if owners.namespaces[owner] == DEAD:
            owners.slots[owner] -= sets.words[at] >> 32
            _drop(sets, at, place)
    return _settled(sets, at, count)


@inner
def _end_of(places: _Words, start: int) -> int:
    """The end of those that have the same reference."""
    end = start + 1
    while end < len(places) and places[end] >> 32 == places[start] >> 32:
        end += 1
    return end


@inner
def _refer(slots: _Slots, places: _Words, reference: int) -> None:
    if places[0] >> 32 != reference:
        for place in places:
            at = place & _LOW
            slots[at] = slots[at] & _ENTRY | np.uint64(reference)


@inner
def _has_room(sets: Sets, reference: int) -> bool:
    """False when a set one larger than that of `reference` might find no room."""
    owners = 1 if reference < SHARED or reference == NONE else sets.words[reference - SHARED] & _LOW
    enough: bool = sets.state[_TOP] + 2 + (1 << _size_of(owners + 1)) <= len(sets.words)
    return enough


@inner
def _change(sets: Sets, owners: Owners, slots: _Slots, places: _Words, owner: int, comes: bool) -> int:
    start = 0
    while start < len(places) and _has_room(sets, places[start] >> 32):
        reference, end = places[start] >> 32, _end_of(places, start)
        if comes:
            changed = _joined(sets, owners, reference, owner, end - start)
        else:
            changed = _left(sets, owners, reference, owner, end - start)
        _refer(slots, places[start:end], changed)
        start = end
    return start


@entry
def join(sets: Sets, owners: Owners, slots: _Slots, places: _Words, owner: int) -> int:
    """Counts one donor of `owner` more at `places`. Returns how many were done: less than all when room was missing."""
    return _change(sets, owners, slots, places, owner, True)


@entry
def leave(sets: Sets, owners: Owners, slots: _Slots, places: _Words, owner: int) -> int:
    """Counts one donor of `owner` less at `places`, as `join` counts one more."""
    return _change(sets, owners, slots, places, owner, False)


@entry
def bury(sets: Sets, owners: Owners, slots: _Slots, places: _Words) -> None:
    """Takes dead owners out at `places`."""
    start = 0
    while start < len(places):
        end = _end_of(places, start)
        _refer(slots, places[start:end], _living(sets, owners, places[start] >> 32, end - start))
        start = end


@entry
def move(sets: Sets, slots: _Slots, others: Sets) -> None:
    """Moves all sets into empty ones, without gaps; these have room for them."""
    for number in range(len(slots)):
        reference = np.int64(slots[number] & ~_ENTRY)
        if reference < SHARED or reference == NONE:
            continue
        at = reference - SHARED
        if sets.words[at] >= _ONE:
            length = sets.words[at] & _LOW
            new = _take(others, _size_of(length))
            for place in range(length + 1):
                others.words[new + place] = sets.words[at + place]
            sets.words[at] = new  # below _ONE: where the set has gone
        slots[number] = slots[number] & _ENTRY | np.uint64(SHARED | sets.words[at])
