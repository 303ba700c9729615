"""What SGLang and its users do to requests and caches: nothing approximate is shared, and nothing is left behind."""

import pytest
import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from engine_wrapper.sglang.refusals import model_refusal_of
from tests.builders.vllm import DONOR, MOVED, assert_cold
from tests.engine_wrapper.sglang.conftest import OTHER, WHOLE, serving


@pytest.fixture(scope="module")
def kept(cold):
    """After the engine without SemBlend has ended."""
    with serving(pytest.MonkeyPatch(), WHOLE) as served:
        yield served


@pytest.fixture
def served(kept):
    """One engine for all tests, each time with the donor alone."""
    assert kept.local.scheduler.flush_cache()
    return kept.teach()


def test_an_exact_donor_is_reused_from_position_0(served, cold):
    served.cache.evict(EvictParams(num_tokens=1 << 20))
    (answer,) = assert_cold(served, cold, DONOR)
    assert answer.receipt["exact_prefix_tokens"] == 0
    assert answer.receipt["reused_tokens"] >= len(DONOR) - 2


@pytest.mark.promise("engines", "In SGLang salts keep requests apart, and a flush or other weights end donors")
@pytest.mark.parametrize("is_salt", [True, False], ids=["cache_salt", "extra_key"])
def test_salts_keep_requests_apart(served, is_salt):
    def asked(key, prompt):
        return served.ask(prompt, salts=[key] if is_salt else [], options={} if is_salt else {"extra_key": key})

    for key, donor in (("a", DONOR), ("b", OTHER)):
        asked(key, donor)
    served.settle()
    apart, same = (asked(key, MOVED).receipt["offered_tokens"] for key in ("c", "a"))
    assert apart == 0
    assert same >= 480


@pytest.mark.promise("engines", "In SGLang salts keep requests apart,...")
def test_a_flush_forgets_donors(served):
    assert served.local.scheduler.flush_cache()
    assert served.ask(MOVED).receipt["reason"] == "no_donor_match"


@pytest.mark.parametrize("steps", [0, 3])
def test_aborted_requests_leave_nothing(served, cold, steps):
    seen = []

    def abort():
        scheduler = served.local.scheduler
        seen.append(len(scheduler.waiting_queue) + len(scheduler.running_batch.reqs))
        if len(seen) == steps + 2:
            scheduler.abort_request(AbortReq(abort_all=True))

    served.local.on_step = abort
    served.ask(MOVED, max_tokens=64)
    served.local.on_step = lambda: None
    served.local.ask()
    assert not served.cache.requests
    assert_cold(served, cold, MOVED)


def test_prompts_with_log_probabilities_are_computed_in_full(served):
    assert served.ask(MOVED, options={"logprob_start_len": 0}).receipt["reason"] == "prompt_logprobs"
    assert served.ask(MOVED, custom_params={"semblend.cold": True}).receipt["reason"] == "cold_run"


@pytest.mark.promise("engines", "What SGLang's version, options or model...")
@pytest.mark.parametrize(
    ("kind", "reason"), [("attention", "sliding_window"), ("model", "unknown_architecture"), ("pool", "pool_layout")]
)
def test_models_and_caches_of_other_kinds_are_refused(served, monkeypatch, kind, reason):
    runner = served.local.scheduler.tp_worker.model_runner
    assert model_refusal_of(runner) is None
    if kind == "attention":
        monkeypatch.setattr(runner.model.model.layers[1].self_attn.attn, "sliding_window_size", 128)
    elif kind == "model":
        monkeypatch.setattr(runner, "model", torch.nn.Module())
    else:
        monkeypatch.setattr(runner, "token_to_kv_pool", object())
    assert model_refusal_of(runner) == reason
