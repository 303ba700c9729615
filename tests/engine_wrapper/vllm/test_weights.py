"""Weights that are written in a running vLLM: nothing that other weights computed is used afterwards."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from semblend_trt.outcome import Outcome
from tests.builders.vllm import DONOR, FP8, MOVED, near, serving, some, taught, while_another_decodes
from validation.models import shipped_model

pytestmark = pytest.mark.every_version
PROMPTS = [[*DONOR, *some(20 + each)] if each % 2 else [*some(50 + each), *MOVED[70:]] for each in range(6)]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The shipped model's files with other weights."""
    path = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(shipped_model(), path)
    torch.manual_seed(5)
    for file in path.glob("*.safetensors"):
        changed = {name: each + 0.05 * each.std() * torch.randn_like(each) for name, each in load_file(file).items()}
        save_file(changed, file, {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def answers(other):
    served = serving(enable_prefix_caching=False)
    try:
        found = {}
        for name, path in (("other", other), ("shipped", shipped_model())):
            reload(served, path)
            found[name] = {tuple(each): served.ask(each, max_tokens=1) for each in (DONOR, MOVED, *PROMPTS)}
        return found
    finally:
        served.close()


def reload(served, path):
    served.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})


def write(worker):
    """A user's own function: torch counts no write through `data`."""
    for each in worker.model_runner.get_model().parameters():
        each.data.copy_(each.data * 1.1)


def assert_cold(served, expected, prompts):
    """The first tokens are those of a cold run; returns the tokens that each prompt reused."""
    found = []
    for prompt in prompts:
        served.forget()
        answer, cold = served.ask(prompt, max_tokens=1), expected[tuple(prompt)]
        found.append(reused(served))
        # What a check keeps of moved text is not the cold run's to the last digit.
        is_checked = found[-1] and prompt[: len(DONOR)] != DONOR
        assert near(answer.logprobs, cold.logprobs, 0.2 if is_checked else 0.0)
        assert answer.tokens == cold.tokens
    return found


def reused(served):
    report = served.report()
    return report.reused_tokens if report.outcome == Outcome.BACKEND_MATERIALIZED_REUSE else 0


@pytest.mark.promise("donors", "Once the weights of a running...")
@pytest.mark.parametrize("policy", ["exact", "verified"])
def test_no_token_is_of_weights_that_were_replaced(engine, other, answers, policy):
    served = taught(engine(policy))
    for turn, name in enumerate(["other", "shipped"]):
        reload(served, other if name == "other" else shipped_model())
        assert assert_cold(served, answers[name], [DONOR]) == [0]
        served.settle()
        found = assert_cold(served, answers[name], PROMPTS)
        assert all(found[1::2])
        moved = found[2::2]
        assert all(moved) if (policy, name) == ("verified", "shipped") else not any(moved)
        served.settle()
        assert served.runtime.weights_changes == turn + 1


def test_a_write_by_a_function_of_the_users_own_is_noticed_and_calls_that_write_nothing_cost_no_donor(engine):
    served = taught(engine("exact"))
    served.core.model_executor.collective_rpc(lambda worker: worker.model_runner.get_model().eval())
    served.ask(DONOR)
    assert reused(served) > 400
    assert not served.runtime.weights_changes
    served.core.model_executor.collective_rpc(write)
    served.emptied()
    served.ask(DONOR)
    assert (reused(served), served.runtime.weights_changes) == (0, 1)


@pytest.mark.promise("donors", "KV of an engine's prefix that is older than its weights becomes no donor")
def test_kv_of_vllms_own_stale_prefix_becomes_no_donor(engine, other, answers):
    served = engine("exact")
    served.ask(DONOR, max_tokens=1)
    reload(served, other)
    for prompt in (PROMPTS[1], PROMPTS[3]):  # the change is known when the second one comes
        assert served.ask(prompt, max_tokens=1).cached > 400  # vLLM's own, which was not reset
        served.settle()
    for expected in (False, True):
        assert (assert_cold(served, answers["other"], [PROMPTS[3]])[0] > 400) is expected
        served.settle()


def test_requests_that_run_meanwhile_leave_no_donor(engine, other, answers, monkeypatch):
    served = taught(engine("exact"))
    step, steps = served.llm.llm_engine.step, []

    def stepped():
        steps.append(1)
        if len(steps) == 5:
            reload(served, other)
        return step()

    monkeypatch.setattr(served.llm.llm_engine, "step", stepped)
    while_another_decodes(served)
    served.settle()
    assert not served.scheduler.donor_index.held().donors
    assert assert_cold(served, answers["other"], [MOVED, DONOR]) == [0, 0]


def rescale(worker):
    for each in worker.model_runner.get_model().modules():
        if hasattr(each, "_k_scale_float"):
            each._k_scale.fill_(0.5)
            each._k_scale_float = 0.5


def test_new_scales_of_an_fp8_cache_end_reuse(engine):
    served = taught(engine("exact", **FP8))
    served.core.model_executor.collective_rpc(rescale)
    served.forget()
    served.ask(DONOR)
    assert (reused(served), served.refusal) == (0, "kv_scales")
