"""Covers and chains: disjoint, inside their bounds, longest first, and the same every time."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from semblend_trt.discovery.cover import Preference, chain, cover
from semblend_trt.discovery.span_index import Run

RUNS = st.lists(
    st.builds(
        Run,
        donor_id=st.sampled_from(["a", "b", "c"]),
        donor_start=st.integers(0, 20),
        target_start=st.integers(0, 100),
        length=st.integers(1, 60),
    ),
    max_size=12,
)
BOUNDS = st.tuples(st.integers(0, 80), st.integers(0, 160), st.integers(1, 40))


def is_piece_of(piece: Run, runs: list[Run]) -> bool:
    return any(
        run.donor_id == piece.donor_id
        and run.target_start - run.donor_start == piece.target_start - piece.donor_start
        and run.target_start <= piece.target_start
        and piece.target_end <= run.target_end
        for run in runs
    )


def longest_first(runs: list[Run], begin: int, end: int, min_span: int) -> list[tuple[int, int]] | None:
    """The definition, position by position: (start, length) as taken; None when equal lengths leave a choice."""
    free = set(range(begin, end))
    taken: list[tuple[int, int]] = []
    while True:
        pieces = set()
        for run in runs:
            length = 0
            for position in range(run.target_start, run.target_end + 1):
                if position in free and position < run.target_end:
                    length += 1
                    continue
                if length >= min_span:
                    pieces.add((position - length, length))
                length = 0
        if not pieces:
            return taken
        longest = max(length for _, length in pieces)
        best = [piece for piece in pieces if piece[1] == longest]
        if len(best) > 1:
            return None
        taken += best
        free -= set(range(best[0][0], best[0][0] + longest))


@given(RUNS, BOUNDS)
def test_pieces_are_disjoint_and_of_the_runs_the_longest_among_them_and_nothing_long_is_left(
    runs: list[Run], bounds: tuple[int, int, int]
) -> None:
    begin, end, min_span = bounds
    position, free = begin, set(range(begin, end))
    pieces = cover(runs, begin, end, min_span)
    for piece in pieces:
        assert piece.target_start >= position
        assert piece.length >= min_span
        assert is_piece_of(piece, runs)
        position = piece.target_end
        free -= set(range(piece.target_start, position))
    assert position <= max(begin, end)
    best = max((piece.length for run in runs if (piece := run.within(begin, end)) is not None), default=0)
    assert max((piece.length for piece in pieces), default=0) == (best if best >= min_span else 0)
    for run in runs:
        stretch = 0
        for at in range(run.target_start, run.target_end):
            stretch = stretch + 1 if at in free else 0
            assert stretch < min_span


@given(RUNS, BOUNDS)
def test_equals_the_definition_where_no_tie_leaves_a_choice(runs: list[Run], bounds: tuple[int, int, int]) -> None:
    expected = longest_first(runs, *bounds)
    assume(expected is not None)
    assert [(piece.target_start, piece.length) for piece in cover(runs, *bounds)] == sorted(expected or [])


@given(RUNS, BOUNDS, st.randoms(use_true_random=False))
def test_the_order_of_the_runs_does_not_matter(
    runs: list[Run], bounds: tuple[int, int, int], shuffler: random.Random
) -> None:
    shuffled = runs[:]
    shuffler.shuffle(shuffled)
    assert cover(runs, *bounds) == cover(shuffled, *bounds)
    assert chain(runs, *bounds) == chain(shuffled, *bounds)


@given(RUNS, BOUNDS, st.sets(st.sampled_from(["a", "b", "c"])), st.integers(1, 8))
def test_preferences_change_no_length_where_no_tie_leaves_a_choice(
    runs: list[Run], bounds: tuple[int, int, int], near: set[str], block_size: int
) -> None:
    assume(longest_first(runs, *bounds) is not None)
    preferred = cover(runs, *bounds, preference=Preference(near.__contains__, block_size))
    plain = cover(runs, *bounds)
    places = [(piece.target_start, piece.length) for piece in plain]
    assert [(piece.target_start, piece.length) for piece in preferred] == places


def test_what_is_left_of_a_trimmed_run_stays_in_the_choice() -> None:
    runs = [Run("long", 0, 100, 100), Run("wide", 0, 60, 70), Run("late", 5, 190, 50)]
    whole = [Run("wide", 0, 60, 40), Run("long", 0, 100, 100), Run("late", 15, 200, 40)]
    assert cover(runs, 0, 1000, 32) == whole
    assert cover(runs, 0, 1000, 41) == [Run("long", 0, 100, 100)]


def test_ties_go_to_the_donor_that_is_needed_anyway() -> None:
    runs = [Run("a", 0, 0, 100), Run("z", 0, 0, 100), Run("z", 100, 100, 90)]
    assert {piece.donor_id for piece in cover(runs, 0, 1000, 32)} == {"z"}
    covered = [Run("a", 500, 0, 149), Run("a", 900, 0, 148)]  # what `a` offers beside, and is not needed for
    runs = [Run("z", 0, 0, 150), Run("a", 0, 200, 100), Run("z", 300, 200, 100), *covered]
    assert {piece.donor_id for piece in cover(runs, 0, 1000, 32)} == {"z"}
    runs = [Run("b", 0, 0, 100), Run("z", 0, 0, 100), Run("y", 0, 0, 100)]
    assert cover(runs, 0, 1000, 32) == [Run("b", 0, 0, 100)]
    assert cover(runs, 0, 1000, 32, {"y"}) == [Run("y", 0, 0, 100)]


def test_ties_go_to_a_near_donor_first_then_to_a_needed_one_then_to_whole_blocks() -> None:
    runs = [Run(donor, start, 64, 100) for donor, start in [("a", 1), ("aligned", 96), ("near", 3), ("used", 5)]]

    def taken(near: set[str], used: set[str]) -> str:
        return cover(runs, 0, 1000, 32, used, Preference(near.__contains__, 32))[0].donor_id

    assert taken({"near"}, {"used"}) == "near"
    assert taken(set(), {"used"}) == "used"
    assert taken(set(), set()) == "aligned"
    assert cover(runs, 0, 1000, 32)[0].donor_id == "a"


@pytest.mark.parametrize(("length", "taken"), [(100, "exact"), (199, "exact"), (200, "exact"), (202, "later")])
def test_a_run_of_a_later_generation_has_to_be_so_many_times_longer(length: int, taken: str) -> None:
    runs = [Run("exact", 7, 0, 100), Run("later", 0, 0, length)]
    pieces = cover(runs, 0, 1000, 32, {"later"}, Preference({"later"}.__contains__, 1, {"later": 1}))
    assert pieces[0].donor_id == taken
    assert sum(piece.length for piece in pieces) == (length if length - 100 >= 32 else 100)


@given(RUNS, BOUNDS)
def test_a_chain_has_no_hole(runs: list[Run], bounds: tuple[int, int, int]) -> None:
    begin, end, min_span = bounds
    position = begin
    for piece in chain(runs, begin, end, min_span):
        assert piece.target_start == position
        assert piece.length >= min_span
        assert is_piece_of(piece, runs)
        position = piece.target_end
    assert position <= max(begin, end)
    reach = [
        part.length for run in runs if run.target_start <= position and (part := run.within(position, end)) is not None
    ]
    assert max(reach, default=0) < min_span


def test_a_chain_goes_on_where_a_cover_would_leave_a_hole() -> None:
    runs = [Run("a", 0, 0, 100), Run("b", 0, 50, 1000)]
    assert chain(runs, 0, 2000, 64) == [Run("a", 0, 0, 100), Run("b", 50, 100, 950)]
    assert chain(runs, 100, 2000, 64) == [Run("b", 50, 100, 950)]
    assert chain(runs, 1100, 2000, 64) == []


def test_a_chain_stays_with_its_donor_when_others_reach_as_far() -> None:
    runs = [Run("z", 0, 0, 100), Run("a", 0, 50, 150), Run("z", 500, 50, 150)]
    assert chain(runs, 0, 1000, 64) == [Run("z", 0, 0, 100), Run("z", 550, 100, 100)]
    assert chain(runs, 60, 1000, 64) == [Run("a", 10, 60, 140)]


def test_a_chain_goes_on_with_the_lowest_generation_when_others_reach_as_far() -> None:
    runs = [Run("a", 0, 0, 100), Run("b", 0, 0, 100)]
    later_a = Preference({"a"}.__contains__, generations={"a": 1})
    assert chain(runs, 0, 1000, 32, later_a) == [Run("b", 0, 0, 100)]


def test_a_chain_goes_on_with_a_near_donor_when_others_reach_as_far() -> None:
    runs = [Run("z", 0, 0, 100), Run("a", 0, 50, 150), Run("z", 500, 50, 150)]
    near_a = Preference({"a"}.__contains__)
    assert chain(runs, 0, 1000, 64, near_a) == [Run("z", 0, 0, 100), Run("a", 50, 100, 100)]


def test_nothing_to_cover() -> None:
    assert cover([], 0, 100, 1) == cover([Run("a", 0, 0, 50)], 60, 50, 1) == []
    assert chain([], 0, 100, 1) == chain([Run("a", 0, 0, 50)], 60, 50, 1) == []
