"""What a user of vLLM gets: answers that equal vLLM's own, from other requests' KV."""

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

from semblend_trt.outcome import VLLM_RECEIPT
from tests.engine_wrapper.vllm.conftest import DOCUMENT, DONOR, MOVED, NEW, WHOLE, assert_cold, both_modes, taught

pytestmark = pytest.mark.every_version


def test_without_a_plan_answers_are_vllms_own_to_the_bit(engine, cold):
    served = engine("position_fix")
    for prompt in (DONOR, NEW):
        assert served.ask(prompt, max_tokens=16) == cold(prompt)


def test_text_that_vllm_has_forgotten_comes_back(engine, cold):
    served = taught(engine("position_fix"))
    [answer] = assert_cold(served, cold, DONOR)
    assert answer.cached == len(DONOR) - 1


def test_a_document_that_moved_is_reused_and_its_holes_are_computed(engine):
    served = taught(engine("position_fix"))
    asks_for_exact = {"kv_transfer_params": {"semblend.exact_only": True}}
    assert served.ask([*range(100, 121), *DOCUMENT], extra_args=asks_for_exact).cached == 0
    answer = served.ask(MOVED)
    assert answer.cached == len(DOCUMENT)  # what was promised in front of it was computed


def test_with_all_layers_computed_again_answers_are_cold_ones(engine, cold):
    served = taught(engine(*WHOLE))
    [answer] = assert_cold(served, cold, MOVED)
    assert answer.cached == 0 < served.offered


def test_a_beam_search_and_answers_to_one_prompt_leave_a_donor_each(engine):
    served = engine("position_fix")
    served.llm.beam_search([{"prompt_token_ids": DONOR}], BeamSearchParams(beam_width=4, max_tokens=8))
    served.settle()
    catalog = served.scheduler.donor_index.catalog
    assert catalog.stats().ready == 1
    several = SamplingParams(n=3, max_tokens=64, temperature=1.0, seed=1, ignore_eos=True, detokenize=False)
    served.llm.generate([{"prompt_token_ids": NEW}], several, use_tqdm=False)
    served.settle()
    assert (catalog.stats().ready, catalog.stats().saving) == (2, 0)


def test_nothing_that_was_computed_before_a_reset_is_reused(engine, cold):
    served = taught(engine("position_fix"))
    assert served.llm.reset_prefix_cache(reset_connector=True)
    assert served.ask(MOVED, max_tokens=16) == cold(MOVED)
    served.llm.reset_prefix_cache(reset_connector=True)
    served.settle()
    served.forget()
    assert served.ask(MOVED, max_tokens=16) == cold(MOVED)
    served.settle()
    served.forget()
    assert served.ask(DONOR).cached > 400


def test_a_reset_that_fails_is_told_and_nothing_is_reused(engine, cold, monkeypatch):
    served = taught(engine("position_fix"))
    with monkeypatch.context() as change:
        change.setattr(served.scheduler.donor_index, "lost_all", lambda: 1 / 0)
        assert not served.llm.reset_prefix_cache(reset_connector=True)
    assert (served.faults, served.ask(MOVED, max_tokens=16)) == ({"reset_cache": 1}, cold(MOVED))


@both_modes
@pytest.mark.usefixtures("is_async")
def test_an_answer_that_a_stop_string_ends_carries_its_receipt(engine):
    served = taught(engine("position_fix"))

    def answer(**options):
        params = SamplingParams(max_tokens=16, temperature=0, **options)
        [output] = served.llm.generate([{"prompt_token_ids": MOVED}], params, use_tqdm=False)
        served.settle()
        served.forget()
        return output.outputs[0], output.kv_transfer_params[VLLM_RECEIPT]

    whole, _ = answer()
    text = whole.text.strip()
    for stop in (text[0], text[len(text) // 2 :][:3]):  # at the first token, and on the way
        stopped, receipt = answer(stop=[stop])
        assert (stopped.stop_reason, receipt["outcome"]) == (stop, "backend_materialized_reuse")
        assert receipt["reused_tokens"] >= len(DOCUMENT)
