"""What changes the index, as Python calls it (compiled): one thread at a time, beside any number of searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.anchor_table import Directory, bucket_of, erase, home_address, insert, key_of
from semblend_trt.discovery.compiled import entry
from semblend_trt.discovery.donor_pages import give_donor_back, next_page, read_donor, write_donor
from semblend_trt.discovery.index_memory import (
    BLOCKS,
    BUCKETS,
    DONORS,
    FIRST_PAGE,
    PAGE_BITS,
    PAGE_TOKENS,
    SPACE_KEY,
    SPARE,
    Words,
    address_of,
    give_back,
)
from semblend_trt.discovery.raw_memory import load_word, prefetch, store_word

if TYPE_CHECKING:
    from semblend_trt.discovery.fingerprint import TokenArray

_AHEAD = 8
# What one insertion may need at most: a bucket may split as often as the directory has bits left.
SPARE_BUCKETS, SPARE_BLOCKS, RETIRED_ROOM = 64, 1, 64
NUMBER_MASK = (1 << 32) - 1

_Hashes = npt.NDArray[np.uint64]


@entry
def write_tokens(chunks: Words, counts: Words, tokens: TokenArray, namespace: int, space_key: int) -> int:
    return write_donor(chunks, counts, tokens, namespace, space_key)


@entry
def read_tokens(chunks: Words, donor: int) -> TokenArray:
    return read_donor(chunks, donor)


@entry
def enter_anchors(
    chunks: Words, counts: Words, retired: Words, directory: Directory, depth: int, mask: np.uint64,
    donor: int, hashes: _Hashes, positions: Words, first: int, most_blocks: int,
) -> int:  # fmt: skip
    record = address_of(chunks, DONORS, donor)
    space_key = load_word(record + SPACE_KEY)
    page, ordinal = load_word(record + FIRST_PAGE) - 1, 0
    for index in range(first, len(positions)):
        if counts[SPARE, BUCKETS] < SPARE_BUCKETS or counts[SPARE, BLOCKS] < SPARE_BLOCKS:
            return index
        if retired[0] + RETIRED_ROOM > len(retired):
            return index
        if index + _AHEAD < len(positions):
            key = key_of(hashes[index + _AHEAD], mask, space_key)
            prefetch(home_address(chunks, bucket_of(directory, depth, key), key))
        while ordinal < positions[index] >> PAGE_BITS:
            page, ordinal = next_page(chunks, page), ordinal + 1
        place = page << PAGE_BITS | positions[index] & (PAGE_TOKENS - 1)
        key = key_of(hashes[index], mask, space_key)
        if not insert(chunks, counts, retired, directory, depth, mask, key, place, most_blocks):
            return -index - 1
    return len(positions)


@entry
def erase_anchors(
    chunks: Words, retired: Words, directory: Directory, depth: int, mask: np.uint64,
    donor: int, hashes: _Hashes, positions: Words, first: int,
) -> int:  # fmt: skip
    record = address_of(chunks, DONORS, donor)
    space_key = load_word(record + SPACE_KEY)
    page, ordinal = load_word(record + FIRST_PAGE) - 1, 0
    for index in range(first, len(positions)):
        if retired[0] + RETIRED_ROOM > len(retired):
            return index
        if index + _AHEAD < len(positions):
            key = key_of(hashes[index + _AHEAD], mask, space_key)
            prefetch(home_address(chunks, bucket_of(directory, depth, key), key))
        while ordinal < positions[index] >> PAGE_BITS:
            page, ordinal = next_page(chunks, page), ordinal + 1
        place = page << PAGE_BITS | positions[index] & (PAGE_TOKENS - 1)
        erase(chunks, retired, directory, depth, key_of(hashes[index], mask, space_key), place)
    return len(positions)


@entry
def free_records(chunks: Words, counts: Words, records: Words) -> None:
    for record in records:
        if record >> 32 == DONORS:
            give_donor_back(chunks, counts, record & NUMBER_MASK)
        else:
            give_back(chunks, counts, record >> 32, record & NUMBER_MASK)


@entry
def stamp_donor(chunks: Words, donor: int, field: int, version: int) -> None:
    store_word(address_of(chunks, DONORS, donor) + field, version)
