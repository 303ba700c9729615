"""Donors' records and tokens in the index's memory (compiled)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from semblend_trt.discovery.compiled import inner
from semblend_trt.discovery.index_memory import (
    BORN,
    DIED,
    DONORS,
    FIRST_PAGE,
    LENGTH,
    NAMESPACE,
    NEVER,
    PAGE_BITS,
    PAGE_TOKENS,
    PAGES,
    SPACE_KEY,
    TOKENS,
    Words,
    address_of,
    give_back,
    take,
    token_address,
)
from semblend_trt.discovery.raw_memory import load_token, load_word, store_token, store_word
from semblend_trt.discovery.winnowing import BASE, GRAM_TOKENS

if TYPE_CHECKING:
    from semblend_trt.discovery.fingerprint import TokenArray

OWNER_SHIFT, PAGE_MASK = 32, (1 << 32) - 1


@inner
def next_page(chunks: Words, page: int) -> int:
    """The page behind a page of a donor, -1 behind its last."""
    return (load_word(address_of(chunks, PAGES, page) + 8) & PAGE_MASK) - 1


@inner
def previous_page(chunks: Words, page: int) -> int:
    """The page before a page of a donor, -1 before its first."""
    return (load_word(address_of(chunks, PAGES, page) + 8) >> OWNER_SHIFT) - 1


@inner
def gram_at(chunks: Words, place: int) -> np.uint64:
    """Hash of the gram at a place, as `winnowing.gram_hash` makes it."""
    value = np.uint64(0)
    for _ in range(GRAM_TOKENS):
        value = (value + np.uint64(load_token(token_address(chunks, place)))) * BASE
        place += 1
        if place & (PAGE_TOKENS - 1) == 0:
            page = next_page(chunks, (place - 1) >> PAGE_BITS)
            place = page << PAGE_BITS if page >= 0 else place - PAGE_TOKENS
    return value


@inner
def space_key_at(chunks: Words, place: int) -> int:
    """The number with which the keys of the place's donor are mixed."""
    owner = load_word(address_of(chunks, PAGES, place >> PAGE_BITS)) >> OWNER_SHIFT
    return load_word(address_of(chunks, DONORS, owner) + SPACE_KEY)


@inner
def write_donor(chunks: Words, counts: Words, tokens: TokenArray, namespace: int, space_key: int) -> int:
    """Takes a donor record and as many pages as `tokens` need, and fills them; no lookup finds it before it is born.

    Returns the donor's number.
    """
    donor = take(chunks, counts, DONORS)
    record = address_of(chunks, DONORS, donor)
    store_word(record + BORN, NEVER)
    store_word(record + DIED, NEVER)
    store_word(record + NAMESPACE, namespace)
    store_word(record + LENGTH, len(tokens))
    store_word(record + SPACE_KEY, space_key)
    link, before, last = record + FIRST_PAGE, 0, 0
    for ordinal in range((len(tokens) + PAGE_TOKENS - 1) >> PAGE_BITS):
        page = take(chunks, counts, TOKENS)
        base = address_of(chunks, TOKENS, page)
        first = ordinal << PAGE_BITS
        for at in range(first, min(first + PAGE_TOKENS, len(tokens))):
            store_token(base + 4 * (at - first), tokens[at])
        store_word(address_of(chunks, PAGES, page), donor << OWNER_SHIFT | ordinal)
        store_word(link, before << OWNER_SHIFT | page + 1)
        link, before, last = address_of(chunks, PAGES, page) + 8, last, page + 1
    store_word(link, before << OWNER_SHIFT)
    return donor


@inner
def read_donor(chunks: Words, donor: int) -> TokenArray:
    """A copy of a donor's tokens, int32 [n]."""
    record = address_of(chunks, DONORS, donor)
    tokens = np.empty(load_word(record + LENGTH), dtype=np.int32)
    page = load_word(record + FIRST_PAGE) - 1
    for at in range(len(tokens)):
        if at and at & (PAGE_TOKENS - 1) == 0:
            page = next_page(chunks, page)
        tokens[at] = load_token(address_of(chunks, TOKENS, page) + ((at & (PAGE_TOKENS - 1)) << 2))
    return tokens


@inner
def give_donor_back(chunks: Words, counts: Words, donor: int) -> None:
    """Frees a donor's pages and record."""
    page = load_word(address_of(chunks, DONORS, donor) + FIRST_PAGE) - 1
    while page >= 0:
        behind = next_page(chunks, page)
        give_back(chunks, counts, TOKENS, page)
        page = behind
    give_back(chunks, counts, DONORS, donor)
