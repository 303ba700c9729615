"""What SGLang and its users do to requests and caches: nothing approximate is shared, and nothing is left behind."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import AbortReq, UpdateWeightFromDiskReqInput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.server_args import ServerArgs

from engine_wrapper.sglang.refusals import engine_refusal_of, model_refusal_of
from tests.builders.vllm import DOCUMENT, DONOR, MOVED, NEW, assert_cold
from tests.engine_wrapper.sglang.conftest import OTHER, WARM, some
from validation.models import shipped_model

LEADS = some(80)


@pytest.mark.promise("engines", "In SGLang answers are those of...")
def test_moved_kv_is_never_served_from_the_prefix_cache(serve, profile_at, record_property):
    """Fill the cache with approximate requests, evict, and ask again."""
    hits = 0
    with serve(profile_at({"layer": 1, "threshold": 1.0}), max_total_tokens=2048) as served:
        served.teach()
        for n in [0, 1, 2, 3] * 2:
            prompt = [*LEADS[: 40 + 9 * n], *DOCUMENT[:400], *NEW[:30]]
            answer = served.ask(prompt, max_tokens=4)
            assert answer.receipt["reused_tokens"] >= 300
            longer = served.ask([*prompt, *answer.tokens, *NEW[:20]], max_tokens=1)
            # What comes before the document is exact.
            hits += sum(max(0, each.receipt["exact_prefix_tokens"] - 40 - 9 * n) for each in (answer, longer))
    record_property("contaminated_hits", hits)
    assert hits == 0


def test_an_exact_donor_is_reused_from_position_0(serve, cold):
    with serve() as served:
        served.teach()
        evict(served)
        (answer,) = assert_cold(served, cold, DONOR)
        assert answer.receipt["exact_prefix_tokens"] == 0
        assert answer.receipt["reused_tokens"] >= len(DONOR) - 2


@pytest.mark.promise("engines", "In SGLang salts keep requests apart, and a flush or other weights end donors")
@pytest.mark.parametrize("is_salt", [True, False], ids=["cache_salt", "extra_key"])
def test_salts_keep_requests_apart(serve, is_salt):
    def asked(key, prompt):
        return served.ask(prompt, salts=[key] if is_salt else [], options={} if is_salt else {"extra_key": key})

    with serve() as served:
        served.teach(NEW)
        for key, donor in (("a", DONOR), ("b", OTHER)):
            asked(key, donor)
        served.settle()
        apart, same = (asked(key, MOVED).receipt["offered_tokens"] for key in ("c", "a"))
        assert apart == 0
        assert same >= 480


@pytest.mark.promise("engines", "In SGLang salts keep requests apart,...")
def test_a_flush_forgets_donors(serve):
    with serve() as served:
        served.teach()
        assert served.local.scheduler.flush_cache()
        answer = served.ask(MOVED)
        assert answer.receipt["reason"] == "no_donor_match"


@pytest.mark.parametrize("steps", [0, 3])
def test_aborted_requests_leave_nothing(serve, cold, steps):
    with serve() as served:
        served.teach()
        seen = []

        def abort():
            scheduler = served.local.scheduler
            seen.append(len(scheduler.waiting_queue) + len(scheduler.running_batch.reqs))
            if len(seen) == steps + 2:
                scheduler.abort_request(AbortReq(abort_all=True))

        served.local.on_step = abort
        served.ask(MOVED, max_tokens=64)
        served.local.on_step = lambda: None
        served.local.run_idle()
        assert not served.cache.requests
        assert_cold(served, cold, MOVED)


@pytest.mark.promise("engines", "In SGLang salts keep requests apart,...")
def test_donors_of_other_weights_are_dropped(serve, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(shipped_model(), other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with serve() as served:
        served.teach()
        update = UpdateWeightFromDiskReqInput(model_path=str(other), load_format="auto", flush_cache=False)
        served.local.scheduler.process_input_requests([update])
        assert served.ask(MOVED).receipt["offered_tokens"] == 0
        assert served.runtime.weights_changes == 1


def test_prompts_with_log_probabilities_are_computed_in_full(serve):
    with serve() as served:
        served.teach()
        answer = served.ask(MOVED, options={"logprob_start_len": 0})
        assert answer.receipt["reason"] == "prompt_logprobs"
        asked = served.ask(MOVED, custom_params={"semblend.cold": True})
        assert asked.receipt["reason"] == "cold_run"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disable_radix_cache": True}, "radix_disabled"),
        ({"json_model_override_args": '{"rope_theta": 5000}'}, "model_kwargs"),
    ],
)
def test_refused_engines_serve_as_stock(serve, caplog, options, reason):
    with serve(**options) as served:
        assert type(served.cache).__name__ == "UnifiedRadixCache"
        assert f"({reason})" in caplog.text
        assert len(served.ask(WARM).tokens) == 8


@pytest.mark.promise("engines", "What SGLang's version, options or model do not allow is refused by name")
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tp_size", 2, "tensor_parallel"),
        ("pp_size", 2, "pipeline_parallel"),
        ("dp_size", 2, "data_parallel"),
        ("dcp_size", 2, "context_parallel"),
        ("enable_hierarchical_cache", True, "hierarchical_cache"),
        ("enable_unified_cache_external_linker", True, "hierarchical_cache"),
        ("disaggregation_mode", "prefill", "disaggregated"),
        ("speculative_algorithm", "EAGLE", "speculative_decoding"),
        ("enable_lora", True, "lora"),
        ("enable_streaming_session", True, "sessions"),
        ("kv_cache_dtype", "fp8_e4m3", "kv_cache_dtype"),
        ("enable_unified_memory", True, "memory_layout"),
        ("enable_torch_compile", True, "compiled_prefill"),
        ("enable_pdmux", "of another kind", "split_prefill"),
    ],
)
def test_options_are_refused_by_name(name, value, reason):
    arguments = ServerArgs(model_path=str(shipped_model()), device="cpu")
    assert engine_refusal_of(arguments) is None
    setattr(arguments, name, value)
    assert engine_refusal_of(arguments) == reason


@pytest.mark.promise("engines", "What SGLang's version, options or model...")
def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr("sglang.version.__version__", "0.5.22")
    assert engine_refusal_of(None) == "sglang_version"


def test_settings_that_cannot_be_used_turn_reuse_off(serve, caplog):
    with serve({"POLICY": "verified", "HOST_BYTES": "-1"}) as served:
        assert type(served.cache).__name__ == "UnifiedRadixCache"
        assert "(settings_invalid)" in caplog.text


@pytest.mark.promise("engines", "What SGLang's version, options or model...")
@pytest.mark.parametrize(
    ("kind", "reason"), [("attention", "sliding_window"), ("model", "unknown_architecture"), ("pool", "pool_layout")]
)
def test_models_and_caches_of_other_kinds_are_refused(serve, kind, reason):
    with serve() as served:
        runner = served.local.scheduler.tp_worker.model_runner
        assert model_refusal_of(runner) is None
        if kind == "attention":
            runner.model.model.layers[1].self_attn.attn.sliding_window_size = 128
        elif kind == "model":
            runner.model = torch.nn.Module()
        else:
            runner.token_to_kv_pool = object()
        assert model_refusal_of(runner) == reason


def evict(served):
    served.cache.evict(EvictParams(num_tokens=1 << 20))
