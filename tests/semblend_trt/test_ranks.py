"""One rank needs nobody, several get the same of everything; real processes are met in test_tensor_parallel.py."""

from __future__ import annotations

import torch

from semblend_trt.ranks import Ranks, joined_ranks
from tests.semblend_trt.rank_threads import on_ranks


def test_one_rank_keeps_what_it_has() -> None:
    alone, tensor = Ranks(), torch.arange(3.0)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.gather("a") == ["a"]
    assert alone.broadcast("a") == "a"
    assert alone.least([3, 1]) == [3, 1]
    assert alone.total(tensor) is alone.add_up(tensor) is tensor


def test_several_ranks_get_the_same() -> None:
    def work(ranks: Ranks) -> tuple[object, ...]:
        own = torch.full((2,), 10.0**ranks.rank)
        added = own.clone()
        assert ranks.add_up(added) is added
        return (
            ranks.gather(ranks.rank),
            ranks.broadcast(f"of {ranks.rank}"),
            ranks.least([ranks.rank, 5 - ranks.rank]),
            ranks.total(own).tolist(),
            added.tolist(),
        )

    assert on_ranks(3, work) == [([0, 1, 2], "of 0", [0, 3], [111.0, 111.0], [111.0, 111.0])] * 3


def test_a_process_that_has_joined_nobody_is_one_rank_or_unknown() -> None:
    found = joined_ranks(1)
    assert found is not None
    assert found.size == 1
    assert joined_ranks(2) is None
