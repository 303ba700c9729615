"""The anchor table against a dictionary of lists, while donors are added and removed."""

import numpy as np
import pytest

from semblend_trt.discovery.anchor_table import AnchorTable


@pytest.mark.parametrize(("different", "most"), [(3, 4), (500, 3), (1 << 20, 2)])
def test_the_newest_places_of_each_key_are_found_through_any_change(different, most):
    rng = np.random.default_rng(different)
    pool = rng.integers(0, 1 << 64, different, dtype=np.uint64)
    table, held, donors = AnchorTable(), dict[int, list[tuple[int, int]]](), dict[int, tuple[np.ndarray, np.ndarray]]()
    for donor in range(400):
        count = int(rng.integers(0, 120))
        keys = rng.choice(pool, count)
        donors[donor] = keys, table.add(donor, keys, np.arange(count))
        for position, key in enumerate(keys.tolist()):
            held.setdefault(key, []).append((donor, position))
        while len(donors) > 100 or (donors and rng.random() < 0.3):
            gone = int(rng.choice(list(donors)))
            keys, pages = donors.pop(gone)
            table.remove(pages, keys)
            for key in set(keys.tolist()):
                held[key] = [place for place in held[key] if place[0] != gone]
        asked = np.unique(np.concatenate([rng.choice(pool, 20), rng.integers(0, 1 << 64, 5, dtype=np.uint64)]))
        *places, unread = (each.tolist() for each in table.find(asked, most, 1 << 20))
        found = list(zip(*places, strict=True))
        assert sorted(unread) == [at for at, key in enumerate(asked.tolist()) if len(held.get(key, [])) > most]
        for number, key in enumerate(asked.tolist()):
            newest = held.get(key, [])[::-1][:most]
            assert [place for which, *place in found if which == number] == [list(place) for place in newest]


def test_the_newest_of_all_keys_come_before_older_ones():
    table, keys = AnchorTable(), np.array([1 << 40, 2 << 40], dtype=np.uint64)
    for donor in range(3):
        table.add(donor, keys, np.array([7, 8]))
    which, donors, positions, unread = table.find(keys, most=9, limit=3)
    assert set(unread.tolist()) == {0, 1}
    assert list(zip(which.tolist(), donors.tolist(), positions.tolist(), strict=True)) == [
        (0, 2, 7),
        (1, 2, 8),
        (0, 1, 7),
    ]
