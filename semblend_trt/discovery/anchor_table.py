"""The table from an anchor's key to the places where it stands: open addressing in buckets that split (compiled).

A directory of 2**depth bucket numbers is addressed by a key's leading bits; inside a bucket a key is looked for from
its home slot on. A full bucket splits in two, and the directory doubles when it must (Fagin et al., "Extendible
Hashing", TODS 1979), so that no insertion moves more than one bucket. The key of an entry is made from the tokens.

Entry (int64): 30 bits of the key << 34 | 1 << 33 | many << 32 | place, or block when `many`. 0 is an empty slot and 1
one that was emptied. Entries and cells change by one store each: a reader sees the state before or after it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import inner
from semblend_trt.discovery.donor_pages import gram_at, space_key_at
from semblend_trt.discovery.index_memory import (
    BLOCK_CELLS,
    BLOCKS,
    BUCKET_SLOTS,
    BUCKETS,
    STATES,
    Words,
    address_of,
    take,
    token_address,
)
from semblend_trt.discovery.raw_memory import load_word, prefetch, store_token, store_word

Directory = npt.NDArray[np.uint32]

EMPTY, EMPTIED = 0, 1
MAX_DEPTH = 24
_TAG_SHIFT, _LIVE, _MANY, _REFERENCE = 34, 1 << 33, 1 << 32, (1 << 32) - 1
_TAG_MASK = (1 << 30) - 1
_SLOT_MASK = BUCKET_SLOTS - 1
# With more, searches for keys that are not there become long.
_MOST_FILLED = BUCKET_SLOTS * 7 // 10
# With fewer entries a full bucket is only rid of its emptied slots.
_WORTH_SPLITTING = BUCKET_SLOTS // 2
NEXT = BLOCK_CELLS * 8

# splitmix64's finaliser (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@inner
def key_of(gram: np.uint64, mask: np.uint64, space_key: int) -> int:
    """The key of a gram's hash in a namespace; `mask` says which bits of the hash count: all, outside of tests."""
    value = (gram & mask) ^ np.uint64(space_key)
    value = (value ^ (value >> _S30)) * _MIX_1
    value = (value ^ (value >> _S27)) * _MIX_2
    return np.int64(value ^ (value >> _S31))


@inner
def leading_bits(key: int, count: int) -> int:
    return ((key >> 32) & 0xFFFFFFFF) >> (32 - count)


@inner
def bucket_of(directory: Directory, depth: int, key: int) -> int:
    return np.int64(directory[leading_bits(key, depth)])


@inner
def home_address(chunks: Words, bucket: int, key: int) -> int:
    return address_of(chunks, BUCKETS, bucket) + ((key & _SLOT_MASK) << 3)


@inner
def is_many(entry: int) -> bool:
    return entry & _MANY != 0


@inner
def reference_of(entry: int) -> int:
    return entry & _REFERENCE


@inner
def slot_of(chunks: Words, bucket: int, key: int) -> int:
    """Address of the first slot from the key's home on that holds its entry or is empty, 0 when there is none."""
    base, slot, tag = address_of(chunks, BUCKETS, bucket), key & _SLOT_MASK, _tag_of(key)
    for _ in range(BUCKET_SLOTS):
        entry = load_word(base + (slot << 3))
        if entry == EMPTY or (entry & _LIVE != 0 and (entry >> _TAG_SHIFT) & _TAG_MASK == tag):
            return base + (slot << 3)
        slot = (slot + 1) & _SLOT_MASK
    return 0


@inner
def entry_of(chunks: Words, bucket: int, key: int) -> int:
    """The key's entry, EMPTY when there is none."""
    base, slot, tag = address_of(chunks, BUCKETS, bucket), key & _SLOT_MASK, _tag_of(key)
    for _ in range(BUCKET_SLOTS):
        entry = load_word(base + (slot << 3))
        if entry == EMPTY or (entry & _LIVE != 0 and (entry >> _TAG_SHIFT) & _TAG_MASK == tag):
            return entry
        slot = (slot + 1) & _SLOT_MASK
    return EMPTY


@inner
def insert(
    chunks: Words, counts: Words, retired: Words, directory: Directory, depth: int, mask: np.uint64,
    key: int, place: int, most_blocks: int,
) -> bool:  # fmt: skip
    """Enters a place under a key; False when the directory must double first. Of a key the newest places stay."""
    while True:
        bucket = bucket_of(directory, depth, key)
        slot = slot_of(chunks, bucket, key)
        if slot and load_word(slot) != EMPTY:
            _insert_again(chunks, counts, retired, slot, place, most_blocks)
            return True
        slot = _free_slot(chunks, bucket, key)
        state = address_of(chunks, STATES, bucket)
        word = load_word(state)
        fresh = 1 if load_word(slot) == EMPTY else 0
        if not fresh or (word >> 16) & 0xFFFF < _MOST_FILLED:
            store_word(slot, _tag_of(key) << _TAG_SHIFT | _LIVE | place)
            store_word(state, word + 1 + (fresh << 16))
            return True
        shared = word >> 32
        split = 1 if word & 0xFFFF > _WORTH_SPLITTING else 0
        if split and shared == depth:
            return False
        prefix = leading_bits(key, shared)
        _rebuild(chunks, counts, retired, directory, depth, mask, bucket, prefix, shared, split)


@inner
def erase(chunks: Words, retired: Words, directory: Directory, depth: int, key: int, place: int) -> None:
    """Takes a place from under a key, if it is still there."""
    bucket = bucket_of(directory, depth, key)
    slot = slot_of(chunks, bucket, key)
    entry = load_word(slot) if slot else EMPTY
    if entry == EMPTY:
        return
    if not is_many(entry):
        if reference_of(entry) == place:
            _empty(chunks, bucket, slot)
        return
    before, block = slot, reference_of(entry)
    while True:
        base = address_of(chunks, BLOCKS, block)
        behind = load_word(base + NEXT)
        left = 0
        for cell in range(BLOCK_CELLS):
            if load_word(base + 8 * cell) == place + 1:
                store_word(base + 8 * cell, 0)
            left += load_word(base + 8 * cell) != 0
        if left == 0:
            _unlink(chunks, bucket, slot, before, behind)
            retire(retired, BLOCKS, block)
        else:
            before = base + NEXT
        if behind == 0:
            return
        block = behind - 1


@inner
def retire(retired: Words, pool: int, number: int) -> None:
    """Notes a record that is to be given back once nobody reads it; `retired[0]` counts the notes."""
    retired[0] += 1
    retired[retired[0]] = pool << 32 | number


@inner
def _tag_of(key: int) -> int:
    return (key >> 9) & _TAG_MASK


@inner
def _free_slot(chunks: Words, bucket: int, key: int) -> int:
    """Address of the first slot from the key's home on that holds no entry; a bucket always has one."""
    base, slot = address_of(chunks, BUCKETS, bucket), key & _SLOT_MASK
    while load_word(base + (slot << 3)) & _LIVE:
        slot = (slot + 1) & _SLOT_MASK
    return base + (slot << 3)


@inner
def _empty(chunks: Words, bucket: int, slot: int) -> None:
    state = address_of(chunks, STATES, bucket)
    store_word(slot, EMPTIED)
    store_word(state, load_word(state) - 1)


@inner
def _unlink(chunks: Words, bucket: int, slot: int, before: int, behind: int) -> None:
    """Takes a block out of its chain: `before` is the address of what refers to it, `behind` what it refers to."""
    if before != slot:
        store_word(before, behind)
    elif behind == 0:
        _empty(chunks, bucket, slot)
    else:
        store_word(slot, load_word(slot) & ~_REFERENCE | (behind - 1))


@inner
def _insert_again(chunks: Words, counts: Words, retired: Words, slot: int, place: int, most_blocks: int) -> None:
    """Adds a place to an entry's newest block; a full one gets a block before it, and the oldest goes."""
    entry = load_word(slot)
    first, behind = reference_of(entry) + 1, 0
    if is_many(entry):
        head = address_of(chunks, BLOCKS, first - 1)
        for cell in range(BLOCK_CELLS):
            if load_word(head + 8 * cell) == 0:
                store_word(head + 8 * cell, place + 1)
                return
        behind = first
    block = take(chunks, counts, BLOCKS)
    base = address_of(chunks, BLOCKS, block)
    store_word(base, place + 1 if behind else first)
    store_word(base + 8, 0 if behind else place + 1)
    for cell in range(2, BLOCK_CELLS):
        store_word(base + 8 * cell, 0)
    store_word(base + NEXT, behind)
    store_word(slot, entry & ~_REFERENCE | _MANY | block)
    for _ in range(most_blocks - 1):
        if behind == 0:
            return
        base = address_of(chunks, BLOCKS, behind - 1)
        behind = load_word(base + NEXT)
    if behind:
        store_word(base + NEXT, 0)
        retire(retired, BLOCKS, behind - 1)


@inner
def _first_place(chunks: Words, entry: int) -> int:
    """One of the places of an entry."""
    if not is_many(entry):
        return reference_of(entry)
    base = address_of(chunks, BLOCKS, reference_of(entry))
    for cell in range(BLOCK_CELLS):
        if load_word(base + 8 * cell):
            return load_word(base + 8 * cell) - 1
    return 0


@inner
def _rebuild(
    chunks: Words, counts: Words, retired: Words, directory: Directory, depth: int, mask: np.uint64,
    bucket: int, prefix: int, shared: int, split: int,
) -> None:  # fmt: skip
    """Copies a bucket's entries into a bucket without emptied slots, or by their next bit into two when `split`."""
    old = address_of(chunks, BUCKETS, bucket)
    for slot in range(BUCKET_SLOTS):
        entry = load_word(old + 8 * slot)
        if entry & _LIVE:
            prefetch(token_address(chunks, _first_place(chunks, entry)))
    # The directory's slots of each part follow each other.
    part_bits = shared + split
    for part in range(1 + split):
        target = take(chunks, counts, BUCKETS)
        base = address_of(chunks, BUCKETS, target)
        for slot in range(BUCKET_SLOTS):
            store_word(base + 8 * slot, EMPTY)
        held = 0
        for slot in range(BUCKET_SLOTS):
            entry = load_word(old + 8 * slot)
            if entry & _LIVE:
                place = _first_place(chunks, entry)
                key = key_of(gram_at(chunks, place), mask, space_key_at(chunks, place))
                if leading_bits(key, part_bits) & split == part:
                    store_word(_free_slot(chunks, target, key), entry)
                    held += 1
        store_word(address_of(chunks, STATES, target), part_bits << 32 | held << 16 | held)
        slots = 1 << (depth - part_bits)
        first = ((prefix << split) | part) * slots
        for index in range(first, first + slots):
            store_token(directory.ctypes.data + 4 * index, np.int32(target))
    retire(retired, BUCKETS, bucket)
