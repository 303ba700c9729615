"""Plans beside other requests and in parts: every answer is the one without reuse."""

import pytest

from engine_wrapper.vllm.attention import VllmRows
from tests.engine_wrapper.vllm.conftest import WHOLE, assert_cold, cold_answers, random_tokens, taught
from tests.engine_wrapper.watching import watched

some = random_tokens(1)
DOCUMENTS = [some(500) for _ in range(2)]
DONORS = [[*some(20 + 9 * i), *document, *some(20)] for i, document in enumerate(DOCUMENTS)]
MOVED = [[*some(33 + 5 * i), *document, *some(70)] for i, document in enumerate(DOCUMENTS)]
NEW = some(150)


@pytest.fixture(scope="module")
def cold():
    return cold_answers(*DONORS, *MOVED, NEW)


def test_several_plans_run_in_one_step_beside_a_cold_prompt_and_decodes(engine, cold):
    served = taught(engine(*WHOLE), *DONORS)
    assert_cold(served, cold, MOVED[0], NEW, MOVED[1])
    assert [each > 400 for each in served.offered_of(3)] == [True, False, True]
    served = taught(engine(*WHOLE, max_num_seqs=2), *DONORS)
    assert_cold(served, cold, NEW, MOVED[0], DONORS[0], MOVED[1])
    assert served.offered_of(4)[1] > 400


@pytest.mark.parametrize("policy", [WHOLE, ("verified",)], ids=["boundary", "verified"])
def test_a_plan_is_cut_to_the_budget_of_a_step(engine, cold, policy, monkeypatch):
    served = taught(engine(*policy, max_num_batched_tokens=128, max_num_seqs=4), *DONORS)
    rows = watched(monkeypatch, VllmRows, "enter", lambda _, __, stage: stage.num_rows)
    found = served.ask(*MOVED, max_tokens=16)
    assert [each.tokens for each in found] == [cold(each).tokens for each in MOVED]
    assert min(served.offered_of(2)) > 400
    assert 0 < max(rows) <= 128


@pytest.mark.every_version
def test_approximate_kv_is_never_published(engine, cold):
    served = taught(engine("position_fix"), *DONORS)
    assert served.ask(MOVED[0], max_tokens=40).cached > 400
    served.runtime.refusal = "test"
    [again] = assert_cold(served, cold, MOVED[0])
    assert again.cached <= MOVED[0].index(DOCUMENTS[0][0])


def test_salts_keep_texts_apart(engine, cold):
    served = engine("position_fix")
    served.ask(DONORS[0], max_tokens=1, salts=["a"])
    served.settle()
    for salt in ("b", None):
        [answer] = assert_cold(served, cold, MOVED[0], salts=[salt])
        assert answer.cached == 0
    assert served.ask(MOVED[0], salts=["a"]).cached > 400


def test_requests_that_are_preempted_come_back_with_their_answers(engine, cold, monkeypatch):
    # Both prompts have 19 blocks, and the first tokens of the second one's answer lie in another.
    served = taught(engine(*WHOLE, num_gpu_blocks_override=39, max_model_len=1024), *DONORS)
    times = watched(monkeypatch, served.core.scheduler, "_preempt_request", lambda *_, **__: 1)
    assert_cold(served, cold, *MOVED)
    assert times
