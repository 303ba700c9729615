"""Where donors hold each anchor: a hash table from the anchor's key to its newest place, which links to older ones.

The table uses extendible hashing (Fagin et al., "Extendible Hashing", TODS 1979): a key's leading bits select an entry
in a directory of 2**depth bucket numbers, a full bucket splits in two, and the directory doubles when it must. So a
change moves only the buckets that it fills. Every step handles all keys of a prompt or donor at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.errors import CapacityError

Keys = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]

# A slot is a word: 36 bits of a key, the last of them set, then 28 bits with the number of the key's newest place.
# A free slot is 0, or _EMPTIED after a key was removed.
_KEY_BITS, _NUMBER_BITS = 36, np.uint64(28)
_NUMBER = np.uint64((1 << 28) - 1)
_EMPTIED = np.uint64(1)
# A bucket's rows are cache lines, filled from the left: a row that does not end in 0 may have overflowed.
_ROWS, _SLOTS = 256, 8
# With more words, searches for missing keys take more steps.
_MOST_FILLED = _ROWS * _SLOTS * 6 // 10
# With fewer keys a full bucket does not split; it only drops its emptied slots.
_WORTH_SPLITTING = _MOST_FILLED * 7 // 10
# Places are given to donors in pages.
_PAGE_BITS, _PAGE = 4, 16
_GONE = -1
_MOST_PAGES = 1 << (28 - _PAGE_BITS)
_GROWTH_BYTES = 1 << 22


class AnchorTable:
    """Places by key. Keys are uint64 with all bits random. Not thread safe."""

    def __init__(self) -> None:
        self._depth = 0
        self._directory: Integers = np.zeros(1, dtype=np.int64)
        self._buckets = 1
        self._rows: Keys = np.zeros((_ROWS, _SLOTS), dtype=np.uint64)
        self._filled: Integers = np.zeros(1, dtype=np.int64)
        # Of each place: its position in the donor, and the next older and newer place of its key. Place 0 means none;
        # its own values are never read.
        self._positions: Pages = np.zeros(_PAGE, dtype=np.int32)
        self._older: Pages = np.zeros(_PAGE, dtype=np.int32)
        self._newer: Pages = np.zeros(_PAGE, dtype=np.int32)
        self._donors: Pages = np.zeros(1, dtype=np.int32)
        self._pages = 1
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """Memory of the table, in bytes."""
        arrays = (self._directory, self._rows, self._filled, self._positions, self._older, self._newer, self._donors)
        return sum(array.nbytes for array in arrays)

    def add(self, donor: int, keys: Keys, positions: Integers) -> Pages:
        """Enters the keys [n] of a donor (a number below 2**31) that stand at `positions` (int64 [n], below 2**31).

        Returns the pages of its places, for `remove`. Raises CapacityError.
        """
        pages = self._take_pages(-(-len(keys) // _PAGE))
        places = _places_of(pages, len(keys))
        self._donors[pages] = donor
        self._positions[places] = positions
        keys = _shortened(keys)
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        # Where a key occurs again, the later place is the newer one.
        again = np.flatnonzero(keys[1:] == keys[:-1])
        self._older[places[again + 1]] = places[again]
        self._newer[places[again]] = places[again + 1]
        is_newest, is_oldest = np.ones(len(keys), dtype=np.bool_), np.ones(len(keys), dtype=np.bool_)
        is_newest[again], is_oldest[again + 1] = False, False
        keys, newest, oldest = keys[is_newest], places[is_newest], places[is_oldest]
        slots = self._slots_for(keys)
        words = self._rows.reshape(-1)
        before = (words[slots] & _NUMBER).astype(np.int64)
        self._older[oldest] = before
        self._newer[before] = oldest
        self._newer[newest] = 0
        words[slots] = keys << _NUMBER_BITS | newest.astype(np.uint64)
        return pages

    def remove(self, pages: Pages, keys: Keys) -> None:
        """Removes the places in the pages that `add` returned for `keys`."""
        places = _places_of(pages, len(keys))
        self._positions[places] = _GONE
        older, newer = self._older[places], self._newer[places]
        for links, ends in ((self._older, older), (self._newer, newer)):
            while len(gone := np.flatnonzero(self._positions[ends] == _GONE)):
                ends[gone] = links[ends[gone]]
        self._older[newer] = older
        self._newer[older] = newer
        was_newest = newer == 0
        keys, left = _shortened(keys[was_newest]), older[was_newest].astype(np.uint64)
        which, slots = self._find(keys)
        self._rows.reshape(-1)[slots] = np.where(left > 0, keys << _NUMBER_BITS | left, _EMPTIED)[which]
        self._free += pages.tolist()

    def find(self, keys: Keys, most: int, limit: int) -> tuple[Integers, Integers, Integers, Integers]:
        """The newest places of each key: at most `most` of a key and `limit` in all, the newest of all keys first.

        Returns indices into `keys`, donor numbers, and positions in the donors, int64 [places] each; then the indices
        of the keys that have older places as well.
        """
        which, slots = self._find(_shortened(keys))
        places = (self._rows.reshape(-1)[slots] & _NUMBER).astype(np.int64)
        found, unread = [], []
        for _ in range(most):
            unread.append(which[limit:])
            which, places = which[:limit], places[:limit]
            found.append((which, places))
            limit -= len(places)
            places = self._older[places].astype(np.int64)
            has_older = places > 0
            which, places = which[has_older], places[has_older]
            if not len(places):
                break
        unread.append(which)
        which, places = (np.concatenate(each) for each in zip(*found, strict=True))
        donors, positions = self._donors[places >> _PAGE_BITS], self._positions[places]
        return which, donors.astype(np.int64), positions.astype(np.int64), np.concatenate(unread)

    def _home_rows(self, keys: Keys) -> Integers:
        buckets = self._directory[(keys >> np.uint64(_KEY_BITS - self._depth)).astype(np.int64)]
        rows: Integers = buckets * _ROWS + (keys.view(np.int64) >> 1 & _ROWS - 1)
        return rows

    def _find(self, keys: Keys) -> tuple[Integers, Integers]:
        """The indices of the `keys` that are in the table, and their slots: int64 [found] each."""
        rows, waiting = self._home_rows(keys), np.arange(len(keys))
        which, slots = [waiting[:0]], [waiting[:0]]
        while len(waiting):
            words = self._rows.take(rows, axis=0)
            hits = np.flatnonzero(words >> _NUMBER_BITS == keys[:, None])
            found = hits // _SLOTS
            which.append(waiting[found])
            slots.append(rows[found] * _SLOTS + hits % _SLOTS)
            overflowed = words[:, -1] != 0
            overflowed[found] = False
            left = np.flatnonzero(overflowed)
            waiting, keys = waiting[left], keys[left]
            rows = _next_rows(rows[left], keys)
        return np.concatenate(which), np.concatenate(slots)

    def _slots_for(self, keys: Keys) -> Integers:
        """The slots of the different `keys`, int64 [n]; missing keys are entered."""
        which, found = self._find(keys)
        missing = np.ones(len(keys), dtype=np.bool_)
        missing[which] = False
        if self._make_room(keys[missing]):
            return self._slots_for(keys)
        slots = np.empty(len(keys), dtype=np.int64)
        slots[which] = found
        slots[missing] = self._claim(keys[missing])
        return slots

    def _claim(self, keys: Keys) -> Integers:
        """Enters different `keys` that are missing and for which there is room; returns their slots."""
        slots = np.empty(len(keys), dtype=np.int64)
        rows, waiting, words = self._home_rows(keys), np.arange(len(keys)), self._rows.reshape(-1)
        while len(waiting):
            order = np.argsort(rows, kind="stable")
            rows, waiting = rows[order], waiting[order]
            # A row's free slots are its last ones; keys of one row take them in order.
            column = np.count_nonzero(self._rows[rows], axis=1) + np.arange(len(rows)) - np.searchsorted(rows, rows)
            fits = column < _SLOTS
            entered, chosen = waiting[fits], rows[fits] * _SLOTS + column[fits]
            slots[entered] = chosen
            words[chosen] = keys[entered] << _NUMBER_BITS
            waiting = waiting[~fits]
            rows = _next_rows(rows[~fits], keys[waiting])
        return slots

    def _make_room(self, keys: Keys) -> bool:
        """Makes room for new `keys`. True when words have moved; there may still be too little room then."""
        buckets, coming = np.unique(self._home_rows(keys) // _ROWS, return_counts=True)
        filled = self._filled[buckets] + coming
        crowded = np.flatnonzero(filled > _MOST_FILLED)
        if not len(crowded):
            self._filled[buckets] = filled
        for bucket, count in zip(buckets[crowded].tolist(), coming[crowded].tolist(), strict=True):
            self._rebuild(bucket, count)
        return len(crowded) > 0

    def _rebuild(self, bucket: int, coming: int) -> None:
        """Rebuilds a bucket without its emptied slots, as two buckets when it has many keys."""
        held = self._rows[bucket * _ROWS : (bucket + 1) * _ROWS].reshape(-1)
        held = held[held > _NUMBER]
        other = bucket
        if len(held) + coming > _WORTH_SPLITTING:
            entries = np.flatnonzero(self._directory == bucket)
            if len(entries) == 1:
                self._directory, self._depth = np.repeat(self._directory, 2), self._depth + 1
                entries = 2 * entries[0] + np.arange(2)
            other = self._take_bucket()
            self._directory[entries[len(entries) // 2 :]] = other
        self._rows[bucket * _ROWS : (bucket + 1) * _ROWS] = 0
        slots = self._claim(held >> _NUMBER_BITS)
        self._rows.reshape(-1)[slots] = held
        moved = int((slots >= other * _ROWS * _SLOTS).sum()) if other != bucket else 0
        self._filled[other] = moved
        self._filled[bucket] = len(held) - moved

    def _take_bucket(self) -> int:
        self._buckets += 1
        _grow(self._rows, self._buckets * _ROWS)
        _grow(self._filled, self._buckets)
        return self._buckets - 1

    def _take_pages(self, count: int) -> Pages:
        new = max(0, count - len(self._free))
        if self._pages + new > _MOST_PAGES:
            raise CapacityError(
                f"the span index holds all of the {_MOST_PAGES * _PAGE} anchors that it can; remove donors first"
            )
        free = len(self._free) - (count - new)
        taken = self._free[free:] + list(range(self._pages, self._pages + new))
        del self._free[free:]
        self._pages += new
        _grow(self._donors, self._pages)
        for array in (self._positions, self._older, self._newer):
            _grow(array, self._pages * _PAGE)
        return np.array(taken, dtype=np.int32)


def _shortened(keys: Keys) -> Keys:
    """The bits of each key that a slot holds; never 0."""
    shortened: Keys = keys >> _NUMBER_BITS | np.uint64(1)
    return shortened


def _next_rows(rows: Integers, keys: Keys) -> Integers:
    """The next row of the same bucket for keys whose row is full. Different steps keep full rows from clustering."""
    steps = keys.view(np.int64) >> 9 | 1
    return rows & -_ROWS | rows + steps & _ROWS - 1


def _places_of(pages: Pages, count: int) -> Integers:
    return (pages[:, None].astype(np.int64) * _PAGE + np.arange(_PAGE)).reshape(-1)[:count]


def _grow(array: npt.NDArray[np.generic], count: int) -> None:
    """Makes `array` at least `count` long. The C library remaps the pages of large arrays instead of copying them."""
    if len(array) < count:
        spare = min(count // 2, _GROWTH_BYTES * len(array) // array.nbytes)
        array.resize((count + spare, *array.shape[1:]), refcheck=False)
