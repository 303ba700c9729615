"""SketchIndex: from a prompt's fingerprints to the workers whose donors hold its text, whatever their number."""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.fleet.overlap_tally import add_up
from semblend_trt.fleet.owner_sets import DEAD, Owners, bury, join, leave, move, sets_of, words_in_use
from semblend_trt.fleet.posting_table import clear, copy, enter, find, look_up, places_of, table_of, used_places
from semblend_trt.fleet.sketch import MAX_LEVEL

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from semblend_trt.fleet.owner_sets import Sets
    from semblend_trt.fleet.sketch import PromptFingerprints, Sketch

    _Change = Callable[[Sets, Owners, npt.NDArray[np.uint64], npt.NDArray[np.int64], int], int]

# Every 2**32nd value meets an entry that is not its own: one of them says nothing.
FEWEST_MATCHES = 2
_FIRST_BITS = 12
_MOST_FILLED = 0.75
_SWEPT_AT_ONCE = 4096
_OwnerKey = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Posting:
    """A donor as it stands in the index: its owner's number and its entries, uint32 [n], ascending."""

    owner: int
    entries: npt.NDArray[np.uint32]


class SketchIndex:
    """Sketches by namespace number and worker number; both are small integers that the caller gives. Not thread safe.

    A worker's estimate takes its donors together: an entry of the prompt that several of them hold counts once. For
    one donor it is `sketch.overlap`; a donor of level L shows one in 2**L anchors, each of which stands for as many.
    Growing doubles the table in the `add` that finds it full: 6 ns a slot and more where the system has to find memory.
    """

    def __init__(self, max_pairs: int) -> None:
        """`max_pairs` bounds the different (entry, owner) pairs. An entry takes 11 to 21 bytes, whoever holds it; sets
        of several holders take 48 bytes a pair at most, and next to none where texts are held whole.
        """
        self._max_pairs = max_pairs
        self._factor = secrets.randbits(32) | 1
        self._bits = _FIRST_BITS
        self._table = table_of(self._bits, self._factor)
        self._sets = sets_of(1 << _FIRST_BITS)
        self._owners = _owners_of(64)
        self._numbers: dict[_OwnerKey, int] = {}
        self._by_worker: dict[int, set[_OwnerKey]] = {}
        self._free = list(range(63, 0, -1))
        self._dead: list[int] = []
        # The sweep goes down the table, since what is taken out moves those behind it up.
        self._swept_to = self._unswept = 0
        _warm_up()

    def __len__(self) -> int:
        """Different (entry, worker, level) that are kept, those that wait to be swept away among them."""
        return int(self._owners.slots.sum())

    def add(self, namespace: int, worker: int, sketch: Sketch) -> Posting | None:
        """Enters a donor; None when there is no room for it."""
        entries = np.sort(sketch.entries.astype(np.uint32, copy=False))
        if not len(entries):
            return Posting(0, entries)
        if len(self) + len(entries) > self._max_pairs:
            return None
        self._make_room(len(entries))
        owner = self._owner_of((namespace, worker, sketch.level))
        self._change(join, enter(self._table, entries), owner)
        return Posting(owner, entries)

    def remove(self, posting: Posting) -> None:
        """Takes a donor out, whose worker was not forgotten since it was entered."""
        owners, owner = self._owners, posting.owner
        if owner:
            self._change(leave, find(self._table, posting.entries), owner)
            clear(self._table, posting.entries)
            if not owners.slots[owner]:
                key = int(owners.namespaces[owner]), int(owners.workers[owner]), int(owners.levels[owner])
                del self._numbers[key]
                self._by_worker[key[1]].discard(key)
                owners.namespaces[owner] = DEAD
                self._free.append(owner)

    def forget(self, worker: int) -> None:
        """Takes all of a worker's donors out, in no time: `tidy` does the work."""
        for key in self._by_worker.pop(worker, ()):
            owner = self._numbers.pop(key)
            self._owners.namespaces[owner] = DEAD
            self._dead.append(owner)
        self._begin_sweep()

    def tidy(self) -> None:
        """Does a small part of the work that `forget` left."""
        if self._unswept > 0:
            stop = self._swept_to or len(self._table.slots)
            start = stop - _SWEPT_AT_ONCE
            places, entries = used_places(self._table, start, stop)
            places.sort()
            bury(self._sets, self._owners, self._table.slots, places)
            clear(self._table, entries)
            self._swept_to, self._unswept = start, self._unswept - _SWEPT_AT_ONCE
            self._reclaim()

    def search(self, namespace: int, workers: int, prompt: PromptFingerprints) -> npt.NDArray[np.float64]:
        """The share of `prompt` that each of the workers 0 .. `workers` - 1 holds, 0..1: float64 [workers]."""
        found, matches = np.zeros(workers), np.zeros(workers, dtype=np.int64)
        owners, shares = self._owners, np.zeros(MAX_LEVEL + 1)
        is_asked = owners.namespaces == namespace
        if is_asked.any():
            np.divide(1.0, prompt.eligible, out=shares, where=prompt.eligible > 0)
            reached = np.where(is_asked, owners.workers.astype(np.int64) << 8 | owners.levels, -1)
            # No sketch can hold what lies below its level.
            least = int(owners.levels[is_asked].min())
            hits = look_up(self._table, prompt.entries, prompt.levels, least)
            hits.sort()
            add_up(self._sets, reached, hits, shares, found, matches)
            found[matches < FEWEST_MATCHES] = 0.0
        return np.minimum(found, 1.0)

    def _change(self, change: _Change, places: npt.NDArray[np.int64], owner: int) -> None:
        """Has `change` done at all `places`, with as much room for the sets as it takes."""
        places.sort()
        done = change(self._sets, self._owners, self._table.slots, places, owner)
        while done < len(places):
            larger = sets_of(3 * words_in_use(self._sets) + (1 << _FIRST_BITS))
            move(self._sets, self._table.slots, larger)
            self._sets = larger
            places = places_of(self._table, places[done:])
            places.sort()
            done = change(self._sets, self._owners, self._table.slots, places, owner)

    def _owner_of(self, key: _OwnerKey) -> int:
        owner = self._numbers.get(key)
        if owner is None:
            if not self._free:
                self._grow_owners()
            owner = self._numbers[key] = self._free.pop()
            self._by_worker.setdefault(key[1], set()).add(key)
            owners = self._owners
            owners.namespaces[owner], owners.workers[owner], owners.levels[owner] = key
        return owner

    def _make_room(self, count: int) -> None:
        """Doubles the table as often as `count` more entries need it."""
        while self._table.used[0] + count > _MOST_FILLED * (1 << self._bits):
            self._bits += 1
            larger = table_of(self._bits, self._factor)
            copy(self._table, larger)
            self._table = larger
            self._swept_to = 0
            if self._unswept > 0:
                self._begin_sweep()

    def _begin_sweep(self) -> None:
        """Has all slots looked at, the first part twice: what moves up into it may not have been looked at."""
        self._unswept = len(self._table.slots) + _SWEPT_AT_ONCE

    def _reclaim(self) -> None:
        """Gives the numbers of dead owners without a slot to others."""
        gone = [owner for owner in self._dead if not self._owners.slots[owner]]
        if gone:
            self._free.extend(gone)
            self._dead = [owner for owner in self._dead if self._owners.slots[owner]]

    def _grow_owners(self) -> None:
        before = len(self._owners.slots)
        larger = _owners_of(2 * before)
        for name in Owners._fields:
            getattr(larger, name)[:before] = getattr(self._owners, name)
        self._owners = larger
        self._free = list(range(2 * before - 1, before - 1, -1))


@functools.cache
def _warm_up() -> None:
    """Compiles what the index runs, or loads it from disk, so that no event has to wait for it."""
    table, sets, owners = table_of(_FIRST_BITS, 1), sets_of(1), _owners_of(2)
    entries, levels = np.ones(1, dtype=np.uint32), np.zeros(1, dtype=np.uint8)
    places = enter(table, entries)
    join(sets, owners, table.slots, places, 1)
    hits, shares, matches = look_up(table, entries, levels, 0), np.zeros(MAX_LEVEL + 1), np.zeros(1, dtype=np.int64)
    add_up(sets, np.full(2, -1), hits, shares, np.zeros(1), matches)
    leave(sets, owners, table.slots, find(table, entries), 1)
    bury(sets, owners, table.slots, used_places(table, 0, 1)[0])
    move(sets, table.slots, sets_of(1))
    clear(table, entries)
    copy(table, table_of(_FIRST_BITS, 1))


def _owners_of(count: int) -> Owners:
    return Owners(
        np.full(count, DEAD, dtype=np.int32),
        np.zeros(count, dtype=np.int32),
        np.zeros(count, dtype=np.uint8),
        np.zeros(count, dtype=np.int64),
    )
