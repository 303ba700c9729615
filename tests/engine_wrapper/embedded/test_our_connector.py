"""Our connector under every contract of the engine: it reuses, answers as cold, and holds nothing afterwards."""

import pytest

from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
from engine_wrapper.embedded.llm import SamplingParams
from semblend_trt.connector.requests import MAX_SILENT_ITERATIONS
from tests.builders.engine import evict_prefixes, text
from tests.engine_wrapper.embedded import conftest
from tests.engine_wrapper.embedded.conftest import BLOCK, SIX, TWO, answers, teach
from tests.engine_wrapper.embedded.test_contract_versions import ALL, FIELDS
from tests.semblend_trt.held_donors import SaverGate

MODULES = ["semblend_trt.connector", "engine_wrapper.connector"]
SHARED = text(0, 150)


@pytest.fixture
def make_ours(make_llm):
    return lambda contract, module=MODULES[0], **options: make_llm(module, contract=contract, POLICY="exact", **options)


def check_nothing_is_held(llm):
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    assert llm.connector_scheduler.donor_index.catalog.stats().leases == 0
    assert len(llm.connector_worker._followed) == 0
    assert not llm.connector_scheduler._runtime.faults


@pytest.mark.promise(
    "reuse", "Text that a donor has from position 0 on equals a cold run: in float32 the answers are the cold run's"
)
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("contract", ALL)
def test_ours_reuses_from_position_0_and_answers_as_cold(make_ours, cold, contract, overlap):
    llm = make_ours(contract, disable_overlap_scheduler=not overlap, max_num_tokens=64)
    donor = text(0, 200)
    teach(llm, donor)
    prompts = [donor[:150] + text(1, 40), text(2, 90)]
    outputs = llm.generate(prompts, SIX)
    llm.settle()
    assert answers(outputs) == cold(prompts)
    assert [output.reused_tokens for output in outputs] == [150, 0]
    check_nothing_is_held(llm)


def donors(llm):
    return len(llm.connector_scheduler.donor_index.catalog)


def check_answers(llm, cold, begin, reused, seed=9):
    evict_prefixes(llm)
    tokens = begin + text(seed, 40)
    (output,) = outputs = llm.generate([tokens], SIX)
    llm.settle()
    assert (answers(outputs), output.reused_tokens) == (cold([tokens]), reused)


@pytest.mark.promise("donors", "A request whose forward failed is no donor")
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("contract", FIELDS)
def test_a_failed_forward_makes_no_donor(make_ours, cold, contract, module, overlap):
    if contract == "1.4" and overlap:
        pytest.skip("a forward that fails there ends the engine")
    llm = make_ours(contract, module, disable_overlap_scheduler=not overlap, max_num_tokens=64)
    stream = llm.generate_async(SHARED + text(1, 40), SIX)
    llm.executor.step()
    with conftest.fails_once(llm.executor.model_runner, "forward"):
        llm.executor.step()
    assert next(stream).outputs[0].finish_reason == "error"
    llm.settle()
    check_answers(llm, cold, SHARED, reused=0)
    assert (donors(llm), llm.connector_scheduler.reuse_of(stream.request_id).reason) == (1, "forward_failed")
    check_answers(llm, cold, SHARED, reused=150, seed=2)
    llm.generate(
        [text(0, 5)], SamplingParams(max_tokens=MAX_SILENT_ITERATIONS + 2, ignore_eos=True)
    )  # 1.4 drops batches
    check_nothing_is_held(llm)


@pytest.mark.promise("donors", "A block into which the engine may copy without a word is not saved from")
@pytest.mark.parametrize(("floors", "partial", "kept"), [(True, True, 1), (True, False, 2), (False, True, 2)])
def test_a_block_into_which_the_engine_may_copy_without_a_word_costs_its_donor(
    make_ours, monkeypatch, floors, partial, kept
):
    """Main's V1 tells whole blocks of its own prefix alone."""
    ask = KvCacheConnectorManager.ask
    if floors:
        monkeypatch.setattr(
            KvCacheConnectorManager, "ask", lambda *args: ask(*args[:2], args[2] // BLOCK * BLOCK, args[3])
        )
    llm = make_ours("1.2", cache={"max_tokens": 32 * BLOCK, "enable_partial_reuse": partial})
    llm.generate([text(0, 20)], TWO)
    llm.generate([text(0, 15)], TWO)
    evict_prefixes(llm)
    with SaverGate(llm.connector_worker):
        llm.generate([text(1, 100)], TWO)
        *others, freed = llm.block_manager._free
        llm.generate([text(2, len(others) * BLOCK - 1)], TWO)
        assert llm.block_manager._free[0] == freed
        llm.generate([text(3, 5)], TWO)
    llm.settle()
    assert donors(llm) == kept
    check_nothing_is_held(llm)
