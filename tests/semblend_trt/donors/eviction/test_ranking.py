"""A ranking is walked in the order that sorting would give, whatever was put, moved and taken out."""

from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.donors.eviction.ranking import Ranking

STEPS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 5)), max_size=300)


@given(STEPS)
def test_walks_in_order_and_again(steps):
    ranking, expected = Ranking(), {}
    for name, rank in steps:
        if rank is None:
            assert (ranking.discard(name) is None) == (expected.pop(name, None) is None)
        else:
            ranking.put(name, (float(rank),))
            expected[name] = (float(rank),)
    ordered = sorted((rank, name) for name, rank in expected.items())
    for _ in range(2):  # walking moves nothing
        assert list(ranking.items()) == ordered
    assert len(ranking) == len(expected)


def test_many_changes_leave_no_heap_of_stale_places():
    ranking = Ranking()
    for step in range(10_000):
        ranking.put(str(step % 10), (float(step),))
    assert len(ranking._heap) < 100
    assert list(ranking) == [str(step % 10) for step in range(9_990, 10_000)]


def test_the_first_names_are_found_without_looking_at_all():
    class Counting(str):
        compared = 0

        def __lt__(self, other):
            Counting.compared += 1
            return str.__lt__(self, other)

    ranking = Ranking()
    for number in range(4096):
        ranking.put(Counting(f"{number:05}"), (0.0,))
    Counting.compared = 0
    walk = iter(ranking)
    assert [next(walk) for _ in range(3)] == ["00000", "00001", "00002"]
    assert Counting.compared < 50
