"""Index of donors' tokens: where else, in the same namespace, does a part of this prompt stand word for word?

Anchors (fingerprint.py) nominate places; only a comparison token by token makes a run of them.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.fingerprint import (
    GUARANTEED_RUN,
    Fingerprints,
    GramHash,
    TokenArray,
    as_token_array,
    fingerprint,
    gram_hashes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1
# Added to a shift (donor position minus prompt position), which then is positive and fits below the serial number.
_SHIFT_OFFSET = 1 << 31
_FIRST_STEP, _STEP_GROWTH = 256, 4


@dataclass(frozen=True, slots=True)
class Run:
    """`length` tokens of `donor_id` from `donor_start` that equal the prompt's from `target_start`."""

    donor_id: str
    donor_start: int
    target_start: int
    length: int

    @property
    def target_end(self) -> int:
        return self.target_start + self.length

    def within(self, begin: int, end: int) -> Run | None:
        """The part of the run inside prompt positions [begin, end), None when there is none."""
        first, last = max(begin, self.target_start), min(end, self.target_end)
        if first >= last:
            return None
        return Run(self.donor_id, self.donor_start + first - self.target_start, first, last - first)


@dataclass(frozen=True, slots=True)
class ScanBounds:
    """What one lookup may cost at most; anchors that fewer donors share are tried first.

    `max_repeats`: anchors of one hash kept of one sequence. `max_bucket`: newest donor places tried of one anchor.
    `max_pairs`: places tried in all. `max_extensions`: places compared token by token. Below all four, every run of
    GUARANTEED_RUN tokens that are not all equal is found; above them, what is found is still right.
    """

    max_repeats: int = 8
    max_bucket: int = 32
    max_pairs: int = 1 << 16
    max_extensions: int = 512


@dataclass(frozen=True, slots=True)
class _Donor:
    donor_id: str
    namespace_key: str
    serial: int
    tokens: TokenArray


@dataclass(slots=True)
class _Shelf:
    """One namespace. A bucket holds `serial << 32 | position` in ascending order: serials only grow."""

    donors: dict[int, _Donor] = field(default_factory=dict)
    buckets: dict[int, array[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Nominated places, sorted by donor, shift and prompt position: `groups` int64 [n], `targets` int64 [n]."""

    groups: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]


class SpanIndex:
    """Donors by the text they hold. One writer and any number of readers may use it at once.

    `hash_grams` replaces the gram hash, for tests that force collisions; answers stay right whatever it returns.
    """

    def __init__(self, bounds: ScanBounds | None = None, hash_grams: GramHash = gram_hashes) -> None:
        self._bounds = bounds or ScanBounds()
        self._hash_grams = hash_grams
        self._lock = threading.Lock()
        self._shelves: dict[str, _Shelf] = {}
        self._donors: dict[str, _Donor] = {}
        self._next_serial = 0

    def add(self, namespace_key: str, donor_id: str, tokens: npt.ArrayLike) -> None:
        """Makes `tokens` (integers [n]; copied) findable as `donor_id`; raises ValueError when the id is taken."""
        held = as_token_array(tokens).copy()
        anchors = self._anchors(held)
        with self._lock:
            if donor_id in self._donors:
                raise ValueError(f"donor {donor_id} is already indexed; remove it first")
            donor = _Donor(donor_id, namespace_key, self._next_serial, held)
            self._next_serial += 1
            self._donors[donor_id] = donor
            shelf = self._shelves.setdefault(namespace_key, _Shelf())
            shelf.donors[donor.serial] = donor
            for gram, posting in _postings(donor, anchors):
                bucket = shelf.buckets.get(gram)
                if bucket is None:
                    shelf.buckets[gram] = array("q", (posting,))
                else:
                    bucket.append(posting)

    def remove(self, donor_id: str) -> bool:
        """Forgets a donor; False when it is not indexed."""
        with self._lock:
            donor = self._donors.get(donor_id)
        if donor is None:
            return False
        anchors = self._anchors(donor.tokens)
        with self._lock:
            if self._donors.get(donor_id) is not donor:
                return False
            del self._donors[donor_id]
            shelf = self._shelves[donor.namespace_key]
            del shelf.donors[donor.serial]
            for gram, posting in _postings(donor, anchors):
                bucket = shelf.buckets[gram]
                del bucket[bisect_left(bucket, posting)]
                if not bucket:
                    del shelf.buckets[gram]
            if not shelf.donors:
                del self._shelves[donor.namespace_key]
        return True

    def find(self, namespace_key: str, tokens: npt.ArrayLike) -> list[Run]:
        """Returns the maximal runs of at least GUARANTEED_RUN tokens that `tokens` shares with the namespace's donors.

        A run is maximal when neither the token before nor the one behind is equal too. Sorted by prompt position, the
        longest first. Donors of other namespaces are neither read nor counted. Raises ValueError for bad token ids.
        """
        prompt = as_token_array(tokens)
        anchors = self._anchors(prompt)
        if not len(anchors):
            return []
        with self._lock:
            shelf = self._shelves.get(namespace_key)
            if shelf is None:
                return []
            pairs = self._nominate(shelf, anchors)
            donors = {serial: shelf.donors[serial] for serial in np.unique(pairs.groups >> _POSITION_BITS).tolist()}
        runs = self._verify(pairs, donors, prompt)
        runs.sort(key=lambda run: (run.target_start, -run.length, run.donor_id, run.donor_start))
        return runs

    def __len__(self) -> int:
        with self._lock:
            return len(self._donors)

    def __contains__(self, donor_id: object) -> bool:
        with self._lock:
            return donor_id in self._donors

    def _anchors(self, tokens: TokenArray) -> Fingerprints:
        return fingerprint(tokens, self._hash_grams).thinned(self._bounds.max_repeats)

    def _nominate(self, shelf: _Shelf, anchors: Fingerprints) -> _Pairs:
        """Pairs every anchor of the prompt with the donor places of the same hash, rare hashes first."""
        limit, buckets = self._bounds.max_bucket, shelf.buckets
        nominated = list(map(buckets.get, anchors.hashes.tolist()))
        known = [index for index, bucket in enumerate(nominated) if bucket is not None]
        found = [bucket if len(bucket) <= limit else bucket[-limit:] for bucket in nominated if bucket is not None]
        places = np.frombuffer(b"".join(found), dtype=np.int64)
        counts = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
        targets = np.repeat(anchors.positions[known], counts)
        if len(places) > self._bounds.max_pairs:
            rare = np.argsort(np.repeat(counts, counts), kind="stable")[: self._bounds.max_pairs]
            places, targets = places[rare], targets[rare]
        shifts = (places & _POSITION_MASK) - targets + _SHIFT_OFFSET
        groups = (places >> _POSITION_BITS << _POSITION_BITS) | shifts
        order = np.lexsort((targets, groups))
        return _Pairs(groups[order], targets[order])

    def _verify(self, pairs: _Pairs, donors: dict[int, _Donor], prompt: TokenArray) -> list[Run]:
        """Extends nominated places both ways; the shifts with most anchors, so the longest runs, come first."""
        if not len(pairs.groups):
            return []
        groups, starts, support = np.unique(pairs.groups, return_index=True, return_counts=True)
        budget = self._bounds.max_extensions
        runs: list[Run] = []
        for index in np.argsort(-support, kind="stable").tolist():
            group, first = int(groups[index]), int(starts[index])
            donor = donors[group >> _POSITION_BITS]
            shift = (group & _POSITION_MASK) - _SHIFT_OFFSET
            covered = -1
            for target in pairs.targets[first : first + int(support[index])].tolist():
                if target < covered:
                    continue
                if not budget:
                    return runs
                budget -= 1
                begin, covered = _extend(donor.tokens, prompt, target, shift)
                # A place whose first token differs (a hash collision) could only repeat the run that ends before it.
                if covered > target and covered - begin >= GUARANTEED_RUN:
                    runs.append(Run(donor.donor_id, begin + shift, begin, covered - begin))
        return runs


def _postings(donor: _Donor, anchors: Fingerprints) -> Iterator[tuple[int, int]]:
    base = donor.serial << _POSITION_BITS
    return zip(anchors.hashes.tolist(), (anchors.positions + base).tolist(), strict=True)


def _extend(donor: TokenArray, prompt: TokenArray, target: int, shift: int) -> tuple[int, int]:
    """Prompt positions [begin, end) around `target` whose tokens equal the donor's, `shift` positions further on."""
    place = target + shift
    end = target + _equal_tokens(donor[place:], prompt[target:])
    begin = target - _equal_tokens(donor[:place][::-1], prompt[:target][::-1])
    return begin, end


def _equal_tokens(left: TokenArray, right: TokenArray) -> int:
    """Number of leading tokens that are equal, compared in growing steps so that short runs stay cheap."""
    limit = min(len(left), len(right))
    done, step = 0, _FIRST_STEP
    while done < limit:
        stop = min(done + step, limit)
        differs = left[done:stop] != right[done:stop]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done, step = stop, step * _STEP_GROWTH
    return limit
