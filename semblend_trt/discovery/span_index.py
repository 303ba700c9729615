"""Index of donors' tokens: where else, in the same namespace, does a part of this prompt stand word for word?

Anchors (fingerprint.py) nominate places; only a comparison token by token makes a run of them.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.discovery.anchor_table import MAX_DEPTH, Directory
from semblend_trt.discovery.fingerprint import GUARANTEED_RUN, Fingerprints, as_token_array, fingerprint
from semblend_trt.discovery.index_memory import (
    BLOCK_CELLS,
    BLOCKS,
    BORN,
    BUCKETS,
    DIED,
    DONORS,
    FRESH,
    PAGE_TOKENS,
    SPARE,
    TOKENS,
    IndexMemory,
    Words,
)
from semblend_trt.discovery.index_writing import (
    NUMBER_MASK,
    SPARE_BLOCKS,
    SPARE_BUCKETS,
    enter_anchors,
    erase_anchors,
    free_records,
    read_tokens,
    stamp_donor,
    write_tokens,
)
from semblend_trt.discovery.readers import Readers
from semblend_trt.discovery.run import Run, ScanBounds, ScanWork
from semblend_trt.discovery.span_search import search
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Run", "ScanBounds", "ScanWork", "SpanIndex", "warm_up"]

_ALL_BITS = (1 << 64) - 1
_RETIRED_ROOM = 1 << 14
_warm = threading.Event()


@dataclass(slots=True)
class _Namespace:
    """A namespace with donors: its number, and the number its keys are mixed with.

    That is random, so that nobody can choose text that crowds one bucket or meets another namespace's keys.
    """

    number: int
    space_key: int
    donors: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """What lookups see beside the memory: the table's directory, of 2**depth bucket numbers."""

    directory: Directory
    depth: int


class SpanIndex:
    """Donors by the text they hold. Lookups run beside each other and beside a change, and none waits for another: each
    finds what was indexed when it began. Changes wait for each other.

    `hash_mask` says which bits of a gram's hash count, for tests that force collisions; answers stay right whatever it
    is.
    """

    def __init__(self, bounds: ScanBounds | None = None, hash_mask: int = _ALL_BITS) -> None:
        warm_up()
        self._bounds = bounds or ScanBounds()
        self._mask = np.uint64(hash_mask)
        self._writing = threading.Lock()
        self._memory = IndexMemory()
        self._retired: Words = np.zeros(_RETIRED_ROOM, dtype=np.int64)
        self._donors: dict[str, int] = {}
        # Names stay until no lookup can find the donor any more; a number is not given to another before.
        self._names: dict[int, str] = {}
        self._spaces: dict[str, _Namespace] = {}
        self._space_of: dict[int, str] = {}
        self._next_space = 1
        # By version: donors whose anchors wait to be erased, and records that wait to be given back.
        self._leaving: deque[tuple[int, int]] = deque()
        self._unread: deque[tuple[int, Words]] = deque()
        self._readers = Readers(_State(self._first_directory(), 0))

    def add(self, namespace_key: str, donor_id: str, tokens: npt.ArrayLike) -> None:
        """Makes `tokens` (integers [n]; copied) findable as `donor_id`.

        Raises ValueError when the id is taken or a token id is bad, CapacityError when the index is full.
        """
        held = as_token_array(tokens)
        anchors = fingerprint(held, self._bounds.max_repeats)
        with self._writing:
            if donor_id in self._donors:
                raise ValueError(f"donor {donor_id} is already indexed; remove it first")
            self._collect()
            self._memory.provide(DONORS, 1)
            self._memory.provide(TOKENS, -(-len(held) // PAGE_TOKENS))
            space = self._enter_space(namespace_key)
            memory = self._memory
            donor = write_tokens(memory.chunks, memory.counts, held, space.number, space.space_key)
            self._names[donor], self._space_of[donor] = donor_id, namespace_key
            try:
                self._enter_anchors(donor, anchors)
            except BaseException:
                self._withdraw(donor)
                raise
            self._donors[donor_id] = donor
            stamp_donor(memory.chunks, donor, BORN, self._readers.version + 1)
            self._readers.advance()
            self._collect()

    def remove(self, donor_id: str) -> bool:
        """Forgets a donor; False when it is not indexed."""
        with self._writing:
            donor = self._donors.pop(donor_id, None)
            if donor is None:
                return False
            self._withdraw(donor)
            self._collect()
        return True

    def find(self, namespace_key: str, tokens: npt.ArrayLike, shortest: int = GUARANTEED_RUN) -> list[Run]:
        """Returns the maximal runs of at least `shortest` tokens that `tokens` shares with the namespace's donors.

        A run is maximal when neither the token before nor the one behind is equal too. Runs shorter than GUARANTEED_RUN
        are never returned; the larger `shortest` is, the quicker the lookup. Sorted by prompt position, the longest
        first. Donors of other namespaces are never compared. Raises ValueError for bad token ids.
        """
        return self.find_counting(namespace_key, tokens, shortest)[0]

    def find_counting(
        self, namespace_key: str, tokens: npt.ArrayLike, shortest: int = GUARANTEED_RUN
    ) -> tuple[list[Run], ScanWork]:
        """As `find`, and what it took."""
        prompt = as_token_array(tokens)
        space = self._spaces.get(namespace_key)
        shortest = max(shortest, GUARANTEED_RUN)
        if space is None or len(prompt) < shortest:
            return [], ScanWork()
        bounds = self._bounds
        anchors = fingerprint(prompt, bounds.max_repeats, shortest)
        with self._readers.reading() as (state, version):
            rows, *counts = search(
                self._memory.chunks, state.directory, state.depth, self._mask, space.space_key, space.number, version,
                prompt, anchors.hashes, anchors.positions, bounds.max_bucket, bounds.max_pairs, bounds.max_extensions,
                bounds.max_compared, shortest,
            )  # fmt: skip
            # One run may have been found twice; numbers mean these names until the lookup ends.
            names = self._names
            places = {(target, -length, names[donor], start) for donor, start, target, length in rows.tolist()}
        runs = [Run(donor_id, start, target, -negative) for target, negative, donor_id, start in sorted(places)]
        return runs, ScanWork(len(anchors), *counts)

    def used_bytes(self) -> int:
        """Memory of tokens, table and records, in bytes; not the names, which the interpreter holds."""
        return self._memory.used_bytes() + self._readers.state.directory.nbytes

    def __len__(self) -> int:
        return len(self._donors)

    def __contains__(self, donor_id: object) -> bool:
        return donor_id in self._donors

    def _enter_anchors(self, donor: int, anchors: Fingerprints) -> None:
        """Enters a donor's anchors, making room whenever the compiled loop stops for the lack of it."""
        memory, most_blocks, done = self._memory, -(-self._bounds.max_bucket // BLOCK_CELLS), 0
        while True:
            state = self._readers.state
            memory.provide(BUCKETS, SPARE_BUCKETS)
            memory.provide(BLOCKS, SPARE_BLOCKS)
            done = enter_anchors(
                memory.chunks, memory.counts, self._retired, state.directory, state.depth, self._mask, donor,
                anchors.hashes, anchors.positions, done, most_blocks,
            )  # fmt: skip
            if done == len(anchors):
                return
            self._set_aside()
            if done < 0:
                self._double_directory()
                done = -done - 1

    def _erase_anchors(self, donor: int) -> None:
        memory, state, done = self._memory, self._readers.state, 0
        anchors = fingerprint(read_tokens(memory.chunks, donor), self._bounds.max_repeats)
        while done < len(anchors):
            done = erase_anchors(
                memory.chunks, self._retired, state.directory, state.depth, self._mask, donor, anchors.hashes,
                anchors.positions, done,
            )  # fmt: skip
            self._set_aside()

    def _withdraw(self, donor: int) -> None:
        """Hides a donor from lookups that begin from now on; its anchors go when those before have ended."""
        version = self._readers.version + 1
        stamp_donor(self._memory.chunks, donor, DIED, version)
        self._leaving.append((version, donor))
        self._readers.advance()

    def _collect(self) -> None:
        """Erases what no lookup in progress may find any more, and frees what none may read."""
        oldest = self._readers.oldest()
        while self._leaving and self._leaving[0][0] <= oldest:
            _, donor = self._leaving.popleft()
            self._erase_anchors(donor)
            self._leave_space(donor)
            self._retired[0] += 1
            self._retired[self._retired[0]] = DONORS << 32 | donor
        self._set_aside()
        oldest = self._readers.oldest()
        while self._unread and self._unread[0][0] <= oldest:
            _, records = self._unread.popleft()
            for record in records[records >> 32 == DONORS].tolist():
                del self._names[record & NUMBER_MASK]
            free_records(self._memory.chunks, self._memory.counts, records)

    def _set_aside(self) -> None:
        """Keeps retired records until the lookups in progress, which may still read them, have ended."""
        count = int(self._retired[0])
        if count:
            self._readers.advance()
            self._unread.append((self._readers.version, self._retired[1 : count + 1].copy()))
            self._retired[0] = 0

    def _first_directory(self) -> Directory:
        """One bucket, which the memory gives out empty, for all keys."""
        self._memory.provide(BUCKETS, SPARE_BUCKETS)
        self._memory.counts[FRESH, BUCKETS] += 1
        self._memory.counts[SPARE, BUCKETS] -= 1
        return np.zeros(1, dtype=np.uint32)

    def _double_directory(self) -> None:
        state = self._readers.state
        if state.depth == MAX_DEPTH:
            raise CapacityError(f"the span index holds all of the {1 << MAX_DEPTH} buckets that it can; remove donors")
        self._readers.advance(_State(np.repeat(state.directory, 2), state.depth + 1))

    def _enter_space(self, namespace_key: str) -> _Namespace:
        space = self._spaces.get(namespace_key)
        if space is None:
            space = _Namespace(self._next_space, secrets.randbits(63))
            self._next_space += 1
            self._spaces[namespace_key] = space
        space.donors += 1
        return space

    def _leave_space(self, donor: int) -> None:
        namespace_key = self._space_of.pop(donor)
        space = self._spaces[namespace_key]
        space.donors -= 1
        if not space.donors:
            del self._spaces[namespace_key]


def warm_up() -> None:
    """Compiles what an index runs, or loads it from disk, so that no request waits for it."""
    if not _warm.is_set():
        _warm.set()
        index = SpanIndex()
        index.add("", "", np.arange(GUARANTEED_RUN))
        index.find("", np.arange(GUARANTEED_RUN))
        index.remove("")
