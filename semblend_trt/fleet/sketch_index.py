"""An index from a prompt's fingerprints to the workers that hold its text, made of donors' sketches.

A hash table maps each entry of a sketch to the set of its holders. Workers hold whole texts, so most entries of a text
share one set, which a search reads once. Compiled code on a few arrays makes a change in microseconds, without the
interpreter's lock."""

from __future__ import annotations

import functools
import secrets
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from semblend_trt.compiled import compiled
from semblend_trt.fleet.sketch import KEY_BYTES, fingerprints_of, sketch_of

if TYPE_CHECKING:
    from semblend_trt.fleet.sketch import PromptFingerprints, Sketch

_Entries = npt.NDArray[np.uint32]
_Unsigned = npt.NDArray[np.uint64]
_Integers = npt.NDArray[np.int64]

# One match may be chance: one in 2**32 values equals an entry of another anchor.
FEWEST_MATCHES = 2
# A slot is entry << 32 | number of a set, and 0 when free. The table grows when more than this share is filled.
_ENTRY_SHIFT, _NUMBER, _FREE = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0)
_ONE = np.uint64(1)
_MOST_FILLED, _FEWEST_SLOTS, _FEWEST_SETS = 0.5, 1 << 10, 1 << 6
# A holder is worker << 26 | level << 20 | number of its donors; a set is its holders in ascending order.
_WORKER_SHIFT, _LEVEL_SHIFT, _LEVEL, _DONORS = 26, 20, 63, (1 << 20) - 1
# The empty set's number. Number 0 ends a list.
_EMPTY = 1
# A set's columns: its start and length in the pool, its entries' number, a hash of its holders, and the next set of its
# bucket, or the next unused one. For one change: the number of entries that leave, and the set that they go to.
_START, _LENGTH, _USES, _HASH, _NEXT, _LEAVING, _SUCCESSOR, _COLUMNS = range(8)
# The state's fields: taken slots, the end of the pool's used part, the first unused set, the number of unused sets.
_TAKEN, _END, _UNUSED, _LEFT, _FIELDS = range(5)


# Not for the garbage collector, like the donor that holds it.
class Posting(msgspec.Struct, gc=False):
    """A donor in an index: its worker's number, its sketch's level and entries (uint32 [n], ascending)."""

    worker: int
    level: int
    entries: _Entries


class _Arrays(NamedTuple):
    """What compiled code works on; `hashing` is a factor and a shift."""

    table: _Unsigned
    hashing: _Unsigned
    sets: _Integers
    pool: _Integers
    buckets: _Integers
    state: _Integers


class SketchIndex:
    """The sketches of one namespace, whose workers the caller numbers. Not thread safe.

    Where several donors of a worker hold an entry of the prompt, it counts once. A donor of level L shows one in 2**L
    anchors, and each counts as 2**L. The standard deviation is about sqrt(share * (1 - share) / eligible[L]). Text
    shared in runs below GUARANTEED_RUN tokens is not seen. An entry takes 16 to 32 bytes. Each set of holders takes 64
    to 128 bytes, and 8 to 16 per holder."""

    def __init__(self) -> None:
        # Odd and secret, so that a forger cannot choose entries that collide.
        self._factor = secrets.randbits(64) | 1
        none, sets = np.zeros(0, dtype=np.int64), np.zeros((_FEWEST_SETS, _COLUMNS), dtype=np.int64)
        unsigned = none.view(np.uint64)
        self._arrays = _Arrays(unsigned, unsigned, sets, none, none, np.zeros(_FIELDS, dtype=np.int64))
        self._grow_table(0)
        self._grow_sets(0, 0)
        self._donors_of_level: Counter[int] = Counter()

    def add(self, worker: int, sketch: Sketch) -> Posting:
        posting = Posting(worker, sketch.level, np.sort(sketch.entries))
        self._donors_of_level[posting.level] += 1
        self._change(posting, 1)
        return posting

    def remove(self, posting: Posting) -> None:
        self._donors_of_level[posting.level] -= 1
        self._change(posting, -1)

    def search(self, workers: int, prompt: PromptFingerprints) -> npt.NDArray[np.float64]:
        """Return the share of `prompt` that each of the workers 0 .. `workers` - 1 holds, 0..1: float64 [workers]."""
        # A sketch has no entries below its level.
        lowest = min((level for level, donors in self._donors_of_level.items() if donors), default=0)
        return _search(self._arrays, prompt.entries, prompt.levels, prompt.eligible, lowest, workers)

    def _change(self, posting: Posting, step: int) -> None:
        holder, entries = posting.worker << _WORKER_SHIFT | posting.level << _LEVEL_SHIFT, posting.entries
        while lacking := _change(self._arrays, entries, holder, step):
            if lacking < 0:
                self._grow_table(len(entries))
            else:
                self._grow_sets(len(entries), lacking)

    def _grow_table(self, entries: int) -> None:
        size = _FEWEST_SLOTS
        while size < 2 * (self._arrays.state[_TAKEN] + entries):
            size *= 2
        before, hashing = self._arrays.table, np.array([self._factor, 65 - size.bit_length()], dtype=np.uint64)
        self._arrays = self._arrays._replace(table=np.zeros(size, dtype=np.uint64), hashing=hashing)
        _rehash(before, self._arrays)

    def _grow_sets(self, entries: int, holders: int) -> None:
        before = self._arrays
        rows = len(before.sets)
        while rows - len(before.sets) + before.state[_LEFT] < entries:
            rows *= 2
        sets = np.concatenate([before.sets, np.zeros((rows - len(before.sets), _COLUMNS), dtype=np.int64)])
        used = int(sets[sets[:, _USES] > 0, _LENGTH].sum())
        pool, buckets = np.zeros(2 * (used + holders), dtype=np.int64), np.zeros(rows, dtype=np.int64)
        self._arrays = before._replace(sets=sets, pool=pool, buckets=buckets)
        _repack(before.pool, self._arrays)


@functools.cache
def warm_up() -> None:
    """Compile the index's code, or load it from disk, so that no event and no lookup waits for that."""
    index, tokens, key = SketchIndex(), np.arange(64), bytes(KEY_BYTES)
    index.add(0, sketch_of(tokens, key))
    index.search(1, *fingerprints_of(tokens, [key]))


@compiled
def _slot_of(table: _Unsigned, hashing: _Unsigned, value: np.uint64) -> np.uint64:
    """Return the slot of an entry, or the free slot for it, by linear probing."""
    at, mask = value * hashing[0] >> hashing[1], np.uint64(len(table) - 1)
    while table[at] != _FREE and table[at] >> _ENTRY_SHIFT != value:
        at = at + _ONE & mask
    return at


@compiled
def _free(table: _Unsigned, hashing: _Unsigned, slot: np.uint64) -> None:
    """Free a slot. Later entries move up, so that no probe meets a free slot before its entry."""
    at, mask = slot, np.uint64(len(table) - 1)
    while table[at] != _FREE:
        at = at + _ONE & mask
        home = (table[at] >> _ENTRY_SHIFT) * hashing[0] >> hashing[1]
        if (at - home) & mask >= (at - slot) & mask:
            table[slot] = table[at]
            slot = at
    table[slot] = _FREE


@compiled
def _rehash(before: _Unsigned, arrays: _Arrays) -> None:
    """Enter all slots of a table in an empty one. Both go by the hash, so that memory is written in order."""
    for slot in before:
        if slot != _FREE:
            arrays.table[_slot_of(arrays.table, arrays.hashing, slot >> _ENTRY_SHIFT)] = slot


@compiled
def _repack(before: _Integers, arrays: _Arrays) -> None:
    """Copy the holders of the used sets to another pool, and list the sets again."""
    _, _, sets, pool, buckets, state = arrays
    state[_END] = state[_UNUSED] = state[_LEFT] = 0
    for number in range(len(sets) - 1, _EMPTY, -1):
        row = sets[number]
        if row[_USES]:
            end = state[_END] + row[_LENGTH]
            pool[state[_END] : end] = before[row[_START] : row[_START] + row[_LENGTH]]
            row[_START], state[_END] = state[_END], end
            bucket = row[_HASH] & (len(buckets) - 1)
            row[_NEXT], buckets[bucket] = buckets[bucket], number
        else:
            row[_NEXT], state[_UNUSED] = state[_UNUSED], number
            state[_LEFT] += 1


@compiled
def _change(arrays: _Arrays, entries: _Entries, holder: int, step: int) -> int:
    """Add `step` to the donors of `holder`, whose own count is 0, for each entry; repeated entries count once.
    Return 0. Without room, change no set: return -1 for a full table, for full sets the holders that they may take."""
    table, hashing, sets, pool, _, state = arrays
    if state[_TAKEN] + len(entries) > _MOST_FILLED * len(table):
        return -1
    slots, left = np.empty(len(entries), dtype=np.uint64), np.empty(len(entries), dtype=np.int64)
    taken, count, room = _find(arrays, entries, slots, left)
    if state[_END] + room > len(pool) or state[_LEFT] < count:
        for number in left[:count]:
            sets[number, _LEAVING] = 0
        return room
    for number in left[:count]:
        successor = _successor(arrays, number, holder, step)
        sets[number, _SUCCESSOR] = successor
        sets[successor, _USES] += sets[number, _LEAVING]
    for number in left[:count]:
        sets[number, _USES] -= sets[number, _LEAVING]
        sets[number, _LEAVING] = 0
        if not sets[number, _USES] and number != _EMPTY:
            _forget(arrays, number)
    gone = 0
    for slot in slots[:taken]:
        value = table[slot] >> _ENTRY_SHIFT
        successor = sets[table[slot] & _NUMBER, _SUCCESSOR]
        table[slot] = value << _ENTRY_SHIFT | np.uint64(successor)
        if successor == _EMPTY:
            slots[gone] = value
            gone += 1
    for value in slots[:gone]:  # freeing one moves others
        _free(table, hashing, _slot_of(table, hashing, value))
    state[_TAKEN] -= gone
    return 0


@compiled
def _find(arrays: _Arrays, entries: _Entries, slots: _Unsigned, left: _Integers) -> tuple[int, int, int]:
    """Write the slot of each different entry and each of their sets; a new entry gets a slot with the empty set.
    Return the numbers of slots and sets, and the holders of all those sets with one more each."""
    table, hashing, sets, _, _, state = arrays
    taken = count = room = 0
    for each in range(len(entries)):
        if each and entries[each] == entries[each - 1]:
            continue
        value = np.uint64(entries[each])
        slots[taken] = slot = _slot_of(table, hashing, value)
        taken += 1
        if table[slot] == _FREE:
            table[slot] = value << _ENTRY_SHIFT | np.uint64(_EMPTY)
            state[_TAKEN] += 1
        number = np.int64(table[slot] & _NUMBER)
        if not sets[number, _LEAVING]:
            left[count] = number
            count += 1
            room += sets[number, _LENGTH] + 1
        sets[number, _LEAVING] += 1
    return taken, count, room


@compiled
def _successor(arrays: _Arrays, number: int, holder: int, step: int) -> int:
    """Return the set that has `step` more donors of `holder` than set `number`; make it where it is missing."""
    _, hashing, sets, pool, buckets, state = arrays
    at, stop = sets[number, _START], sets[number, _START] + sets[number, _LENGTH]
    begin = end = state[_END]
    while at < stop and pool[at] < holder:
        pool[end] = pool[at]
        at, end = at + 1, end + 1
    changed = holder + step
    if at < stop and pool[at] & ~_DONORS == holder:
        changed = pool[at] + step
        at += 1
    if changed != holder:
        pool[end] = changed
        end += 1
    while at < stop:
        pool[end] = pool[at]
        at, end = at + 1, end + 1
    if begin == end:
        return _EMPTY
    value = np.uint64(0)
    for each in pool[begin:end]:
        value = (value ^ np.uint64(each)) * hashing[0]
        value ^= value >> _ENTRY_SHIFT
    hashed, length = np.int64(value), end - begin
    bucket = hashed & (len(buckets) - 1)
    found = buckets[bucket]
    while found:
        start = sets[found, _START]
        is_alike = sets[found, _HASH] == hashed and sets[found, _LENGTH] == length
        if is_alike and np.array_equal(pool[start : start + length], pool[begin:end]):
            return found
        found = sets[found, _NEXT]
    found = state[_UNUSED]
    state[_UNUSED] = sets[found, _NEXT]
    state[_LEFT] -= 1
    state[_END] = end
    sets[found, _START], sets[found, _LENGTH], sets[found, _HASH] = begin, length, hashed
    sets[found, _NEXT], buckets[bucket] = buckets[bucket], found
    return found


@compiled
def _forget(arrays: _Arrays, number: int) -> None:
    """Move a set from its bucket to the unused sets."""
    _, _, sets, _, buckets, state = arrays
    bucket = sets[number, _HASH] & (len(buckets) - 1)
    before = buckets[bucket]
    if before == number:
        buckets[bucket] = sets[number, _NEXT]
    else:
        while sets[before, _NEXT] != number:
            before = sets[before, _NEXT]
        sets[before, _NEXT] = sets[number, _NEXT]
    sets[number, _NEXT], state[_UNUSED] = state[_UNUSED], number
    state[_LEFT] += 1


@compiled
def _search(
    arrays: _Arrays, entries: _Entries, levels: npt.NDArray[np.uint8], eligible: _Integers, lowest: int, workers: int
) -> npt.NDArray[np.float64]:
    """Do `SketchIndex.search` without the entries of a level below `lowest`."""
    table, hashing, sets, pool, _, _ = arrays
    # The set and the level of each held entry, as set << 6 | level.
    found, count = np.empty(len(entries), dtype=np.int64), 0
    for each in range(len(entries)):
        if levels[each] >= lowest:
            number = np.int64(table[_slot_of(table, hashing, np.uint64(entries[each]))] & _NUMBER)
            if number > _EMPTY:
                found[count] = number << 6 | levels[each]
                count += 1
    found = np.sort(found[:count])
    shares, matches = np.zeros(workers), np.zeros(workers, dtype=np.int64)
    first = 0
    while first < count:
        number, end = found[first] >> 6, first
        while end < count and found[end] >> 6 == number:
            end += 1
        before = -1
        for holder in pool[sets[number, _START] : sets[number, _START] + sets[number, _LENGTH]]:
            worker, level = holder >> _WORKER_SHIFT, holder >> _LEVEL_SHIFT & _LEVEL
            # Of a worker's levels in a set, the lowest counts; it comes first.
            if worker != before and worker < workers:
                matched = end - first - np.searchsorted(found[first:end], number << 6 | level)
                shares[worker] += matched / max(eligible[level], 1)
                matches[worker] += matched
            before = worker
        first = end
    for worker in range(workers):
        shares[worker] = min(shares[worker], 1.0) if matches[worker] >= FEWEST_MATCHES else 0.0
    return shares
