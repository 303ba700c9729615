"""Two ranks of tensor parallelism: one decision for both, and what one rank cannot do is computed by both."""

import pytest
from torch.cuda import device_count, is_available
from torch.distributed import get_rank

from semblend_trt.outcome import VLLM_RECEIPT
from semblend_trt.reuse_profile import ReuseProfile
from tests.engine_wrapper.vllm.conftest import DOCUMENT, DONOR, MOVED, NEW, WHOLE, checked_at, cold_answers, near

pytestmark = pytest.mark.skipif(is_available() and device_count() < 2, reason="skipped: two ranks need two cards")
CHECK = {"layer": 2, "threshold": 0.05}


@pytest.fixture(scope="module")
def cold():
    """Answers of one rank: two add up in another order."""
    return cold_answers(DONOR, MOVED, NEW)


@pytest.fixture
def two(engine, monkeypatch):
    """Makes an engine of two ranks."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")

    def make(policy, settings=None):
        served = engine(policy, {"min_saving": 0, **(settings or {})}, tensor_parallel_size=2)
        assert served.scheduler.namespace is None or served.scheduler.namespace.tensor_parallel["tp_size"] == 2
        return served

    return make


def ask(served, prompt):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=16, temperature=0, logprobs=1, detokenize=False)
    [output] = served.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    [own] = output.outputs
    return [*own.token_ids], [next(iter(each.values())).logprob for each in own.logprobs], output


def assert_cold(served, prompt, cold):
    tokens, logprobs, output = ask(served, prompt)
    assert tokens == cold(prompt).tokens
    assert near(logprobs, cold(prompt).logprobs)
    receipt = output.kv_transfer_params[VLLM_RECEIPT]
    assert output.num_cached_tokens == receipt["exact_prefix_tokens"] + receipt["reused_tokens"]
    return receipt


def taught(served, *donors):
    for donor in (NEW, *donors):  # the first prompt is computed again
        ask(served, donor)
    served.settle()
    served.forget()
    assert served.runtime.mode.value == "wrapper"


def lose_donors(worker):
    """On the second rank alone."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if get_rank() == 1:
        get_kv_transfer_group()._worker._worker.store.clear()


def fail_forward(worker):
    """On the second rank alone, once, after its last layer: before, the first rank would wait for it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if get_rank() == 1:
        forward, calls = get_kv_transfer_group()._worker._forward, []
        planned = forward._planned

        def fails(*given):
            found = planned(*given)
            calls.append(found)
            if len(calls) == 1:
                raise RuntimeError("the second rank fails")
            return found

        forward._planned = fails


def test_two_ranks_answer_as_one_and_what_one_cannot_do_both_compute(two, cold):
    served = two(*WHOLE)
    taught(served, DONOR)
    assert assert_cold(served, MOVED, cold)["offered_tokens"] == len(DOCUMENT)
    served.settle()
    served.forget()
    served.llm.collective_rpc(lose_donors)
    receipt = assert_cold(served, MOVED, cold)
    assert (receipt["outcome"], receipt["reason"]) == ("backend_declined_reuse", "load_failed")
    assert served.refusal is None
    served.settle()
    served.forget()
    taught(served, DONOR)
    served.llm.collective_rpc(fail_forward)
    receipt = assert_cold(served, MOVED, cold)
    assert (receipt["reason"], served.refusal) == ("load_failed", "planned_forward")
    assert served.faults["planned_forward"] > 0


def test_a_check_adds_up_over_the_ranks_and_a_profile_names_their_number(engine, two, tmp_path):
    found, profiles = [], []
    for make in (engine, two):
        served = make("position_fix", {"min_saving": 0})
        taught(served)
        namespace, geometry = served.scheduler.namespace, served.runtime.pool.geometry
        settings = checked_at(served, tmp_path, **CHECK)
        for of_one_rank in profiles:
            assert any("parallel layout" in each for each in of_one_rank.differences(namespace, geometry))
        profiles.append(ReuseProfile.read(tmp_path / "profile.json"))
        served = make("boundary", {"min_saving": 0, **settings})
        taught(served, DONOR)
        found.append(ask(served, MOVED)[2].kv_transfer_params[VLLM_RECEIPT])
    one, both = found
    assert 0 < one["reused_tokens"] < one["checked_tokens"] == both["checked_tokens"] == len(DOCUMENT)
    assert both["reused_tokens"] == pytest.approx(one["reused_tokens"], abs=2)
    assert both["largest_kept"] == pytest.approx(one["largest_kept"], rel=1e-2)
