"""Index of donors' tokens: finds the runs of a prompt that donors of the same namespace hold token for token.

Anchors (fingerprint.py) nominate places; only a comparison of tokens makes a run.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from semblend_trt.background import Background
from semblend_trt.discovery.anchor_table import AnchorTable
from semblend_trt.discovery.fingerprint import GRAM_TOKENS, GUARANTEED_RUN, Fingerprints, as_token_array, fingerprint
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from semblend_trt.discovery.anchor_table import Keys, Pages
    from semblend_trt.discovery.fingerprint import HashArray, Positions, TokenArray

logger = logging.getLogger(__name__)

_ALL_BITS = (1 << 64) - 1
# A diagonal is a donor's number << 32 plus the distance from a position in the prompt to that in the donor.
_DONOR_SHIFT = 32
# To ask a clock takes a tenth of a comparison.
_ASKED_EVERY = 8
# So few nominations are all compared, in any order.
_FEW_NOMINATIONS = 64
# Tokens compared at once: at first at least and at most, and later at most.
_FEWEST_COMPARED, _LIKELY_EQUAL, _MOST_COMPARED = 64, 2048, 1 << 15


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
        """The part of the run inside prompt positions [begin, end), None when there is none."""
        first, last = max(begin, self.target_start), min(end, self.target_end)
        if first >= last:
            return None
        if last - first == self.length:
            return self
        return Run(self.donor_id, self.donor_start + first - self.target_start, first, last - first)

    def in_chunks(self, chunk: int) -> list[Run]:
        """The run cut where a chunk of `chunk` tokens ends in the donor or in the prompt: whole, where both end at the
        same tokens."""
        if (self.donor_start - self.target_start) % chunk == 0:
            return [self]
        ends = {
            end
            for start in (self.donor_start, self.target_start)
            for end in range(chunk - start % chunk, self.length, chunk)
        }
        cuts = [0, *sorted(ends), self.length]
        return [
            Run(self.donor_id, self.donor_start + begin, self.target_start + begin, end - begin)
            for begin, end in pairwise(cuts)
        ]


@dataclass(frozen=True, slots=True)
class ScanBounds:
    """What one lookup may cost at most.

    `max_repeats`: anchors kept per hash and donor. `max_bucket`: places tried per anchor, the newest first.
    `max_pairs`: places tried in all; the newest of every anchor come before older ones. `max_extensions`: places
    compared by tokens, or one for every GUARANTEED_RUN tokens of a prompt that is longer. Those come first whose donor
    holds most anchors of the prompt at the same distance, and of each anchor the best. `max_compared`: equal tokens
    after which no further place is compared.

    Below these bounds every run of the wanted length is found, unless it is one repeated token. Above them the runs
    found are still right, but some may be missing: `ScanWork.hidden_end` tells.

    So a prompt of n tokens with a anchors costs at most a x max_bucket places read, max(max_extensions,
    n / GUARANTEED_RUN) comparisons, and max_compared + n + 2 equal tokens, however many donors hold its text.
    """

    max_repeats: int = 8
    max_bucket: int = 32
    max_pairs: int = 1 << 16
    max_extensions: int = 1024
    max_compared: int = 1 << 22


@dataclass(frozen=True, slots=True)
class ScanWork:
    """What one lookup cost: the prompt's anchors, the places read for them, the places compared by tokens, and the
    equal tokens, with one more for each end of a comparison.

    `hidden_end` is the end of the last anchor that stands in no run and has a place that was not compared, because of a
    bound or the caller; 0 without one. Places that `max_bucket` or `max_pairs` leave out count where such anchors
    follow each other for a wanted run's length: phrases that many donors hold are shorter.
    """

    anchors: int = 0
    places: int = 0
    extensions: int = 0
    compared: int = 0
    hidden_end: int = 0


@dataclass(slots=True)
class _Namespace:
    """The namespace `key`, of `donors` donors. Its keys are its anchors' hashes times `factor`.

    The factor is odd and random, so that texts cannot be chosen to give equal keys (Dietzfelbinger et al., "A Reliable
    Randomized Algorithm for the Closest-Pair Problem", J. Algorithms 1997).
    """

    key: str
    factor: np.uint64
    donors: int = 0


@dataclass(slots=True)
class _Donor:
    """`pages`: of its anchors' places, None until these are entered."""

    donor_id: str
    space: _Namespace
    tokens: TokenArray
    number: int
    pages: Pages | None = None


# The donor, the shift from positions in the prompt to those in the donor, and the anchors' positions in the prompt.
_Nomination: TypeAlias = "tuple[_Donor, int, Positions]"


class SpanIndex:
    """Donors by their tokens. Thread safe: a lock is held while anchors are entered or looked up, never while tokens
    are compared.

    Anchors are entered and taken out by a thread of the index, one donor after the other, while the caller goes on:
    they take a millisecond, which an engine's step would wait for. A lookup waits for the donor under way.

    `hash_mask` selects the bits of a gram's hash that are used. Tests force collisions with it; results are right with
    any mask.
    """

    def __init__(self, bounds: ScanBounds | None = None, hash_mask: int = _ALL_BITS) -> None:
        self._bounds = bounds or ScanBounds()
        self._mask = np.uint64(hash_mask)
        self._lock = threading.Lock()
        self._table = AnchorTable()
        self._donors: dict[str, _Donor] = {}
        self._by_number: list[_Donor | None] = []
        self._free_numbers: list[int] = []
        self._namespaces: dict[str, _Namespace] = {}
        # One donor is added or removed at a time.
        self._changes = threading.Lock()
        self._background = Background("semblend-index")
        weakref.finalize(self, self._background.close, 0.0)
        self._is_idle = threading.Event()
        self._is_idle.set()

    def add(self, namespace_key: str, donor_id: str, tokens: npt.ArrayLike) -> None:
        """Adds a donor with these `tokens` (integers [n]; copied).

        In a full index it is not found. Raises ValueError when the id is taken or a token id is bad.
        """
        held = as_token_array(tokens).copy()
        with self._changes:
            self.wait()
            if donor_id in self._donors:
                raise ValueError(f"donor {donor_id} is already indexed; remove it first")
            with self._lock:
                space = self._namespaces.get(namespace_key)
                if space is None:
                    space = _Namespace(namespace_key, np.uint64(secrets.randbits(64) | 1))
                    self._namespaces[namespace_key] = space
                space.donors += 1
                if not self._free_numbers:
                    self._free_numbers.append(len(self._by_number))
                    self._by_number.append(None)
                number = self._free_numbers.pop()
                donor = self._donors[donor_id] = self._by_number[number] = _Donor(donor_id, space, held, number)
            self._begin(self._enter, donor)

    def remove(self, donor_id: str) -> bool:
        """Removes a donor; False when it is not indexed."""
        with self._changes:
            self.wait()
            if donor_id not in self._donors:
                return False
            with self._lock:
                donor = self._donors.pop(donor_id)
                self._by_number[donor.number] = None
                donor.space.donors -= 1
                if not donor.space.donors:
                    del self._namespaces[donor.space.key]
            self._begin(self._take_out, donor)
        return True

    def find(self, namespace_key: str, tokens: npt.ArrayLike, shortest: int = GUARANTEED_RUN) -> list[Run]:
        """Returns the maximal runs of at least `shortest` tokens that `tokens` shares with the namespace's donors.

        A run is maximal when the tokens before and after it differ. Runs shorter than GUARANTEED_RUN are never
        returned; a larger `shortest` makes the lookup quicker. Sorted by prompt position, then the longest first.
        Donors of other namespaces are never compared. Raises ValueError for bad token ids.
        """
        return self.find_counting(namespace_key, tokens, shortest)[0]

    def find_counting(
        self,
        namespace_key: str,
        tokens: npt.ArrayLike,
        shortest: int = GUARANTEED_RUN,
        is_over: Callable[[], bool] = lambda: False,
    ) -> tuple[list[Run], ScanWork]:
        """The runs that `find` returns, and the work of the lookup. Once `is_over` no further place is compared."""
        prompt, shortest = as_token_array(tokens), max(shortest, GUARANTEED_RUN)
        if namespace_key not in self._namespaces:
            return [], ScanWork()
        self.wait()
        anchors, search = fingerprint(prompt, len(prompt), shortest), _Search(prompt, shortest, self._bounds, is_over)
        is_surplus = anchors.surplus(self._bounds.max_repeats)
        repeats = is_surplus.any()
        search.compare(self._nominate(namespace_key, anchors.only(~is_surplus) if repeats else anchors, search))
        if repeats:
            # Text that repeats itself lies in runs by now; else a donor's text stands in the prompt many times.
            again = is_surplus & _are_outside(anchors.positions, search.runs)
            search.compare(self._nominate(namespace_key, anchors.only(again), search))
        work = search.places, search.extensions, search.compared, search.hidden_end()
        return search.runs, ScanWork(len(anchors.positions), *work)

    def used_bytes(self) -> int:
        """Memory of tokens and anchors in bytes, without donor ids and Python objects."""
        self.wait()
        with self._lock:
            pages = sum(each.pages.nbytes for each in self._donors.values() if each.pages is not None)
            return self._table.nbytes + pages + sum(each.tokens.nbytes for each in self._donors.values())

    def wait(self) -> None:
        """Waits until the change under way is done."""
        self._is_idle.wait()

    def __len__(self) -> int:
        return len(self._donors)

    def __contains__(self, donor_id: object) -> bool:
        return donor_id in self._donors

    def _begin(self, change: Callable[[_Donor], None], donor: _Donor) -> None:
        self._is_idle.clear()
        self._background.submit(partial(change, donor))
        self._background.submit(self._is_idle.set)

    def _enter(self, donor: _Donor) -> None:
        anchors = fingerprint(donor.tokens, self._bounds.max_repeats)
        with self._lock:
            try:
                keys = self._keys(anchors.hashes, donor.space)
                donor.pages = self._table.add(donor.number, keys, anchors.positions)
            except CapacityError as error:
                logger.warning("donor %s is not found by look-ups: %s", donor.donor_id, error)

    def _take_out(self, donor: _Donor) -> None:
        anchors = fingerprint(donor.tokens, self._bounds.max_repeats)
        with self._lock:
            if donor.pages is not None:
                self._table.remove(donor.pages, self._keys(anchors.hashes, donor.space))
            self._free_numbers.append(donor.number)

    def _keys(self, hashes: HashArray, space: _Namespace) -> Keys:
        keys: Keys = (hashes & self._mask) * space.factor
        return keys

    def _nominate(self, namespace_key: str, anchors: Fingerprints, search: _Search) -> list[_Nomination]:
        """Where the namespace's donors hold `anchors` of a prompt.

        Nominations with most anchors come first; before all others, where there are many, the best one of each anchor,
        and there are no more than these or the bound.
        """
        bounds = self._bounds
        with self._lock:
            space = self._namespaces.get(namespace_key)
            if space is None:
                return []
            keys, limit = self._keys(anchors.hashes, space), bounds.max_pairs - search.places
            which, numbers, places, unread = self._table.find(keys, bounds.max_bucket, limit)
            search.places += len(which)
            search.unread.append(anchors.positions[unread])
            if not len(which):
                return []
            targets = anchors.positions[which]
            diagonals = (numbers << _DONOR_SHIFT) + (places - targets)
            order = np.argsort(diagonals, kind="stable")
            diagonals = diagonals[order]
            edges = np.flatnonzero(diagonals[1:] != diagonals[:-1]) + 1
            begins, ends = np.append(0, edges), np.append(edges, len(order))
            ranked = np.argsort(begins - ends, kind="stable")
            if len(ranked) > _FEW_NOMINATIONS:
                ranked, best = _best_first(ranked, which[order], ends - begins)
                ranked, others = np.split(ranked, [max(best, bounds.max_extensions)])
                search.left += [targets[order[begins[each] : ends[each]]] for each in others.tolist()]
            nominations = []
            for begin, end in zip(begins[ranked].tolist(), ends[ranked].tolist(), strict=True):
                first = order[begin]
                donor = self._by_number[numbers[first]]
                # Another namespace's anchor may have the same key.
                if donor is not None and donor.space is space:
                    nominations.append((donor, int(places[first] - targets[first]), targets[order[begin:end]]))
            return nominations


class _Search:
    """The `runs` of one prompt that are found, and what it took. `left` are positions of anchors of which a nominated
    place was not compared, `unread` of those that have older places."""

    def __init__(self, prompt: TokenArray, shortest: int, bounds: ScanBounds, is_over: Callable[[], bool]) -> None:
        self._prompt, self._backwards, self._shortest, self._is_over = prompt, prompt[::-1], shortest, is_over
        self._most = max(bounds.max_extensions, len(prompt) // GUARANTEED_RUN), bounds.max_compared
        self.runs: list[Run] = []
        self.left: list[Positions] = []
        self.unread: list[Positions] = []
        self.places = self.extensions = self.compared = 0

    def compare(self, nominations: list[_Nomination]) -> None:
        """Adds the runs that the nominated places lie in, until a bound is reached; sorts the runs."""
        for number, (donor, shift, targets) in enumerate(nominations):
            if not self._follow(donor, shift, sorted(targets.tolist())):
                self.left += [targets for *_, targets in nominations[number:]]
                break
        self.runs.sort(key=lambda run: (run.target_start, -run.length, run.donor_id, run.donor_start))

    def hidden_end(self) -> int:
        """As `ScanWork` has it."""
        end = 0
        for positions, shortest in ((self.left, GRAM_TOKENS), (self.unread, self._shortest)):
            if any(map(len, positions)):
                outside = np.concatenate(positions)
                outside = np.unique(outside[_are_outside(outside, self.runs)])
                if not len(outside):
                    continue
                parts = np.split(outside, np.flatnonzero(np.diff(outside) > self._shortest) + 1)
                ends = [int(part[-1]) + GRAM_TOKENS for part in parts if np.ptp(part) + GRAM_TOKENS >= shortest]
                end = max(end, *ends[-1:], 0)
        return end

    def _follow(self, donor: _Donor, shift: int, targets: list[int]) -> bool:
        """Adds the runs of one donor and shift that hold one of `targets`; False where a bound was in the way."""
        prompt, held, held_backwards, at = self._prompt, donor.tokens, donor.tokens[::-1], 0
        most_extensions, most_compared = self._most
        while at < len(targets):
            if self.extensions == most_extensions or self.compared > most_compared:
                return False
            if self.extensions % _ASKED_EVERY == 0 and self._is_over():
                return False
            target = targets[at]
            place = target + shift
            likely = min(targets[-1] - target + _FEWEST_COMPARED, _LIKELY_EQUAL)
            ahead = equal_tokens(held[place:], prompt[target:], likely)
            behind = 0
            if ahead:  # else another gram has the anchor's key
                before = held_backwards[len(held) - place :], self._backwards[len(prompt) - target :]
                behind = equal_tokens(*before, _FEWEST_COMPARED)
            self.extensions, self.compared = self.extensions + 1, self.compared + ahead + behind + 2
            if ahead + behind >= self._shortest:
                self.runs.append(Run(donor.donor_id, place - behind, target - behind, ahead + behind))
            at = bisect_left(targets, target + max(ahead, 1))
        return True


def _best_first(ranked: Positions, which: Positions, sizes: Positions) -> tuple[Positions, int]:
    """`ranked` nominations, of `sizes` places of the anchors `which`, with the first one of every anchor in front; and
    how many these are."""
    ranks = np.empty_like(ranked)
    ranks[ranked] = np.arange(len(ranked))
    best = np.full(int(which.max()) + 1, len(ranked))
    np.minimum.at(best, which, np.repeat(ranks, sizes))
    is_best = np.zeros(len(ranked) + 1, dtype=np.bool_)
    is_best[best] = True
    front = ranked[is_best[:-1]]
    return np.concatenate([front, ranked[~is_best[:-1]]]), len(front)


def _are_outside(positions: Positions, runs: list[Run]) -> npt.NDArray[np.bool_]:
    """Which of the prompt's positions lie in none of the `runs` (sorted by prompt position)."""
    starts, ends = (np.array([0, *(each[2] + part * each[3] for each in runs)]) for part in (0, 1))
    outside: npt.NDArray[np.bool_] = (
        positions >= np.maximum.accumulate(ends)[np.searchsorted(starts, positions, "right") - 1]
    )
    return outside


def equal_tokens(left: TokenArray, right: TokenArray, step: int) -> int:
    """Number of equal tokens at the beginning; `step` are compared first, then four times as many each time."""
    length, done = min(len(left), len(right)), 0
    while done < length:
        end = min(done + min(step, _MOST_COMPARED), length)
        differ = left[done:end] != right[done:end]
        first = int(differ.argmax())
        if differ[first]:
            return done + first
        done, step = end, step * 4
    return length
