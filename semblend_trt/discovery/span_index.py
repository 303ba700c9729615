"""Index of donors' tokens: finds the runs that a prompt shares, token for token, with donors of its namespace.

Anchors (fingerprint.py) nominate places; only a comparison of tokens makes a run."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from semblend_trt.background import Background
from semblend_trt.compiled import compiled
from semblend_trt.discovery.fingerprint import (
    GRAM_TOKENS,
    GUARANTEED_RUN,
    Fingerprints,
    as_token_array,
    equal_around,
    fingerprint,
    read_only,
)
from semblend_trt.discovery.fingerprint import warm_up as warm_up_fingerprints
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.discovery.fingerprint import Positions, TokenArray

logger = logging.getLogger(__name__)

Keys = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]

_FEW_NOMINATIONS = 64  # of more, the best one of each anchor comes first

# A slot is a word: 36 bits of a key, the last of them set, then 28 bits with the number of the key's newest place.
# A free slot is 0, or _EMPTIED after a key was removed.
_NUMBER_BITS, _ONE = np.uint64(28), np.uint64(1)
_NUMBER, _FREE, _EMPTIED = np.uint64((1 << 28) - 1), np.uint64(0), np.uint64(1)
_SLOTS, _HOME_BITS = 2048, np.uint64(36 - 11)  # of a bucket; a key's first 11 bits are its home there
# With more words, searches for missing keys take more steps.
_MOST_FILLED = _SLOTS * 6 // 10
# A full bucket with fewer keys only drops its emptied slots, without a split.
_WORTH_SPLITTING = _MOST_FILLED * 7 // 10
_PAGE = 16  # places are given to donors in pages
_MOST_PAGES = (1 << 28) // _PAGE
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


class _Arrays(NamedTuple):
    """What compiled code works on: the buckets' `words`, how many of a bucket's are `filled`, and the `directory`.

    Of each place: its position in the donor, and the next older and newer place of its key. Place 0, for none, is never
    read. Of each page: its donor's number."""

    directory: Integers
    filled: Integers
    words: Keys
    positions: Pages
    older: Pages
    newer: Pages
    donors: Pages


class AnchorTable:
    """Map each anchor's key to its newest place in donors, which links to older ones. Not thread safe.

    The hash table uses extendible hashing (Fagin et al., TODS 1979). A key's last bits select an entry of the
    directory, which names a bucket. A full bucket splits in two; the directory doubles when it must. So a change moves
    only the buckets that it fills. Keys are uint64 with all bits random."""

    def __init__(self) -> None:
        directory, filled = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        positions, older, newer = (np.zeros(_PAGE, dtype=np.int32) for _ in range(3))
        words, donors = np.zeros(_SLOTS, dtype=np.uint64), np.zeros(1, dtype=np.int32)
        self.arrays = _Arrays(directory, filled, words, positions, older, newer, donors)
        self._buckets = self._pages = 1
        self._free: list[int] = []

    def add(self, donor: int, keys: Keys, positions: Integers) -> Pages:
        """Enter keys [n] of a donor (a number below 2**31) at `positions` (int64 [n], below 2**31).

        Returns the pages of its places, for `remove`. Raises CapacityError."""
        pages = self._take_pages(-(-len(keys) // _PAGE))
        self.arrays.donors[pages] = donor
        entered, full = _enter(self.arrays, keys, positions, pages, 0)
        while entered < len(keys):
            self._make_room(full)
            entered, full = _enter(self.arrays, keys, positions, pages, entered)
        return pages

    def remove(self, pages: Pages, keys: Keys) -> None:
        """Remove the places in the pages that `add` returned for `keys`."""
        _leave(self.arrays, keys, pages)
        self._free += pages.tolist()

    def find(self, keys: Keys, most: int, limit: int) -> tuple[Integers, Integers, Integers, Integers]:
        """Return at most `most` places of a key and `limit` in all, the newest of all keys first.

        These are indices into `keys`, donor numbers, and positions in the donors, int64 [places] each. Last come the
        indices of keys that have further, older places."""
        return _find(self.arrays, keys, most, limit)

    def _make_room(self, bucket: int) -> None:
        """Rebuild a bucket without its emptied slots, as two buckets when it has many keys."""
        arrays = self.arrays
        words = arrays.words[bucket * _SLOTS : (bucket + 1) * _SLOTS]
        held = words[words > _NUMBER]
        words[:], arrays.filled[bucket] = 0, 0
        if len(held) > _WORTH_SPLITTING:
            directory = arrays.directory
            entries = np.flatnonzero(directory == bucket)
            if len(entries) == 1:
                directory, entries = np.tile(directory, 2), entries[0] + np.array([0, len(directory)])
            directory[entries[1::2]] = self._buckets
            self._buckets += 1
            _grow(arrays.words, self._buckets * _SLOTS)
            _grow(arrays.filled, self._buckets)
            self.arrays = arrays = arrays._replace(directory=directory)
        _refill(arrays, held)

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
        _grow(self.arrays.donors, self._pages)
        for array in (self.arrays.positions, self.arrays.older, self.arrays.newer):
            _grow(array, self._pages * _PAGE)
        return np.array(taken, dtype=np.int32)


@cache
def warm_up() -> None:
    """Compile all code of look-ups, or load it from disk, so that none waits for that."""
    warm_up_fingerprints()
    table, keys = AnchorTable(), np.ones(1, dtype=np.uint64)
    pages = table.add(1, keys, np.zeros(1, dtype=np.int64))
    _refill(table.arrays, keys[:0])
    table.find(keys, 1, 1)
    table.remove(pages, keys)


@compiled
def _shortened(key: np.uint64) -> np.uint64:
    """Return the bits of a key that a slot holds; never 0."""
    shortened: np.uint64 = key >> _NUMBER_BITS | _ONE
    return shortened


@compiled
def _slot_of(arrays: _Arrays, key: np.uint64) -> np.int64:
    """Return the slot of a shortened key, or the free slot where linear probing ends."""
    first = arrays.directory[key >> _ONE & np.uint64(len(arrays.directory) - 1)] * _SLOTS
    at = key >> _HOME_BITS
    while True:
        slot: np.int64 = first + np.int64(at)
        word = arrays.words[slot]
        if word == _FREE or word >> _NUMBER_BITS == key:
            return slot
        at = at + _ONE & np.uint64(_SLOTS - 1)


@compiled
def _enter(arrays: _Arrays, keys: Keys, positions: Integers, pages: Pages, first: int) -> tuple[int, int]:
    """Enter the keys from index `first` on. Return the index of one for which its bucket has no room, and the bucket.
    After the last key, return their number."""
    for index in range(first, len(keys)):
        key, place = _shortened(keys[index]), pages[index // _PAGE] * _PAGE + index % _PAGE
        slot = _slot_of(arrays, key)
        word = arrays.words[slot]
        if word == _FREE:
            if arrays.filled[slot // _SLOTS] == _MOST_FILLED:
                return index, slot // _SLOTS
            arrays.filled[slot // _SLOTS] += 1
        before = np.int64(word & _NUMBER)
        arrays.positions[place], arrays.older[place], arrays.newer[place] = positions[index], before, 0
        arrays.newer[before] = place
        arrays.words[slot] = key << _NUMBER_BITS | np.uint64(place)
    return len(keys), 0


@compiled
def _leave(arrays: _Arrays, keys: Keys, pages: Pages) -> None:
    """Unlink the places of the keys, and empty the slots of keys without another place."""
    for index in range(len(keys)):
        place = pages[index // _PAGE] * _PAGE + index % _PAGE
        older, newer = arrays.older[place], arrays.newer[place]
        arrays.newer[older] = newer
        if newer:
            arrays.older[newer] = older
        else:
            key = _shortened(keys[index])
            arrays.words[_slot_of(arrays, key)] = key << _NUMBER_BITS | np.uint64(older) if older else _EMPTIED


@compiled
def _refill(arrays: _Arrays, words: Keys) -> None:
    """Enter words of different keys, for which there is room."""
    for word in words:
        slot = _slot_of(arrays, word >> _NUMBER_BITS)
        arrays.words[slot] = word
        arrays.filled[slot // _SLOTS] += 1


@compiled
def _find(arrays: _Arrays, keys: Keys, most: int, limit: int) -> tuple[Integers, Integers, Integers, Integers]:
    """Do as AnchorTable.find says: in each round, every key that has another place gives its next older one."""
    which, places = np.empty(len(keys), dtype=np.int64), np.empty(len(keys), dtype=np.int64)
    found = np.empty((3, min(min(most, len(arrays.positions)) * len(keys), limit)), dtype=np.int64)
    waiting = count = rounds = 0
    for index in range(len(keys)):
        place = np.int64(arrays.words[_slot_of(arrays, _shortened(keys[index]))] & _NUMBER)
        if place:
            which[waiting], places[waiting] = index, place
            waiting += 1
    while waiting and count < limit and rounds < most:
        left = 0
        for index in range(waiting):
            place = places[index]
            if count < limit:
                found[0, count] = which[index]
                found[1, count], found[2, count] = arrays.donors[place // _PAGE], arrays.positions[place]
                count += 1
                place = np.int64(arrays.older[place])
            if place:
                which[left], places[left] = which[index], place
                left += 1
        waiting, rounds = left, rounds + 1
    return found[0, :count], found[1, :count], found[2, :count], which[:waiting]


def _grow(array: npt.NDArray[np.generic], count: int) -> None:
    """Make `array` at least `count` long. The C library remaps the pages of large arrays instead of copying them."""
    if len(array) < count:
        spare = min(count // 2, _GROWTH_BYTES * len(array) // array.nbytes)
        array.resize((count + spare, *array.shape[1:]), refcheck=False)


class SpanIndex:
    """Index donors by their tokens. Thread safe: the lock covers anchors, never comparisons of tokens.

    Changes of anchors wait for a thread of the index, so that no engine's step does, or for the next lookup. Only `add`
    wakes the thread, as the engine waits while that has the interpreter's lock."""

    def __init__(self, bounds: ScanBounds | None = None) -> None:
        """Compile the code, which takes seconds where it is not on disk yet: engines make an index at their start."""
        self._bounds = bounds or ScanBounds()
        self._lock = threading.Lock()
        self._table = AnchorTable()
        self._donors: dict[str, _Donor] = {}
        self._by_number: dict[int, _Donor] = {}
        self._numbers = count(1)
        self._secret = secrets.token_bytes(32)
        self._changes = threading.Lock()  # changes run in the order of their calls
        self._waiting = deque[_Donor]()
        self._background = Background("semblend-index")
        weakref.finalize(self, self._background.close, 0.0)
        warm_up()

    def add(self, namespace_key: str, donor_id: str, tokens: npt.ArrayLike) -> None:
        """Add a donor with these `tokens` (integers [n]; copied). In a full index it is not found.

        Raises ValueError when the id is taken or a token id is bad."""
        held = read_only(as_token_array(tokens).copy())
        with self._changes:
            if donor_id in self._donors:
                raise ValueError(f"donor {donor_id} is already indexed; remove it first")
            donor = _Donor(donor_id, namespace_key, held, next(self._numbers))
            self._donors[donor_id] = self._by_number[donor.number] = donor
            self._waiting.append(donor)
        self._background.submit(self.settle)

    def remove(self, donor_id: str) -> bool:
        """Remove a donor; False when it is not indexed."""
        with self._changes:
            donor = self._donors.pop(donor_id, None)
            if donor is None:
                return False
            del self._by_number[donor.number]
            self._waiting.append(donor)
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
        self.settle()
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
        self.settle()
        with self._changes, self._lock:
            arrays: list[npt.NDArray[Any] | None] = [*self._table.arrays]
            for donor in self._donors.values():
                arrays += [donor.tokens, donor.pages]
            return sum(each.nbytes for each in arrays if each is not None)

    def settle(self) -> None:
        """Do the changes that wait."""
        with self._lock:
            while self._waiting:
                self._update(self._waiting.popleft())

    def __contains__(self, donor_id: object) -> bool:
        return donor_id in self._donors

    def _update(self, donor: _Donor) -> None:
        """Enter the anchors of a donor that is held; take out those of one that was removed."""
        is_held, pages = donor.number in self._by_number, donor.pages
        if is_held == (pages is not None):
            return
        anchors = fingerprint(donor.tokens, self._bounds.max_repeats)
        keys = self._keys(donor.namespace_key, anchors)
        if pages is not None:
            self._table.remove(pages, keys)
            return
        try:
            donor.pages = self._table.add(donor.number, keys, anchors.positions)
        except CapacityError as error:
            logger.warning("donor %s is not found by look-ups: %s", donor.donor_id, error)

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
        self._prompt, self._shortest, self._is_over = read_only(prompt), shortest, is_over
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
        prompt, held, at = self._prompt, donor.tokens, 0
        most_extensions, most_compared = self._most
        while at < len(targets):
            if self.extensions == most_extensions or self.compared > most_compared:
                return False
            if self.extensions % 8 == 0 and self._is_over():  # a clock costs a tenth of a comparison
                return False
            target = targets[at]
            place = target + shift
            ahead, behind = equal_around(held, place, prompt, target)
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
