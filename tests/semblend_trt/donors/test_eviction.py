"""LRU order: adding and using count, the least recent goes first."""

from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.donors.eviction import LruEviction

STEPS = st.lists(st.tuples(st.sampled_from(["added", "used", "removed"]), st.sampled_from("abcde")), max_size=60)


@given(STEPS)
def test_order_is_that_of_the_last_use(steps: list[tuple[str, str]]) -> None:
    eviction, last_use = LruEviction(), dict[str, int]()
    for time, (step, donor_id) in enumerate(steps):
        if step == "used" and donor_id not in last_use:
            continue
        getattr(eviction, step)(donor_id)
        if step == "removed":
            last_use.pop(donor_id, None)
        else:
            last_use[donor_id] = time
    assert list(eviction.candidates()) == sorted(last_use, key=last_use.__getitem__)
