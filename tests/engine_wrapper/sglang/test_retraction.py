"""A request that nothing can compute in its step begins again, and is served cold."""

import pytest
from sglang.srt.managers import schedule_batch

from engine_wrapper.sglang.planned_forward import PlannedForward
from tests.builders.vllm import MOVED, NEW, assert_cold
from tests.engine_wrapper.sglang.conftest import CHUNKS, PAGES, PLAIN
from tests.engine_wrapper.watching import failing
from validation.sglang_engine import Ask


@pytest.mark.promise("engines", "In SGLang no fault of ours...")
@pytest.mark.parametrize("options", [PLAIN, {}, CHUNKS], ids=["plain", "overlap", "chunks"])
def test_a_request_that_nothing_can_compute_now_begins_again(serve, cold, monkeypatch, options):
    with serve(**options) as served:
        served.teach()
        for name in ("_planned", "_whole"):
            failing(monkeypatch, PlannedForward, name, RuntimeError, once=False)
        neighbour, moved = assert_cold(served, cold, NEW, MOVED)
        assert (neighbour.retractions, moved.retractions) == (0, 1)
        assert served.faults["planned_forward"] == served.faults["plan_not_executed"] == 1
        assert moved.receipt["outcome"] == "cold_fallback"


@pytest.mark.promise("engines", "In SGLang no fault of ours...")
@pytest.mark.parametrize(
    ("owner", "name", "options"),
    [
        (schedule_batch.ScheduleBatch, "release_req", {}),
        (schedule_batch, "release_kv_cache", CHUNKS),
        (schedule_batch, "evict_from_tree_cache", {}),
    ],
    ids=["overlap", "chunks", "released"],
)
def test_a_retraction_that_sglang_cannot_end_harms_that_request_alone(serve, cold, monkeypatch, owner, name, options):
    """Where its slots are back, it begins again; it is aborted if not."""
    with serve(**options) as served:
        served.teach()
        with monkeypatch.context() as patch:
            for each in ((PlannedForward, "_planned"), (PlannedForward, "_whole"), (owner, name)):
                failing(patch, *each, RuntimeError, once=False)
            neighbour, moved = served.local.ask(*(Ask(each, {"max_new_tokens": 8}) for each in (NEW, MOVED)))
        assert list(neighbour.output_ids) == cold(NEW).tokens
        is_back = name == "evict_from_tree_cache"
        assert (moved.finished_reason.to_json()["type"] != "abort") == is_back
        assert (list(moved.output_ids) == cold(MOVED).tokens) == is_back
        assert served.faults["plan_not_executed"] == 1
        served.local.ask()  # SGLang looks for slots that nothing owns
        (again,) = assert_cold(served, cold, MOVED)
        assert (again.cached > 1) == is_back  # nothing of an aborted request is in the prefix cache


@pytest.mark.parametrize("options", [{}, PAGES], ids=["slots", "pages"])
def test_retracted_requests_answer_as_cold_ones(serve, cold, options, monkeypatch):
    """SGLang retracts while they decode, and looks them up again."""
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", True)
    with serve(**options) as served:
        served.teach()
        found = assert_cold(served, cold, MOVED, NEW)
        assert sum(each.retractions for each in found) > 0
