"""Faults before and inside a forward with a plan: the engine of 1.4 lives on in both loops, and no token is wrong."""

import pytest
import torch

from engine_wrapper import batch as batch_module
from engine_wrapper.batch import Batch, EngineForward
from engine_wrapper.connector import SemBlendKvConnectorWorker
from engine_wrapper.embedded.llm import SamplingParams
from engine_wrapper.layer_schedule import DeviationCheck
from engine_wrapper.trtllm import planned_forward, planned_rows
from engine_wrapper.trtllm.planned_forward import PlannedDecoder, PlannedForward
from engine_wrapper.trtllm.planned_rows import PlannedRows
from semblend_trt.connector import worker as worker_module
from semblend_trt.donors.store import DonorStore
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from semblend_trt.runtime import Runtime
from semblend_trt.transfer import load as load_module
from semblend_trt.transfer.load import PlanLoader
from tests.builders.engine import evict_prefixes, text
from tests.engine_wrapper.trtllm.stand_ins import KVCacheManagerV2, TrtllmRunner, engine_of
from tests.engine_wrapper.watching import failing

FEW = SamplingParams(max_tokens=3, ignore_eos=True)
DOCUMENT, DONOR = text(1, 90), [*text(3, 10), *text(1, 90), *text(4, 5)]
PLANNED, RUNNING, COLD = [*text(5, 21), *DOCUMENT, *text(7, 9)], text(8, 70), text(9, 40)

INSIDE = [
    *((planned_forward, name) for name in ("batch_of_call", "hooked_layers")),
    *((batch_module, name) for name in ("works_of", "micro_batches", "schedule_of")),
    (EngineForward, "hidden"),
    *((planned_rows, name) for name in ("rotary_factors", "rotate", "write_rows", "sparse_prefill")),
    *((PlannedRows, name) for name in ("__init__", "begin", "attend", "finish", "_enter", "_decide")),
    *((owner, "run") for owner in (PlannedDecoder, Batch)),
    *((KVCacheManagerV2, "get_page_indices_by_layer_group"), (PlannedForward, "_in_its_blocks")),
    *((DeviationCheck, "deviations"), (DeviationCheck, "decide"), (Runtime, "note_evidence")),
]
BEFORE = [
    *((worker_module, name) for name in ("readable_metadata", "agree_on_loads")),
    *((SemBlendKvConnectorWorker, name) for name in ("_make_room", "_follow", "_load")),
    *((PlanLoader, name) for name in ("load", "_prepare", "_issue")),
    *((DonorStore, "reading"), (load_module, "prepared"), (load_module, "moves_of"), (load_module, "target_of")),
]
# Each once, so that the second try holds; those inside also at every call, and with another error.
FAULTS = [
    *((owner, name, RuntimeError, True) for owner, name in (*BEFORE, *INSIDE)),
    *((owner, name, torch.OutOfMemoryError, False) for owner, name in INSIDE),
]


@pytest.fixture(scope="module")
def runner(tiny_qwen2_path):
    runner = TrtllmRunner(tiny_qwen2_path, device="cpu")
    runner.watches = False
    return runner


@pytest.fixture(scope="module")
def served(tiny_qwen2_path, runner, tmp_path_factory):
    """An environment in which a plan is checked and every token of it computed, and the answers of a cold engine."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("SEMBLEND_POLICY", "verified")
        patches.setenv("SEMBLEND_MIN_SPAN", "32")
        patches.setenv("SEMBLEND_EMBEDDER", "off")
        with engine_of(tiny_qwen2_path, runner) as llm:
            answers = {tuple(each): tokens_of(llm, each) for each in (PLANNED, RUNNING, COLD)}
            namespace, geometry = llm.connector_scheduler.namespace, llm.executor.model_runner.geometry
        check, path = ProfileCheck(layer=1, threshold=1e-9), tmp_path_factory.mktemp("profile") / "profile.json"
        ReuseProfile.made_for(namespace, geometry, policy="verified", check=check).write(path)
        patches.setenv("SEMBLEND_PROFILE", str(path))
        yield answers


def tokens_of(llm, prompt):
    return llm.generate([prompt], FEW)[0].outputs[0].token_ids


@pytest.mark.promise(
    "engines", "No fault before or inside a forward with a plan ends the engine of one rank or harms a neighbour"
)
@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize(
    ("owner", "name", "error", "once"),
    FAULTS,
    ids=[f"{name}-{'once' if once else 'always'}" for _, name, _, once in FAULTS],
)
def test_no_fault_ends_the_engine_or_harms_a_neighbour(
    tiny_qwen2_path, runner, served, monkeypatch, owner, name, error, once, overlap
):
    with engine_of(tiny_qwen2_path, runner, overlap=overlap) as llm:
        llm.generate([DONOR], FEW)
        llm.settle()
        evict_prefixes(llm)
        running = llm.generate_async(RUNNING, FEW)
        next(running)
        with monkeypatch.context() as patches:
            has_failed = failing(patches, owner, name, error, once)
            planned, cold = (llm.generate_async(each, FEW, streaming=False) for each in (PLANNED, COLD))
            llm.executor.step()
            assert has_failed()
            outputs = [list(each)[-1] for each in (running, cold, planned)]
        *neighbours, answer = [output.outputs[0] for output in outputs]
        assert [each.token_ids for each in neighbours] == [served[tuple(each)] for each in (RUNNING, COLD)]
        assert answer.finish_reason == "error" or answer.token_ids == served[tuple(PLANNED)]
        assert answer.finish_reason == "length" or not once
        assert tokens_of(llm, PLANNED) == served[tuple(PLANNED)], "also afterwards"
        llm.settle()
        assert (llm.executor.failure, llm.block_manager.num_free_blocks) == (None, llm.block_manager.num_blocks)
        assert llm.connector_scheduler.donor_index.catalog.stats().leases == 0
