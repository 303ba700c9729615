"""Adding up who holds a prompt's entries: what a loop over entries and owners says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.fleet.overlap_tally import add_up
from semblend_trt.fleet.owner_sets import Owners, join, sets_of
from semblend_trt.fleet.posting_table import NONE

ENTRIES, OWNERS, WORKERS, LEVELS = 4, 7, 3, 5

holders = st.lists(st.dictionaries(st.integers(1, OWNERS - 1), st.integers(1, 3)), min_size=ENTRIES, max_size=ENTRIES)
asked_entries = st.lists(st.tuples(st.integers(0, ENTRIES - 1), st.integers(0, LEVELS - 1)), max_size=30)
# Worker and level of each owner; None for one of another namespace. Few levels, so that workers have several of them.
known_owners = st.lists(
    st.none() | st.tuples(st.integers(0, WORKERS - 1), st.integers(0, 2)), min_size=OWNERS, max_size=OWNERS
)


@given(holders, asked_entries, known_owners)
def test_a_worker_counts_once_for_an_entry_and_at_its_lowest_level(held, asked, known) -> None:
    sets, slots = sets_of(4096), np.full(ENTRIES, NONE, dtype=np.uint64)
    owners = Owners(*(np.zeros(OWNERS, dtype=kind) for kind in (np.int32, np.int32, np.uint8, np.int64)))
    for entry, donors in enumerate(held):
        for owner in (owner for owner, count in donors.items() for _ in range(count)):
            join(sets, owners, slots, np.array([int(slots[entry]) << 32 | entry]), owner)
    reached = np.array([-1 if each is None else each[0] << 8 | each[1] for each in known])
    hits = np.array([int(slots[entry]) << 32 | level for entry, level in asked], dtype=np.int64)
    shares = np.array([1.0, 0.25, 0.125, 0.0, 0.0])
    found, matches = np.zeros(WORKERS), np.zeros(WORKERS, dtype=np.int64)
    add_up(sets, reached, np.sort(hits), shares, found, matches)
    for worker in range(WORKERS):
        lowest = []
        for entry, level in asked:
            met = [known[owner] for owner in held[entry] if known[owner] is not None]
            lowest += sorted(of for who, of in met if who == worker and of <= level)[:1]
        assert matches[worker] == len(lowest)
        assert found[worker] == pytest.approx(sum(shares[level] for level in lowest))


def test_an_entry_that_nobody_holds_counts_nothing() -> None:
    found, matches = np.zeros(1), np.zeros(1, dtype=np.int64)
    add_up(sets_of(1), np.full(2, 0), np.array([NONE << 32]), np.ones(LEVELS), found, matches)
    assert found.tolist() == matches.tolist() == [0]
