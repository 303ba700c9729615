"""Of many texts the one that begins most like another is found, whatever came and went before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.config import load_settings
from semblend_trt.donors.donor_index import DonorTexts

TOKENS = st.lists(st.integers(0, 2), max_size=8)


def array(tokens):
    return np.array(tokens, dtype=np.int32)


def shared(left, right):
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@given(st.lists(st.tuples(TOKENS, st.integers(0, 1), st.sampled_from("ab")), max_size=30), TOKENS, st.data())
def test_the_text_that_begins_most_alike_is_near(texts, asked, data):
    order, held = DonorTexts(load_settings()), {}
    for number, (tokens, generation, namespace) in enumerate(texts):
        order.put(namespace, generation, f"{number}", array(tokens))
        held[f"{number}"] = (tokens, generation, namespace)
    for donor_id in data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []:
        order.gone(donor_id)
        del held[donor_id]
    assert set(order) == set(held)
    near = list(order.near("a", array(asked)))
    for donor_id, generation, common, length in near:
        tokens, *rest = held[donor_id]
        assert (rest, common, length) == ([generation, "a"], shared(tokens, asked), len(tokens))
    for wanted in (0, 1):
        of_all = [shared(tokens, asked) for tokens, *rest in held.values() if rest == [wanted, "a"]]
        assert max(of_all, default=None) == max(
            (each.common for each in near if each.generation == wanted), default=None
        )


def test_a_text_is_put_in_place_of_what_it_was_and_long_ones_are_compared_to_their_end():
    order, long = DonorTexts(load_settings()), np.arange(100_000, dtype=np.int32)
    order.put("a", 0, "donor", long)
    order.put("a", 1, "donor", long[:70_000])
    assert [tuple(each) for each in order.near("a", long)] == [("donor", 1, 70_000, 70_000)]
    changed = long.copy()
    changed[65_537] = 0
    assert next(order.near("a", changed)).common == 65_537
    order.gone("never-heard-of")
    order.gone("donor")
    assert list(order) == list(order.near("a", long)) == []
