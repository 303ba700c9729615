"""Where the index's records lie: pools of equal records in chunks that never move, and their free lists.

A record keeps its number until it is given back, and that waits for every lookup that may still read it.

Tokens: int32, in pages of PAGE_TOKENS. A donor's pages need not be neighbours, so that a page that became free serves
any donor, and at most one page of a donor is partly empty.
Page: owner << 32 | the page's place among the owner's pages; the page before it << 32 | the page behind it, plus one.
Donor: the version it is found from; the version it is no longer found from; namespace; tokens; first page; the number
that the namespace's keys are mixed with.
Bucket: BUCKET_SLOTS entries of the anchor table.
Block: BLOCK_CELLS places of one key, plus one each; the next block, plus one.
State of a bucket: leading bits that its keys share << 32 | slots not empty << 16 | entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import inner
from semblend_trt.discovery.raw_memory import load_word, store_word
from semblend_trt.errors import CapacityError

Words = npt.NDArray[np.int64]

PAGE_BITS, PAGE_TOKENS = 7, 128
BUCKET_SLOTS, BLOCK_CELLS = 512, 7

TOKENS, PAGES, DONORS, BUCKETS, BLOCKS, STATES = range(6)
_NUM_POOLS = 6
# Log2 of the bytes of a record and of the records of a chunk. 4 MiB and more come in large pages of the system.
_RECORD_BITS = (9, 4, 6, 12, 6, 3)
_CHUNK_BITS = (15, 18, 12, 12, 18, 15)
# A token's place has 32 bits; the other pools may grow as far as so many tokens need.
_MAX_CHUNKS = (1024, 128, 8192, 2048, 2048, 256)
# Page records grow with the pages of tokens, and states with the buckets.
_COMPANIONS = {TOKENS: PAGES, BUCKETS: STATES}

BORN, DIED, NAMESPACE, LENGTH, FIRST_PAGE, SPACE_KEY = (8 * word for word in range(6))
NEVER = int(np.iinfo(np.int64).max)

FRESH, FREE, SPARE = range(3)


class IndexMemory:
    """The pools: `chunks` int64 [pools, chunks] holds their addresses. `counts` int64 [3, pools]: records ever taken,
    heads of the lists of records given back (plus one), and records that can be taken before a chunk is missing.
    """

    def __init__(self) -> None:
        self.chunks: Words = np.zeros((_NUM_POOLS, max(_MAX_CHUNKS)), dtype=np.int64)
        self.counts: Words = np.zeros((3, _NUM_POOLS), dtype=np.int64)
        self._held: list[list[Words]] = [[] for _ in range(_NUM_POOLS)]

    def used_bytes(self) -> int:
        """Bytes of all records ever taken. The system gives memory when it is first touched, not a chunk at once."""
        taken = self.counts[FRESH].copy()
        for pool, companion in _COMPANIONS.items():
            taken[companion] = taken[pool]
        return int(sum(int(count) << bits for count, bits in zip(taken, _RECORD_BITS, strict=True)))

    def provide(self, pool: int, count: int) -> None:
        """Sees to it that `count` records can be taken; raises CapacityError when the pool may not grow so far."""
        while self.counts[SPARE, pool] < count:
            self._add_chunk(pool)
            companion = _COMPANIONS.get(pool)
            while companion is not None and self._capacity(companion) < self._capacity(pool):
                self._add_chunk(companion)
            self.counts[SPARE, pool] += 1 << _CHUNK_BITS[pool]

    def _capacity(self, pool: int) -> int:
        return len(self._held[pool]) << _CHUNK_BITS[pool]

    def _add_chunk(self, pool: int) -> None:
        number = len(self._held[pool])
        if number == _MAX_CHUNKS[pool]:
            raise CapacityError(f"the span index holds all of the {number} chunks that it can; remove donors first")
        words = np.zeros(1 << (_CHUNK_BITS[pool] + _RECORD_BITS[pool] - 3), dtype=np.int64)
        self._held[pool].append(words)
        self.chunks[pool, number] = words.ctypes.data


@inner
def address_of(chunks: Words, pool: int, number: int) -> int:
    """Address of a record."""
    bits = _CHUNK_BITS[pool]
    return chunks[pool, number >> bits] + ((number & ((1 << bits) - 1)) << _RECORD_BITS[pool])


@inner
def token_address(chunks: Words, place: int) -> int:
    """Address of the token at a place; the rest of its page follows."""
    return address_of(chunks, TOKENS, place >> PAGE_BITS) + ((place & (PAGE_TOKENS - 1)) << 2)


@inner
def take(chunks: Words, counts: Words, pool: int) -> int:
    """Number of a record for the caller, whose content is what was left in it; `provide` has seen to it."""
    counts[SPARE, pool] -= 1
    number = counts[FREE, pool] - 1
    if number < 0:
        counts[FRESH, pool] += 1
        return counts[FRESH, pool] - 1
    counts[FREE, pool] = load_word(address_of(chunks, pool, number))
    return number


@inner
def give_back(chunks: Words, counts: Words, pool: int, number: int) -> None:
    """Puts a record, which nobody reads any more, on its pool's list of free ones."""
    store_word(address_of(chunks, pool, number), counts[FREE, pool])
    counts[FREE, pool] = number + 1
    counts[SPARE, pool] += 1
