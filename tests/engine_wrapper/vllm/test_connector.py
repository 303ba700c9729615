"""What a user of vLLM gets: answers that equal vLLM's own, from other requests' KV."""

import threading

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from semblend_trt.outcome import VLLM_RECEIPT
from tests.builders.vllm import DOCUMENT, DONOR, MOVED, NEW, WHOLE, assert_cold, both_modes, is_cold, taught

pytestmark = pytest.mark.every_version


@pytest.mark.promise(
    "engines",
    "In vLLM answers without a plan are its own to the bit, and with all layers computed again those of a cold run",
)
def test_without_a_plan_answers_are_vllms_own_to_the_bit(engine, cold):
    served = engine("position_fix", {"min_saving": 1e-9})
    for prompt in (DONOR, NEW):  # after the first one it is measured what plans cost
        assert served.ask(prompt, max_tokens=8) == cold(prompt)
    assert served.runtime.costs.cold(0, 2000) > served.runtime.costs.cold(0, 100) > 0


def test_a_document_that_moved_is_reused_and_its_holes_are_computed(engine):
    served = taught(engine("position_fix", kept=True))
    asks_for_exact = {"kv_transfer_params": {"semblend.exact_only": True}}
    assert served.ask([*range(100, 121), *DOCUMENT], extra_args=asks_for_exact).cached == 0
    assert served.ask(MOVED).cached == len(DOCUMENT)  # what was promised in front of it was computed


@pytest.mark.promise(
    "engines",
    "In vLLM a request right after an answer finds its donor in the blocks that vLLM holds, and none whose forward "
    "failed",
)
@both_modes
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "its last forward failed"])
def test_a_request_right_after_an_answer_finds_its_donor_in_the_blocks_that_vllm_holds(
    engine, cold, is_async, is_whole, monkeypatch
):
    """Its save begins in the step that loads from it, and ends here after the second request has."""
    served, go_on = taught(engine("position_fix", kept=True), NEW), threading.Event()
    worker, saver = served.worker._worker, served.worker._worker.saver
    save = saver._save
    with monkeypatch.context() as change:
        change.setattr(saver, "_save", lambda own: (go_on.wait(60), save(own))[1])
        if not is_whole:
            change.setattr(worker, "_is_whole", lambda followed: False)
        try:
            served.ask(DONOR, max_tokens=1)
            answers = [served.ask(MOVED, max_tokens=8) for _ in range(2)]
            catalog = served.scheduler.donor_index.catalog.stats()
        finally:
            go_on.set()
    if not is_whole:
        assert answers[0].cached == 0
        assert answers[0].tokens == answers[1].tokens == cold(MOVED).tokens
        return
    assert all(each.cached >= len(DOCUMENT) for each in answers)
    assert catalog.saving >= 1
    served.emptied()
    assert is_cold(served.ask(MOVED, max_tokens=8), answers[0])  # from its tier the same KV comes


@pytest.mark.promise("donors", "A text is kept once, and...")
def test_a_beam_search_and_answers_to_one_prompt_leave_a_donor_each(engine):
    served = engine("position_fix", kept=True)
    served.llm.beam_search([{"prompt_token_ids": DONOR}], BeamSearchParams(beam_width=4, max_tokens=8))
    served.settle()
    catalog = served.scheduler.donor_index.catalog
    assert catalog.stats().ready == 1
    several = SamplingParams(n=3, max_tokens=64, temperature=1.0, seed=1, ignore_eos=True, detokenize=False)
    served.llm.generate([{"prompt_token_ids": NEW}], several, use_tqdm=False)
    served.settle()
    assert (catalog.stats().ready, catalog.stats().saving) == (2, 0)


@pytest.mark.promise(
    "engines", "After a reset of the connector's cache in vLLM nothing that was computed before it is reused"
)
def test_nothing_that_was_computed_before_a_reset_is_reused(engine, cold, monkeypatch):
    """If the reset fails, vLLM is told, and nothing is reused either."""
    served = taught(engine("position_fix", kept=True))
    assert served.llm.reset_prefix_cache(reset_connector=True)
    assert served.ask(MOVED, max_tokens=8) == cold(MOVED)
    served.llm.reset_prefix_cache(reset_connector=True)
    served.emptied()
    assert served.ask(MOVED, max_tokens=8) == cold(MOVED)
    served.emptied()
    assert served.ask(DONOR).cached > 400
    with monkeypatch.context() as change:
        change.setattr(served.scheduler.donor_index, "lost_all", lambda: 1 / 0)
        assert not served.llm.reset_prefix_cache(reset_connector=True)
    assert (served.faults, served.ask(MOVED, max_tokens=8)) == ({"reset_cache": 1}, cold(MOVED))


@both_modes
@pytest.mark.usefixtures("is_async")
def test_an_answer_that_a_stop_string_ends_carries_its_receipt(engine):
    served = taught(engine("position_fix", kept=True))

    def answer(**options):
        params = SamplingParams(max_tokens=8, temperature=0, **options)
        [output] = served.llm.generate([{"prompt_token_ids": MOVED}], params, use_tqdm=False)
        served.emptied()
        return output.outputs[0], output.kv_transfer_params[VLLM_RECEIPT]

    whole, _ = answer()
    text = whole.text.strip()
    for stop in (text[0], text[len(text) // 2 :][:3]):  # at the first token, and on the way
        stopped, receipt = answer(stop=[stop])
        assert (stopped.stop_reason, receipt["outcome"]) == (stop, "backend_materialized_reuse")
        assert receipt["reused_tokens"] >= len(DOCUMENT)


def test_donors_on_disk_outlive_their_engine(engine, cold, tmp_path):
    disk = {"disk_path": str(tmp_path / "donors"), "disk_bytes": 1 << 30, "disk_key_path": str(tmp_path / "key")}
    own = WHOLE[1] | disk
    served = taught(engine(WHOLE[0], own))
    served.worker._worker.transfers.drain()
    served.settle()  # a step orders the write, another one tells its end
    served = engine(WHOLE[0], own | {"min_donor_tokens": 4096})
    served.worker._worker.transfers.drain()
    served.ask(NEW, max_tokens=1)
    while served.runtime.disk.found:
        served.ask(NEW, max_tokens=1)
    assert served.scheduler.donor_index.catalog.stats().resting == 1
    for is_there in (False, True):
        assert_cold(served, cold, MOVED)
        assert (served.offered > 400, served.report().reason == "donor_on_disk") == (is_there, not is_there)
        served.worker._worker.transfers.drain()
        served.emptied()
