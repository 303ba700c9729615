"""From a prompt's anchors to the runs that it shares with donors (compiled; any number of threads).

Every anchor nominates places; a place is compared token by token unless a run already found on the same diagonal (same
donor, same shift) holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.anchor_table import (
    EMPTY,
    NEXT,
    Directory,
    bucket_of,
    entry_of,
    home_address,
    is_many,
    key_of,
    reference_of,
)
from semblend_trt.discovery.compiled import entry, inner
from semblend_trt.discovery.donor_pages import OWNER_SHIFT, PAGE_MASK, next_page, previous_page
from semblend_trt.discovery.index_memory import (
    BLOCK_CELLS,
    BLOCKS,
    BORN,
    DIED,
    DONORS,
    LENGTH,
    NAMESPACE,
    PAGE_BITS,
    PAGE_TOKENS,
    PAGES,
    TOKENS,
    Words,
    address_of,
    token_address,
)
from semblend_trt.discovery.raw_memory import load_token, load_word, prefetch

if TYPE_CHECKING:
    from semblend_trt.discovery.fingerprint import TokenArray

_BATCH = 64
_SHIFT_OFFSET = 1 << 31
# Places of an anchor tried in the first round; the others, of anchors that many donors share, come in the second.
_FIRST_ROUND = 4
_STEP = 16
_SPREAD = np.uint64(0x9E3779B97F4A7C15)

Runs = npt.NDArray[np.int64]


@inner
def _equal_ahead(left: int, right: int, limit: int) -> int:
    """Number of equal tokens from two addresses on, `limit` at most."""
    done = 0
    while done + _STEP <= limit:
        differs = np.int32(0)
        for at in range(_STEP):
            differs |= load_token(left + 4 * (done + at)) ^ load_token(right + 4 * (done + at))
        if differs:
            break
        done += _STEP
    while done < limit and load_token(left + 4 * done) == load_token(right + 4 * done):
        done += 1
    return done


@inner
def _equal_behind(left: int, right: int, limit: int) -> int:
    """Number of equal tokens that end before two addresses, `limit` at most."""
    done = 0
    while done + _STEP <= limit:
        differs = np.int32(0)
        for at in range(1, _STEP + 1):
            differs |= load_token(left - 4 * (done + at)) ^ load_token(right - 4 * (done + at))
        if differs:
            break
        done += _STEP
    while done < limit and load_token(left - 4 * (done + 1)) == load_token(right - 4 * (done + 1)):
        done += 1
    return done


@inner
def forward(chunks: Words, place: int, prompt: int, limit: int) -> int:
    """Number of a donor's tokens from `place` on that equal those at the address `prompt`; `limit` at most."""
    done = 0
    while done < limit:
        size = min(PAGE_TOKENS - (place & (PAGE_TOKENS - 1)), limit - done)
        equal = _equal_ahead(token_address(chunks, place), prompt + 4 * done, size)
        done += equal
        if equal < size or done == limit:
            return done
        place = next_page(chunks, place >> PAGE_BITS) << PAGE_BITS
    return done


@inner
def backward(chunks: Words, place: int, prompt: int, limit: int) -> int:
    """Number of a donor's tokens before `place` that equal those before the address `prompt`; `limit` at most."""
    done = 0
    page, offset = place >> PAGE_BITS, place & (PAGE_TOKENS - 1)
    while done < limit:
        size = min(offset, limit - done)
        equal = _equal_behind(address_of(chunks, TOKENS, page) + 4 * offset, prompt - 4 * done, size)
        done += equal
        if equal < size or done == limit:
            return done
        page, offset = previous_page(chunks, page), PAGE_TOKENS
    return done


@inner
def _diagonal_slot(diagonals: Runs, diagonal: int) -> int:
    """Row of `diagonals` (int64 [2**n, 3]: diagonal, begin, end; 0 is free) that holds or may hold a diagonal."""
    mask = len(diagonals) - 1
    slot = np.int64((np.uint64(diagonal) * _SPREAD) >> np.uint64(32)) & mask
    while diagonals[slot, 0] != 0 and diagonals[slot, 0] != diagonal:
        slot = (slot + 1) & mask
    return slot


@inner
def _larger(diagonals: Runs) -> Runs:
    larger = np.zeros((4 * len(diagonals), 3), dtype=np.int64)
    for row in range(len(diagonals)):
        if diagonals[row, 0]:
            slot = _diagonal_slot(larger, diagonals[row, 0])
            for column in range(3):
                larger[slot, column] = diagonals[row, column]
    return larger


@inner
def _longer(runs: Runs) -> Runs:
    longer = np.empty((4 * len(runs), 4), dtype=np.int64)
    for row in range(len(runs)):
        for column in range(4):
            longer[row, column] = runs[row, column]
    return longer


@inner
def _look_up(
    chunks: Words, directory: Directory, depth: int, keys: Words, first: int, last: int, entries: Words
) -> None:
    """Entries of keys [first, last): all are asked for before the first is read, so that they arrive together."""
    for index in range(first, last):
        prefetch(home_address(chunks, bucket_of(directory, depth, keys[index]), keys[index]))
    for index in range(first, last):
        found = entry_of(chunks, bucket_of(directory, depth, keys[index]), keys[index])
        entries[index] = found
        if found != EMPTY:
            pool, number = (
                (BLOCKS, reference_of(found)) if is_many(found) else (PAGES, reference_of(found) >> PAGE_BITS)
            )
            prefetch(address_of(chunks, pool, number))


@entry
def search(
    chunks: Words, directory: Directory, depth: int, mask: np.uint64, space_key: int, namespace: int, version: int,
    prompt: TokenArray, hashes: npt.NDArray[np.uint64], positions: Words,
    max_bucket: int, max_pairs: int, max_extensions: int, max_compared: int, shortest: int,
) -> tuple[Runs, int, int, int]:  # fmt: skip
    """Runs int64 [n, 4]: donor, its position, the prompt's, tokens; then the places read, those compared token by
    token, and the tokens compared.
    """
    anchors, cells, extensions, compared = len(positions), 0, 0, 0
    keys, entries = np.empty(anchors, dtype=np.int64), np.empty(anchors, dtype=np.int64)
    for index in range(anchors):
        keys[index] = key_of(hashes[index], mask, space_key)
    for first in range(0, anchors, _BATCH):
        _look_up(chunks, directory, depth, keys, first, min(first + _BATCH, anchors), entries)
    start = prompt.ctypes.data
    diagonals, held = np.zeros((256, 3), dtype=np.int64), 0
    runs, found = np.empty((64, 4), dtype=np.int64), 0
    waiting = False
    for round_ in range(2):
        low, high = (0, min(_FIRST_ROUND, max_bucket)) if round_ == 0 else (_FIRST_ROUND, max_bucket)
        if round_ and not waiting:
            break
        for index in range(anchors):
            word = entries[index]
            if word == EMPTY or (round_ and not is_many(word)):
                continue
            target = positions[index]
            many, seen, cell = is_many(word), 0, BLOCK_CELLS - 1
            base = address_of(chunks, BLOCKS, reference_of(word)) if many else 0
            while True:
                place = reference_of(word)
                cells += 1
                if many:
                    if cell < 0:
                        older = load_word(base + NEXT)
                        if older == 0:
                            break
                        base, cell = address_of(chunks, BLOCKS, older - 1), BLOCK_CELLS - 1
                    place = load_word(base + 8 * cell) - 1
                    cell -= 1
                    if place < 0:
                        continue
                elif seen:
                    break
                seen += 1
                if seen <= low:
                    continue
                if seen > high:
                    waiting = True
                    break
                max_pairs -= 1
                if max_pairs < 0:
                    return runs[:found], cells, extensions, compared
                owner = load_word(address_of(chunks, PAGES, place >> PAGE_BITS))
                donor = owner >> OWNER_SHIFT
                at = (owner & PAGE_MASK) << PAGE_BITS | place & (PAGE_TOKENS - 1)
                diagonal = donor << OWNER_SHIFT | (at - target + _SHIFT_OFFSET)
                slot = _diagonal_slot(diagonals, diagonal)
                if diagonals[slot, 1] <= target < diagonals[slot, 2]:
                    continue
                if extensions == max_extensions or compared > max_compared:
                    return runs[:found], cells, extensions, compared
                extensions += 1
                record = address_of(chunks, DONORS, donor)
                if load_word(record + NAMESPACE) != namespace:
                    continue
                if load_word(record + BORN) > version or load_word(record + DIED) <= version:
                    continue
                limit = min(load_word(record + LENGTH) - at, len(prompt) - target)
                ahead = forward(chunks, place, start + 4 * target, limit)
                compared += ahead + 1
                if ahead == 0:
                    continue
                behind = backward(chunks, place, start + 4 * target, min(at, target))
                compared += behind + 1
                if diagonals[slot, 0] == 0:
                    held += 1
                diagonals[slot, 0] = diagonal
                diagonals[slot, 1], diagonals[slot, 2] = target - behind, target + ahead
                if 2 * held > len(diagonals):
                    diagonals = _larger(diagonals)
                if ahead + behind < shortest:
                    continue
                if found == len(runs):
                    runs = _longer(runs)
                runs[found, 0], runs[found, 1] = donor, at - behind
                runs[found, 2], runs[found, 3] = target - behind, ahead + behind
                found += 1
    return runs[:found], cells, extensions, compared
