"""Ranks agree on values, on a start and on loads."""

import sys
from types import ModuleType

import pytest
import torch

from semblend_trt.connector import worker
from semblend_trt.connector.worker import agree_on_start, join_ranks
from semblend_trt.errors import ConfigurationError, DonorUnavailableError
from semblend_trt.ranks import EngineRanks, Ranks, TorchRanks, agree_on_loads, ranks_of
from semblend_trt.runtime import Runtime
from tests.semblend_trt.rank_threads import on_ranks


def test_one_rank_keeps_what_it_has():
    alone, tensor = Ranks(), torch.arange(3.0)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.gather("a") == ["a"]
    assert alone.broadcast("a") == "a"
    assert alone.least([3, 1]) == [3, 1]
    assert alone.total(tensor) is tensor


def test_several_ranks_get_the_same():
    def work(ranks):
        own = torch.full((2,), 10.0**ranks.rank)
        least = ranks.least([ranks.rank, 5 - ranks.rank])
        gathered, told = ranks.gather(ranks.rank), ranks.broadcast(f"of {ranks.rank}")
        return gathered, told, least, ranks.total(own).tolist()

    assert on_ranks(3, work) == [([0, 1, 2], "of 0", [0, 3], [111.0, 111.0])] * 3


def test_the_ranks_of_an_engine_are_its_own(monkeypatch):
    """`tensorrt_llm/_utils.py` (1.2 @3277953), on rank 1 of 2."""
    engine = ModuleType("tensorrt_llm._utils")
    engine.mpi_rank, engine.mpi_world_size = lambda: 1, lambda: 2
    engine.mpi_allgather = lambda value: ["of rank 0", value]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", engine)
    found = ranks_of(2)
    assert (found.rank, found.size, found.gather("own")) == (1, 2, ["of rank 0", "own"])
    assert ranks_of(4) is None
    del engine.mpi_allgather
    assert ranks_of(2) is None


def test_ranks_that_cannot_talk_reuse_nothing():
    runtime = Runtime()
    join_ranks(runtime, 2)
    assert (runtime.refusal, runtime.ranks.size) == ("ranks_unknown", 1)
    alone = Runtime()
    join_ranks(alone, 1)
    assert alone.refusal is None


def test_a_refusal_of_one_rank_is_that_of_all():
    def start(ranks):
        runtime = Runtime(ranks=ranks, refusal="pool_layout" if ranks.rank == 1 else None)
        agree_on_start(runtime, None)
        return runtime.refusal

    assert on_ranks(3, start) == ["pool_layout"] * 3


def test_an_error_of_one_rank_is_raised_on_all():
    def start(ranks):
        own = ConfigurationError("no memory") if ranks.rank == 1 else None
        with pytest.raises(ConfigurationError) as raised:
            agree_on_start(Runtime(ranks=ranks), own)
        return str(raised.value)

    assert on_ranks(2, start) == ["another rank cannot start: no memory", "no memory"]


@pytest.mark.promise("engines", "What one rank refuses, all refuse;...")
def test_ranks_of_two_versions_refuse(monkeypatch):
    other = ("0.0.0", None, None)
    runtime = Runtime(ranks=EngineRanks(0, 2, lambda own: [own, other]))
    agree_on_start(runtime, None)
    assert runtime.refusal == "metadata_version"
    monkeypatch.setattr(worker, "__version__", "0.0.0")
    same = Runtime(ranks=EngineRanks(0, 2, lambda own: [own, other]))
    agree_on_start(same, None)
    assert same.refusal is None


def test_a_plan_is_used_where_every_rank_has_placed_it():
    plans = ["first", "second", "third"]
    own = ValueError("own reason")

    def load(ranks):
        return agree_on_loads(ranks, plans, {2: own} if ranks.rank == 1 else {}, weights_changes=3 * ranks.rank)

    (first, seen), (second, known) = on_ranks(2, load)
    assert seen == known == 3
    assert list(first) == list(second) == [2]
    assert isinstance(first[2], DonorUnavailableError)
    assert second[2] is own


def test_without_plans_nothing_is_said():
    def fail(_):
        raise AssertionError("the other ranks do not listen")

    assert agree_on_loads(EngineRanks(0, 2, fail), [], {}, 1) == ({}, 1)


def test_what_another_rank_could_not_do_is_an_error_here(monkeypatch):
    monkeypatch.setattr(TorchRanks, "least", lambda _, values: [0, *values[1:]])
    ranks = TorchRanks.__new__(TorchRanks)  # joins no group
    with pytest.raises(DonorUnavailableError, match="another rank could not do its part"):
        ranks.together(lambda: "done")
