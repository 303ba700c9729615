"""Faults around a forward with a plan: SGLang lives on, neighbours are unharmed, and no token is wrong."""

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from engine_wrapper import batch as batch_module
from engine_wrapper.batch import Batch, EngineForward
from engine_wrapper.layer_schedule import DeviationCheck
from engine_wrapper.sglang import planned_forward, rows
from engine_wrapper.sglang.planned_forward import PlannedForward
from engine_wrapper.sglang.radix_cache import SemBlendRadixCache
from engine_wrapper.sglang.requests import Requests, RequestView, SglangScheduler
from engine_wrapper.sglang.rows import Decoder, SglangRows
from engine_wrapper.sglang.worker import SglangWorker
from semblend_trt.connector import SemBlendKvConnectorScheduler, SemBlendKvConnectorWorker
from semblend_trt.connector import worker as worker_module
from semblend_trt.connector.lookup import Lookup
from semblend_trt.donors.donor_index import DonorIndex
from semblend_trt.donors.store import DonorStore
from semblend_trt.plan import EngineMode, SemanticKvPlan
from semblend_trt.runtime import ActivePlans, Runtime
from semblend_trt.transfer import load as load_module
from semblend_trt.transfer.load import PlanLoader
from semblend_trt.transfer.save import DonorSaver
from tests.builders.vllm import DONOR, MOVED, NEW, assert_cold
from tests.engine_wrapper.sglang.conftest import serving
from tests.engine_wrapper.watching import failing

INSIDE = [
    *((batch_module, "works_of"), (EngineForward, "hidden"), (EngineForward, "_decided")),
    *((planned_forward, name) for name in ("micro_batches", "schedule_of", "follow_all")),
    *((rows, name) for name in ("rows_batch", "in_forward", "write_rows", "sparse_prefill", "take_fresh")),
    *((SglangRows, name) for name in ("__init__", "__enter__", "enter", "run", "compare", "_attend", "output")),
    *((Decoder, name) for name in ("attention", "cache", "by_head")),
    *((PlannedForward, name) for name in ("_planned", "_forward", "_slots")),
    *((DeviationCheck, "deviations"), (DeviationCheck, "decide"), (Runtime, "note_evidence"), (Batch, "run")),
]
AROUND = [
    *((Requests, name) for name in ("step", "begun")),
    *((RequestView, name) for name in ("__init__", "token_array")),
    *((SglangWorker, "_place"), (PlannedForward, "run"), (ActivePlans, "take_all"), (ActivePlans, "put")),
    *((SemBlendKvConnectorScheduler, name) for name in ("build_connector_meta", "_metadata_of", "_look_up")),
    *((SglangScheduler, name) for name in ("get_num_new_matched_tokens", "update_state_after_alloc", "ended")),
    *((SglangScheduler, "request_finished"), (SglangScheduler, "give_receipt"), (SemBlendRadixCache, "_decline")),
    *((SemBlendKvConnectorWorker, name) for name in ("start_load_kv", "_make_room", "_follow", "_load")),
    *((SemBlendKvConnectorWorker, name) for name in ("wait_for_save", "get_finished")),
    *((worker_module, "readable_metadata"), (SemBlendKvConnectorScheduler, "take_events")),
    *((PlanLoader, name) for name in ("load", "_prepare", "_issue")),
    *((DonorStore, "reading"), (load_module, "prepared"), (load_module, "moves_of"), (load_module, "target_of")),
    *((Lookup, "look_up"), (DonorIndex, "begin_save"), (DonorSaver, "start"), (DonorSaver, "finished")),
    (SemanticKvPlan, "with_target_blocks"),
]
FAULTS = [
    *((owner, name, RuntimeError, True) for owner, name in (*AROUND, *INSIDE)),
    *((owner, name, torch.OutOfMemoryError, False) for owner, name in INSIDE),
]
# These may not be reached by every request with a plan.
NOT_ALWAYS = {"_decline", "output"}


@pytest.fixture(scope="module")
def served(profile_at, cold):
    """One engine in which a plan is checked and every token of it computed."""
    with serving(pytest.MonkeyPatch(), profile_at({"layer": 1, "threshold": 1e-9})) as served:
        served.are_faults_read = True
        yield served.teach()


def ready(served):
    """The engine as it was before the last fault: with the donor, and nothing in SGLang's own prefix cache."""
    served.runtime.refusal, served.runtime.mode = None, EngineMode.WRAPPER
    served.runtime.faults.clear()
    served.scheduler.forget_donors()
    served.cache.evict(EvictParams(num_tokens=1 << 20))
    served.ask(DONOR, max_tokens=1)
    served.settle()
    served.cache.evict(EvictParams(num_tokens=1 << 20))


def test_there_are_as_many_kinds_as_are_promised():
    assert len(FAULTS) >= 54


@pytest.mark.promise(
    "engines",
    "In SGLang no fault of ours ends the engine or harms a neighbour; what nothing can compute now begins again",
)
@pytest.mark.parametrize(
    ("owner", "name", "error", "once"),
    FAULTS,
    ids=[
        f"{getattr(owner, '__qualname__', owner.__name__)}.{name}-{'once' if once else 'always'}"
        for owner, name, _, once in FAULTS
    ],
)
def test_no_fault_ends_the_engine_or_harms_a_neighbour(served, cold, monkeypatch, owner, name, error, once):
    ready(served)
    with monkeypatch.context() as patch:
        has_failed = failing(patch, owner, name, error, once)
        assert_cold(served, cold, NEW, MOVED)
        assert has_failed() or name in NOT_ALWAYS
    served.settle()
    assert_cold(served, cold, MOVED)
    served.local.ask()  # SGLang looks for slots that nothing owns
