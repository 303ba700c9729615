"""Sets of owners: whatever comes and goes, each entry has the holders that a dictionary says, and no word is lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.fleet.owner_sets import (
    DEAD,
    SHARED,
    Owners,
    Sets,
    bury,
    join,
    leave,
    move,
    sets_of,
    words_in_use,
)
from semblend_trt.fleet.posting_table import NONE

SLOTS, OWNERS = 10, 7
LOW = 0xFFFFFFFF
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "join", "leave", "kill", "move"]),
        st.sets(st.integers(0, SLOTS - 1)),
        st.integers(1, OWNERS - 1),
    ),
    max_size=40,
)


def no_owners() -> Owners:
    kinds = (np.int32, np.int32, np.uint8, np.int64)
    return Owners(*(np.zeros(OWNERS, dtype=kind) for kind in kinds))


def empty_slots() -> np.ndarray:
    """Slots of entries that nobody holds."""
    return np.arange(1, SLOTS + 1, dtype=np.uint64) << np.uint64(32) | np.uint64(NONE)


def places_of(slots: np.ndarray, numbers) -> np.ndarray:
    return np.sort(np.array([int(slots[each]) % (1 << 32) << 32 | each for each in numbers], dtype=np.int64))


def holders(sets: Sets, slot: int) -> Counter[int]:
    """Donors of each owner."""
    reference = slot & LOW
    if reference == NONE:
        return Counter()
    if reference < SHARED:
        return Counter([reference])
    at = reference - SHARED
    words = sets.words[at + 1 : at + 1 + (int(sets.words[at]) & LOW)].tolist()
    return Counter({word & LOW: word >> 32 for word in words})


def words_needed(sets: Sets, slots: np.ndarray) -> int:
    """Words of the sets that are referred to; each has to know how often it is."""
    users = Counter(int(slot) & LOW for slot in slots if SHARED <= int(slot) & LOW < NONE)
    for reference, count in users.items():
        assert int(sets.words[reference - SHARED]) >> 32 == count
    return sum(1 << (int(sets.words[reference - SHARED]) & LOW).bit_length() for reference in users)


@given(STEPS)
@settings(max_examples=150)
def test_each_entry_has_the_holders_that_a_dictionary_says(steps) -> None:
    sets, owners, slots = sets_of(4096), no_owners(), empty_slots()
    model = [Counter() for _ in range(SLOTS)]
    for deed, numbers, owner in steps:
        if deed in ("join", "leave"):
            change, sign = (join, 1) if deed == "join" else (leave, -1)
            places = places_of(slots, numbers)
            assert change(sets, owners, slots, places, owner) == len(places)
            for number in numbers:
                model[number][owner] += sign
                model[number] = +model[number]
        elif deed == "kill":
            owners.namespaces[owner] = DEAD
            half = SLOTS // 2  # sets reach across both parts
            bury(sets, owners, slots, places_of(slots, range(half)))
            bury(sets, owners, slots, places_of(slots, range(half, SLOTS)))
            owners.namespaces[owner] = 0
            for held in model:
                del held[owner]
        else:
            others = sets_of(words_in_use(sets) + 1)
            move(sets, slots, others)
            sets = Sets(np.concatenate([others.words, np.zeros(4096, dtype=np.int64)]), others.state)
        assert [holders(sets, int(slot)) for slot in slots] == model
        assert words_in_use(sets) == words_needed(sets, slots)
    assert owners.slots.tolist() == [sum(owner in held for held in model) for owner in range(OWNERS)]
    assert (slots >> np.uint64(32)).tolist() == list(range(1, SLOTS + 1))


def test_entries_of_one_text_share_one_set() -> None:
    sets, owners, slots = sets_of(4096), no_owners(), empty_slots()
    for owner in range(1, OWNERS):
        join(sets, owners, slots, places_of(slots, range(SLOTS)), owner)
    assert words_in_use(sets) == 8
    leave(sets, owners, slots, places_of(slots, range(3)), 2)
    assert words_in_use(sets) == 16
    for owner in range(1, OWNERS):
        leave(sets, owners, slots, places_of(slots, range(SLOTS)), owner)
    assert words_in_use(sets) == 0
    assert {int(slot) & LOW for slot in slots} == {NONE}


def test_what_finds_no_room_is_left_undone() -> None:
    sets, owners, slots = sets_of(8), no_owners(), empty_slots()
    assert join(sets, owners, slots, places_of(slots, range(5)), 1) == 5
    assert join(sets, owners, slots, places_of(slots, range(5, SLOTS)), 2) == SLOTS - 5
    before = slots.copy()
    done = join(sets, owners, slots, places_of(slots, range(SLOTS)), 3)
    assert done == 5
    assert [holders(sets, int(slot)) for slot in slots[done:]] == [holders(sets, int(slot)) for slot in before[done:]]
    larger = sets_of(100)
    move(sets, slots, larger)
    join(larger, owners, slots, places_of(slots, range(done, SLOTS)), 3)
    assert [holders(larger, int(slot)) for slot in slots] == [Counter([1, 3])] * 5 + [Counter([2, 3])] * 5
