"""The table of entries: after any additions and removals it holds what a dictionary would, all within reach."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.fleet.posting_table import (
    NONE,
    Table,
    clear,
    copy,
    enter,
    find,
    look_up,
    places_of,
    table_of,
    used_places,
)

BITS = 6
# Neighbours share their first slot in a table this small, and the last ones reach round its end.
ENTRIES = st.lists(st.integers(0, 40).map(lambda value: value << 23), max_size=8)
FACTORS = st.integers(0, (1 << 31) - 1).map(lambda value: 2 * value + 1)
STEPS = st.lists(st.tuples(st.sampled_from(["enter", "clear"]), ENTRIES, st.integers(1, NONE - 1)), max_size=30)


def as_entries(values: list[int]) -> np.ndarray:
    return np.sort(np.array(values, dtype=np.uint32))


def refer(table: Table, places: np.ndarray, reference: int) -> None:
    for at in (places & 0xFFFFFFFF).tolist():
        table.slots[at] = (int(table.slots[at]) >> 32 << 32) | reference


def contents(table: Table) -> dict[int, int]:
    return {int(slot) >> 32: int(slot) & 0xFFFFFFFF for slot in table.slots[np.flatnonzero(table.slots)]}


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


@given(STEPS, FACTORS)
def test_the_table_holds_what_a_dictionary_does(steps, factor) -> None:
    table, model = table_of(BITS, factor), {}
    for deed, values, reference in steps:
        if deed == "enter":
            places = enter(table, as_entries(values))
            assert sorted(places >> 32) == sorted(model.get(value, NONE) for value in set(values))
            refer(table, places, reference)
            model.update(dict.fromkeys(values, reference))
            assert set(places_of(table, places) >> 32) <= {reference}
        else:
            places = find(table, as_entries(values))
            assert sorted(places >> 32) == sorted(model[value] for value in set(values) & set(model))
            refer(table, places, NONE)
            clear(table, as_entries([*values, *model]))
            model = {value: reference for value, reference in model.items() if value not in values}
        assert contents(table) == model
        assert all_are_reached(table)
        assert table.used.tolist() == [len(model)]


@given(ENTRIES, FACTORS)
@settings(max_examples=30)
def test_a_larger_table_holds_the_same(values, factor) -> None:
    table, larger = table_of(BITS, factor), table_of(BITS + 2, factor)
    refer(table, enter(table, as_entries(values)), 5)
    copy(table, larger)
    assert contents(larger) == contents(table) == dict.fromkeys(values, 5)
    assert all_are_reached(larger)
    assert larger.used.tolist() == [len(set(values))]


def test_slots_are_told_with_their_entries() -> None:
    table, entries = table_of(BITS, 77), np.arange(20, dtype=np.uint32) << 25
    refer(table, enter(table, entries), 9)
    parts = [used_places(table, start, start + 16) for start in range(0, 1 << BITS, 16)]
    assert sorted(np.concatenate([held for _, held in parts])) == entries.tolist()
    for places, held in parts:
        assert (table.slots[places & 0xFFFFFFFF] >> np.uint64(32)).tolist() == held.tolist()
        assert set(places >> 32) <= {9}


def test_a_prompts_entries_are_looked_up_from_a_level_on() -> None:
    table, entries = table_of(BITS, 77), np.arange(20, dtype=np.uint32) << 25
    refer(table, enter(table, entries[:10]), 9)
    asked = np.concatenate([entries, entries[:1]])
    levels = np.arange(21, dtype=np.uint8) % 4
    assert sorted(look_up(table, asked, levels, 2)) == [9 << 32 | level for level in (2, 2, 3, 3)]
    assert len(look_up(table, asked, levels, 0)) == 11
