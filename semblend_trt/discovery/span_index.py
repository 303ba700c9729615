"""Index of donors' tokens: finds the runs that a prompt shares, token for token, with donors of its namespace.

Anchors (fingerprint.py) nominate places; only a comparison of tokens makes a run."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from itertools import count, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from semblend_trt.background import Background
from semblend_trt.discovery.fingerprint import (
    GRAM_TOKENS,
    GUARANTEED_RUN,
    Fingerprints,
    as_token_array,
    equal_tokens,
    fingerprint,
)
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.discovery.fingerprint import Positions, TokenArray

logger = logging.getLogger(__name__)

Keys = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]

_FEW_NOMINATIONS = 64  # of more, the best one of each anchor comes first
_FEWEST_COMPARED, _LIKELY_EQUAL = 64, 2048  # tokens compared at first, at least and at most

# A slot is a word: 36 bits of a key, the last of them set, then 28 bits with the number of the key's newest place.
# A free slot is 0, or _EMPTIED after a key was removed.
_KEY_BITS, _NUMBER_BITS = 36, np.uint64(28)
_NUMBER = np.uint64((1 << 28) - 1)
_EMPTIED = np.uint64(1)
# A bucket's rows are cache lines, filled from the left; a row that does not end in 0 may have overflowed.
_ROWS, _SLOTS = 256, 8
# With more words, searches for missing keys take more steps.
_MOST_FILLED = _ROWS * _SLOTS * 6 // 10
# A full bucket with fewer keys only drops its emptied slots, without a split.
_WORTH_SPLITTING = _MOST_FILLED * 7 // 10
_PAGE_BITS, _PAGE = 4, 16  # places are given to donors in pages
_GONE = -1
_MOST_PAGES = 1 << (28 - _PAGE_BITS)
_GROWTH_BYTES = 1 << 22


class Run(NamedTuple):
    """`length` tokens of `donor_id` from `donor_start` that equal the prompt's from `target_start`."""

    donor_id: str
    donor_start: int
    target_start: int
    length: int

    @property
    def target_end(self) -> int:
        return self.target_start + self.length

    def within(self, begin: int, end: int) -> Run | None:
        """Return the part of the run in prompt positions [begin, end), or None."""
        first, last = max(begin, self.target_start), min(end, self.target_end)
        if first >= last:
            return None
        if last - first == self.length:
            return self
        return Run(self.donor_id, self.donor_start + first - self.target_start, first, last - first)

    def in_chunks(self, chunk: int) -> list[Run]:
        """Cut the run where a chunk ends in donor or prompt; it stays whole where both end at the same tokens."""
        if (self.donor_start - self.target_start) % chunk == 0:
            return [self]
        donor_id, donor_start, target_start, length = self
        ends = (range(chunk - start % chunk, length, chunk) for start in (donor_start, target_start))
        cuts = pairwise(sorted({0, length}.union(*ends)))
        return [Run(donor_id, donor_start + begin, target_start + begin, end - begin) for begin, end in cuts]


@dataclass(frozen=True, slots=True)
class ScanBounds:
    """Bounds on the cost of one lookup.

    `max_repeats`: anchors kept per hash and donor. `max_bucket`: places tried per anchor, the newest first.
    `max_pairs`: places tried in all, the newest of every anchor first. `max_extensions`: places compared by tokens, or
    one for every GUARANTEED_RUN tokens of a longer prompt; the best place of each anchor comes first, by its donor's
    number of anchors at the same distance. `max_alternatives`: places compared before those are passed over whose
    anchors are all in runs, unless their text may be exact. `max_compared`: equal tokens after which no further place
    is compared; the lookup may exceed it by the prompt's tokens and two.

    Below these bounds every run of the wanted length is found, unless it is one repeated token. Above them the found
    runs are right, but some may be missing: see `Scan.hidden_end`."""

    max_repeats: int = 8
    max_bucket: int = 32
    max_pairs: int = 1 << 16
    max_extensions: int = 1024
    max_alternatives: int = 16
    max_compared: int = 1 << 22


@dataclass(slots=True)
class _Donor:
    """`pages` of its anchors' places; None until these are entered."""

    donor_id: str
    namespace_key: str
    tokens: TokenArray
    number: int
    pages: Pages | None = None


# The donor, the shift from prompt to donor positions, and the anchors' positions in the prompt.
_Nomination: TypeAlias = "tuple[_Donor, int, Positions]"


class AnchorTable:
    """Map each anchor's key to its newest place in donors, which links to older ones. Not thread safe.

    The hash table uses extendible hashing (Fagin et al., TODS 1979). A key's leading bits select one of 2**depth
    directory entries, which number buckets. A full bucket splits in two; the directory doubles when it must. So a
    change moves only the buckets that it fills. Every step handles all keys of a prompt or donor at once. Keys are
    uint64 with all bits random."""

    def __init__(self) -> None:
        self._depth = 0
        self._directory: Integers = np.zeros(1, dtype=np.int64)
        self._buckets = 1
        self._rows: Keys = np.zeros((_ROWS, _SLOTS), dtype=np.uint64)
        self._filled: Integers = np.zeros(1, dtype=np.int64)
        # Of each place: position in the donor, next older and newer place of its key. Place 0, for none, is never read.
        self._positions, self._older, self._newer = (np.zeros(_PAGE, dtype=np.int32) for _ in range(3))
        self._donors: Pages = np.zeros(1, dtype=np.int32)
        self._pages = 1
        self._free: list[int] = []

    def add(self, donor: int, keys: Keys, positions: Integers) -> Pages:
        """Enter keys [n] of a donor (a number below 2**31) at `positions` (int64 [n], below 2**31).

        Returns the pages of its places, for `remove`. Raises CapacityError."""
        pages = self._take_pages(-(-len(keys) // _PAGE))
        places = _places_of(pages, len(keys))
        self._donors[pages] = donor
        self._positions[places] = positions
        keys = _shortened(keys)
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        again = np.flatnonzero(keys[1:] == keys[:-1])  # the later place of a key is the newer one
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
        """Remove the places in the pages that `add` returned for `keys`."""
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
        """Return at most `most` places of a key and `limit` in all, the newest of all keys first.

        These are indices into `keys`, donor numbers, and positions in the donors, int64 [places] each. Last come the
        indices of keys that have further, older places."""
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
        """Return indices of the `keys` in the table, and their slots: int64 [found] each."""
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
        """Return the slots of the different `keys`, int64 [n], and enter missing ones."""
        while True:
            which, found = self._find(keys)
            missing = np.ones(len(keys), dtype=np.bool_)
            missing[which] = False
            buckets, coming = np.unique(self._home_rows(keys[missing]) // _ROWS, return_counts=True)
            filled = self._filled[buckets] + coming
            crowded = np.flatnonzero(filled > _MOST_FILLED)
            if not len(crowded):
                break
            for bucket, more in zip(buckets[crowded].tolist(), coming[crowded].tolist(), strict=True):
                self._rebuild(bucket, more)  # words have moved; room may still be missing
        self._filled[buckets] = filled
        slots = np.empty(len(keys), dtype=np.int64)
        slots[which] = found
        slots[missing] = self._claim(keys[missing])
        return slots

    def _claim(self, keys: Keys) -> Integers:
        """Enter different, missing `keys`, for which there is room, and return their slots."""
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

    def _rebuild(self, bucket: int, coming: int) -> None:
        """Rebuild a bucket without its emptied slots, as two buckets when it has many keys."""
        rows = slice(bucket * _ROWS, (bucket + 1) * _ROWS)
        held = self._rows[rows]
        held = held[held > _NUMBER]
        other = bucket
        if len(held) + coming > _WORTH_SPLITTING:
            entries = np.flatnonzero(self._directory == bucket)
            if len(entries) == 1:
                self._directory, self._depth = np.repeat(self._directory, 2), self._depth + 1
                entries = 2 * entries[0] + np.arange(2)
            other, self._buckets = self._buckets, self._buckets + 1
            _grow(self._rows, self._buckets * _ROWS)
            _grow(self._filled, self._buckets)
            self._directory[entries[len(entries) // 2 :]] = other
        self._rows[rows] = 0
        slots = self._claim(held >> _NUMBER_BITS)
        self._rows.reshape(-1)[slots] = held
        moved = int((slots >= other * _ROWS * _SLOTS).sum()) if other != bucket else 0
        self._filled[other] = moved
        self._filled[bucket] = len(held) - moved

    def _take_pages(self, count: int) -> Pages:
        new = max(0, count - len(self._free))
        if self._pages + new > _MOST_PAGES:
            raise CapacityError(
                f"the span index holds all of the {_MOST_PAGES * _PAGE} anchors that it can; remove donors first"
            )
        free = len(self._free) - (count - new)
        taken = [*self._free[free:], *range(self._pages, self._pages + new)]
        del self._free[free:]
        self._pages += new
        _grow(self._donors, self._pages)
        for array in (self._positions, self._older, self._newer):
            _grow(array, self._pages * _PAGE)
        return np.array(taken, dtype=np.int32)


def _shortened(keys: Keys) -> Keys:
    """Return the bits of each key that a slot holds; never 0."""
    shortened: Keys = keys >> _NUMBER_BITS | np.uint64(1)
    return shortened


def _next_rows(rows: Integers, keys: Keys) -> Integers:
    """Return the bucket's next row for keys whose row is full. Different steps keep full rows from clustering."""
    steps = keys.view(np.int64) >> 9 | 1
    return rows & -_ROWS | rows + steps & _ROWS - 1


def _places_of(pages: Pages, count: int) -> Integers:
    return (pages[:, None].astype(np.int64) * _PAGE + np.arange(_PAGE)).reshape(-1)[:count]


def _grow(array: npt.NDArray[np.generic], count: int) -> None:
    """Make `array` at least `count` long. The C library remaps the pages of large arrays instead of copying them."""
    if len(array) < count:
        spare = min(count // 2, _GROWTH_BYTES * len(array) // array.nbytes)
        array.resize((count + spare, *array.shape[1:]), refcheck=False)


class SpanIndex:
    """Index donors by their tokens. Thread safe: the lock covers anchors, never comparisons of tokens.

    One thread of the index enters and removes anchors, donor by donor: that takes a millisecond, for which an engine's
    step would otherwise wait. A lookup waits for the changes under way."""

    def __init__(self, bounds: ScanBounds | None = None) -> None:
        self._bounds = bounds or ScanBounds()
        self._lock = threading.Lock()
        self._table = AnchorTable()
        self._donors: dict[str, _Donor] = {}
        self._by_number: dict[int, _Donor] = {}
        self._numbers = count(1)
        self._secret = secrets.token_bytes(32)
        self._changes = threading.Lock()  # changes run in the order of their calls
        self._background = Background("semblend-index")
        weakref.finalize(self, self._background.close, 0.0)
        self._last_change = threading.Event()
        self._last_change.set()

    def add(self, namespace_key: str, donor_id: str, tokens: npt.ArrayLike) -> None:
        """Add a donor with these `tokens` (integers [n]; copied). In a full index it is not found.

        Raises ValueError when the id is taken or a token id is bad."""
        held = as_token_array(tokens).copy()
        with self._changes:
            if donor_id in self._donors:
                raise ValueError(f"donor {donor_id} is already indexed; remove it first")
            donor = _Donor(donor_id, namespace_key, held, next(self._numbers))
            self._donors[donor_id] = self._by_number[donor.number] = donor
            self._begin(self._enter, donor)

    def remove(self, donor_id: str) -> bool:
        """Remove a donor; False when it is not indexed."""
        with self._changes:
            donor = self._donors.pop(donor_id, None)
            if donor is None:
                return False
            del self._by_number[donor.number]
            self._begin(self._take_out, donor)
        return True

    def find(
        self,
        namespace_key: str,
        tokens: npt.ArrayLike,
        shortest: int = GUARANTEED_RUN,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Scan:
        """Find the maximal runs of at least `shortest` tokens that `tokens` shares with the namespace's donors.

        A run is maximal when the tokens around it differ. A `shortest` below GUARANTEED_RUN counts as that; a larger
        one makes the lookup quicker. Runs are sorted by prompt position, then the longest first. Donors of other
        namespaces are never compared. Once `is_over`, no further place is compared. Raises ValueError for bad token
        ids."""
        prompt, shortest = as_token_array(tokens), max(shortest, GUARANTEED_RUN)
        scan = Scan(prompt, shortest, self._bounds, is_over)
        if not self._donors:
            return scan
        anchors = fingerprint(prompt, len(prompt), shortest)
        self.wait()
        is_surplus = anchors.surplus(self._bounds.max_repeats)
        repeats = is_surplus.any()
        scan.compare(self._nominate(namespace_key, anchors.only(~is_surplus) if repeats else anchors, scan))
        if repeats:
            # Runs cover text that repeats itself; what is left holds a donor's text many times.
            again = is_surplus & _are_outside(anchors.positions, scan.runs)
            scan.compare(self._nominate(namespace_key, anchors.only(again), scan))
        return scan

    def used_bytes(self) -> int:
        """Return the bytes of tokens and anchors, without donor ids and Python objects."""
        self.wait()
        with self._changes, self._lock:
            arrays = [*vars(self._table).values()]
            for donor in self._donors.values():
                arrays += [donor.tokens, donor.pages]
            return sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))

    def wait(self) -> None:
        """Wait until the changes under way are done."""
        self._last_change.wait()

    def __contains__(self, donor_id: object) -> bool:
        return donor_id in self._donors

    def _begin(self, change: Callable[[_Donor], None], donor: _Donor) -> None:
        self._last_change = threading.Event()
        self._background.submit(partial(change, donor))
        self._background.submit(self._last_change.set)

    def _enter(self, donor: _Donor) -> None:
        anchors = fingerprint(donor.tokens, self._bounds.max_repeats)
        with self._lock:
            try:
                donor.pages = self._table.add(donor.number, self._keys(donor.namespace_key, anchors), anchors.positions)
            except CapacityError as error:
                logger.warning("donor %s is not found by look-ups: %s", donor.donor_id, error)

    def _take_out(self, donor: _Donor) -> None:
        anchors = fingerprint(donor.tokens, self._bounds.max_repeats)
        with self._lock:
            if donor.pages is not None:
                self._table.remove(donor.pages, self._keys(donor.namespace_key, anchors))

    def _keys(self, namespace_key: str, anchors: Fingerprints) -> Keys:
        """Return hashes times an odd, secret factor of the namespace, so that no text can be chosen to give equal keys.

        Dietzfelbinger et al., "A Reliable Randomized Algorithm for the Closest-Pair Problem", J. Algorithms 1997."""
        factor = blake2b(namespace_key.encode(), digest_size=8, key=self._secret).digest()
        keys: Keys = anchors.hashes * np.uint64(int.from_bytes(factor, "little") | 1)
        return keys

    def _nominate(self, namespace_key: str, anchors: Fingerprints, scan: Scan) -> list[_Nomination]:
        """Return where the namespace's donors hold a prompt's `anchors`, those with most anchors first."""
        bounds = self._bounds
        with self._lock:
            keys, limit = self._keys(namespace_key, anchors), bounds.max_pairs - scan.places
            which, numbers, places, unread = self._table.find(keys, bounds.max_bucket, limit)
            scan.places += len(which)
            scan.unread.append(anchors.positions[unread])
            if not len(which):
                return []
            targets = anchors.positions[which]
            diagonals = (numbers << 32) + (places - targets)  # by donor, and by the shift from prompt to donor
            order = np.argsort(diagonals, kind="stable")
            diagonals = diagonals[order]
            edges = np.flatnonzero(diagonals[1:] != diagonals[:-1]) + 1
            begins, ends = np.append(0, edges), np.append(edges, len(order))
            ranked = np.argsort(begins - ends, kind="stable")
            if len(ranked) > _FEW_NOMINATIONS:  # each anchor's best one is kept, and others up to the bound
                ranked, best = _best_first(ranked, which[order], ends - begins)
                ranked = ranked[: max(best, bounds.max_extensions)]
                is_left = np.isin(np.arange(len(begins)), ranked, invert=True)
                scan.left.append(targets[order[np.repeat(is_left, ends - begins)]])
            nominations, firsts, targets = [], order[begins[ranked]], targets[order]
            shifts = (places[firsts] - anchors.positions[which[firsts]]).tolist()
            bounds_of = zip(begins[ranked].tolist(), ends[ranked].tolist(), strict=True)
            for number, shift, (begin, end) in zip(numbers[firsts].tolist(), shifts, bounds_of, strict=True):
                donor = self._by_number.get(number)
                # Another namespace's anchor may have the same key.
                if donor is not None and donor.namespace_key == namespace_key:
                    nominations.append((donor, shift, targets[begin:end]))
            return nominations


class Scan:
    """Find the `runs` of one prompt, and count the cost.

    `places` were read, and `extensions` of them compared. `compared` counts equal tokens, plus one for each end of a
    comparison. `left` are positions of anchors with a nominated place that was not compared; `unread`, of those with
    older places."""

    def __init__(self, prompt: TokenArray, shortest: int, bounds: ScanBounds, is_over: Callable[[], bool]) -> None:
        self._prompt, self._backwards, self._shortest, self._is_over = prompt, prompt[::-1], shortest, is_over
        self._alternatives = bounds.max_alternatives
        self._most = max(bounds.max_extensions, len(prompt) // GUARANTEED_RUN), bounds.max_compared
        self.runs: list[Run] = []
        self._is_held = np.zeros(len(prompt), dtype=np.bool_)  # prompt positions in runs
        self.left: list[Positions] = []
        self.unread: list[Positions] = []
        self.places = self.extensions = self.compared = 0

    def compare(self, nominations: list[_Nomination]) -> None:
        """Add the runs at the nominated places until a bound is reached; sort the runs."""
        while nominations:
            for number, (donor, shift, targets) in enumerate(nominations[: self._alternatives]):
                if not self._follow(donor, shift, sorted(targets.tolist())):
                    self.left += [targets for *_, targets in nominations[number:]]
                    nominations = []
                    break
            nominations = self._of_other_text(rest) if (rest := nominations[self._alternatives :]) else []
        self.runs.sort(key=lambda run: (run.target_start, -run.length, run.donor_id, run.donor_start))

    def _of_other_text(self, nominations: list[_Nomination]) -> list[_Nomination]:
        """Return those with an anchor outside all runs, and those at shift 0, where a run may be exact."""
        anchors = [targets for *_, targets in nominations]
        begins = np.cumsum([0, *map(len, anchors[:-1])])
        are_held = np.logical_and.reduceat(self._is_held[np.concatenate(anchors)], begins)
        return [each for each, is_held in zip(nominations, are_held.tolist(), strict=True) if not (is_held and each[1])]

    @cached_property
    def hidden_end(self) -> int:
        """Return the end of the last anchor outside all runs that has an uncompared place; 0 without one.

        Places beyond `max_bucket` or `max_pairs` count only where such anchors follow each other for a wanted run's
        length: phrases that many donors hold are shorter."""
        end = 0
        for positions, shortest in ((self.left, GRAM_TOKENS), (self.unread, self._shortest)):
            if not any(map(len, positions)):
                continue
            anchors = np.concatenate(positions)
            outside = np.unique(anchors[_are_outside(anchors, self.runs)])
            if len(outside):
                parts = np.split(outside, np.flatnonzero(np.diff(outside) > self._shortest) + 1)
                ends = [int(part[-1]) + GRAM_TOKENS for part in parts if np.ptp(part) + GRAM_TOKENS >= shortest]
                end = max(end, *ends[-1:], 0)
        return end

    def _follow(self, donor: _Donor, shift: int, targets: list[int]) -> bool:
        """Add the runs of one donor and shift that hold one of `targets`; False when a bound stops it."""
        prompt, held, held_backwards, at = self._prompt, donor.tokens, donor.tokens[::-1], 0
        most_extensions, most_compared = self._most
        while at < len(targets):
            if self.extensions == most_extensions or self.compared > most_compared:
                return False
            if self.extensions % 8 == 0 and self._is_over():  # a clock costs a tenth of a comparison
                return False
            target = targets[at]
            place = target + shift
            likely = min(targets[-1] - target + _FEWEST_COMPARED, _LIKELY_EQUAL)
            ahead, behind = equal_tokens(held[place:], prompt[target:], likely), 0
            if ahead:  # else another gram has the anchor's key
                before = held_backwards[len(held) - place :], self._backwards[len(prompt) - target :]
                behind = equal_tokens(*before, _FEWEST_COMPARED)
            self.extensions, self.compared = self.extensions + 1, self.compared + ahead + behind + 2
            if ahead + behind >= self._shortest:
                self.runs.append(Run(donor.donor_id, place - behind, target - behind, ahead + behind))
                self._is_held[target - behind : target + ahead] = True
            at = bisect_left(targets, target + max(ahead, 1))
        return True


def _best_first(ranked: Positions, which: Positions, sizes: Positions) -> tuple[Positions, int]:
    """Return the `ranked` nominations with every anchor's first one in front, and the number of these."""
    ranks = np.empty_like(ranked)
    ranks[ranked] = np.arange(len(ranked))
    best = np.full(int(which.max()) + 1, len(ranked))
    np.minimum.at(best, which, np.repeat(ranks, sizes))
    is_best = np.zeros(len(ranked) + 1, dtype=np.bool_)
    is_best[best] = True
    front = ranked[is_best[:-1]]
    return np.concatenate([front, ranked[~is_best[:-1]]]), len(front)


def _are_outside(positions: Positions, runs: list[Run]) -> npt.NDArray[np.bool_]:
    """Return which prompt positions lie in none of the `runs` (sorted by prompt position)."""
    starts, ends = (np.array([0, *(each[2] + part * each[3] for each in runs)]) for part in (0, 1))
    reached = np.maximum.accumulate(ends)[np.searchsorted(starts, positions, "right") - 1]
    outside: npt.NDArray[np.bool_] = positions >= reached
    return outside
