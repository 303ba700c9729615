"""SketchIndex: from a prompt's fingerprints to the workers whose donors hold its text, whatever their number."""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.fleet.posting_table import DEAD, Owners, add, copy, remove, search, sweep, table_of
from semblend_trt.fleet.sketch import MAX_LEVEL

if TYPE_CHECKING:
    import numpy.typing as npt

    from semblend_trt.fleet.sketch import PromptFingerprints, Sketch

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
    """

    def __init__(self, max_slots: int) -> None:
        """`max_slots` bounds the different (entry, worker) pairs; 12 to 32 bytes are taken for each."""
        self._max_slots = max_slots
        self._factor = secrets.randbits(32) | 1
        self._bits = _FIRST_BITS
        self._table = table_of(self._bits, self._factor)
        self._owners = _owners_of(64)
        self._numbers: dict[_OwnerKey, int] = {}
        self._by_worker: dict[int, set[_OwnerKey]] = {}
        self._free = list(range(63, 0, -1))
        self._dead: list[int] = []
        self._swept_to = 0
        _warm_up()

    def __len__(self) -> int:
        """Different (entry, worker, level) that are kept, those that wait to be swept away among them."""
        return int(self._owners.slots.sum())

    def add(self, namespace: int, worker: int, sketch: Sketch) -> Posting | None:
        """Enters a donor; None when there is no room for it."""
        entries = np.sort(sketch.entries.astype(np.uint32, copy=False))
        if not len(entries):
            return Posting(0, entries)
        if not self._make_room(len(entries)):
            return None
        owner = self._owner_of((namespace, worker, sketch.level))
        add(self._table, self._owners, entries, owner)
        return Posting(owner, entries)

    def remove(self, posting: Posting) -> None:
        """Takes a donor out, whose worker was not forgotten since it was entered."""
        owners, owner = self._owners, posting.owner
        if owner:
            remove(self._table, owners, posting.entries, owner)
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

    def tidy(self) -> None:
        """Does a small part of the work that `forget` left."""
        if self._dead:
            self._swept_to = sweep(self._table, self._owners, self._swept_to, _SWEPT_AT_ONCE)
            self._reclaim()

    def search(self, namespace: int, workers: int, prompt: PromptFingerprints) -> npt.NDArray[np.float64]:
        """The share of `prompt` that each of the workers 0 .. `workers` - 1 holds, 0..1: float64 [workers]."""
        found, matches = np.zeros(workers), np.zeros(workers, dtype=np.int64)
        shares = np.zeros(MAX_LEVEL + 1)
        np.divide(1.0, prompt.eligible, out=shares, where=prompt.eligible > 0)
        search(self._table, self._owners, namespace, (prompt.entries, prompt.levels), shares, found, matches)
        found[matches < FEWEST_MATCHES] = 0.0
        return np.minimum(found, 1.0)

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

    def _make_room(self, count: int) -> bool:
        """Doubles the table as often as `count` more slots need it; False when there would be too many."""
        wanted = len(self) + count
        if wanted > self._max_slots:
            return False
        while wanted > _MOST_FILLED * (1 << self._bits):
            self._bits += 1
            larger = table_of(self._bits, self._factor)
            copy(self._table, self._owners, larger)
            self._table, self._swept_to = larger, 0
            self._reclaim()
            wanted = len(self) + count
        return True

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
    table, owners = table_of(_FIRST_BITS, 1), _owners_of(2)
    entries, levels = np.ones(1, dtype=np.uint32), np.zeros(1, dtype=np.uint8)
    add(table, owners, entries, 1)
    search(table, owners, DEAD, (entries, levels), np.ones(1), np.zeros(1), np.zeros(1, dtype=np.int64))
    remove(table, owners, entries, 1)
    copy(table, owners, table_of(_FIRST_BITS, 1))
    sweep(table, owners, 0, 1)


def _owners_of(count: int) -> Owners:
    return Owners(
        np.full(count, DEAD, dtype=np.int32),
        np.zeros(count, dtype=np.int32),
        np.zeros(count, dtype=np.uint8),
        np.zeros(count, dtype=np.int64),
    )
