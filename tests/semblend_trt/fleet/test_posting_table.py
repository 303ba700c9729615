"""The table of entries: after any additions and removals it holds what a dictionary would, all within reach."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.fleet.posting_table import DEAD, Owners, Table, add, copy, remove, sweep, table_of

BITS, OWNERS = 6, 4
# Neighbours share their first slot in a table this small, and the last ones reach round its end.
ENTRIES = st.lists(st.integers(0, 40).map(lambda value: value << 23), max_size=8)
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "kill"]), ENTRIES, st.integers(1, OWNERS - 1)), max_size=30
)


def owners() -> Owners:
    kinds = (np.int32, np.int32, np.uint8, np.int64)
    return Owners(*(np.zeros(OWNERS, dtype=kind) for kind in kinds))


def contents(table: Table) -> Counter[tuple[int, int]]:
    used = np.flatnonzero(table.slots)
    return Counter(
        {(int(table.slots[at]) >> 32, int(table.slots[at]) & 0xFFFFFFFF): int(table.counts[at]) for at in used}
    )


def as_entries(values: list[int]) -> np.ndarray:
    return np.sort(np.array(values, dtype=np.uint32))


def all_are_reached(table: Table) -> bool:
    """Between a slot's home and the slot there is no empty one."""
    mask = len(table.slots) - 1
    for at in np.flatnonzero(table.slots):
        home = ((int(table.slots[at]) >> 32) * int(table.factor) & 0xFFFFFFFF) >> int(table.shift)
        while home != at:
            if not table.slots[home]:
                return False
            home = (home + 1) & mask
    return True


@given(STEPS, st.integers(0, (1 << 31) - 1).map(lambda value: 2 * value + 1))
@settings(max_examples=100, deadline=None)
def test_the_table_counts_as_a_dictionary_does(steps, factor) -> None:
    table, known = table_of(BITS, factor), owners()
    model: Counter[tuple[int, int]] = Counter()
    donors: dict[int, list[list[int]]] = {owner: [] for owner in range(OWNERS)}
    for deed, values, owner in steps:
        if deed == "add" and len(model) + len(values) < 1 << BITS:
            add(table, known, as_entries(values), owner)
            donors[owner].append(values)
            model.update((value, owner) for value in set(values))
        elif deed == "remove" and donors[owner]:
            values = donors[owner].pop(0)
            remove(table, known, as_entries(values), owner)
            model.subtract((value, owner) for value in set(values))
            model = +model
        elif deed == "kill":
            known.namespaces[owner] = DEAD
            sweep(table, known, len(values), 3 << BITS)
            known.namespaces[owner] = 0
            donors[owner].clear()
            model = Counter({key: count for key, count in model.items() if key[1] != owner})
    assert contents(table) == model
    assert all_are_reached(table)
    assert known.slots.tolist() == [sum(key[1] == owner for key in model) for owner in range(OWNERS)]


def test_a_larger_table_holds_the_same_without_the_dead() -> None:
    table, larger, known = table_of(BITS, 77), table_of(BITS + 2, 77), owners()
    entries = np.arange(0, 20, dtype=np.uint32) << 25
    add(table, known, entries, 1)
    add(table, known, entries[:5], 1)
    add(table, known, entries, 2)
    known.namespaces[2] = DEAD
    copy(table, known, larger)
    assert contents(larger) == Counter({(int(each), 1): 2 if at < 5 else 1 for at, each in enumerate(entries)})
    assert all_are_reached(larger)
    assert known.slots.tolist() == [0, 20, 0, 0]
