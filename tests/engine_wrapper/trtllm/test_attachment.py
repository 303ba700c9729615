"""Attaching to TensorRT-LLM's executor: all that is needed, or nothing and a reason."""

from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch

from engine_wrapper.connector import SemBlendKvConnectorWorker
from engine_wrapper.self_check import LayoutError
from engine_wrapper.trtllm.attachment import execution_refusal, scales_of
from engine_wrapper.trtllm.hooks import ExecutorParts
from semblend_trt.connector.contract import from_llm_args
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import SemBlendError
from semblend_trt.plan import EngineMode
from semblend_trt.runtime import runtime_for
from tests.engine_wrapper.trtllm.stand_ins import KVCacheManager, LlmArgs, LlmRequest, executor_of
from tests.semblend_trt.rank_threads import on_ranks


class Site:
    """An executor, a worker that registers with it, and every attribute of what could be attached to."""

    def __init__(self, path, change=None, contract="1.2", **options):
        self.args = LlmArgs(path, contract=contract)
        self.worker = SemBlendKvConnectorWorker(self.args)
        self.executor = executor_of(path, self.worker, **options)
        if change is not None:
            change(self.executor, self.args)
        self.runtime = runtime_for(self.args)
        self.before = self.attributes()

    def attach(self):
        self.executor._maybe_init_kv_connector_manager()
        return self.worker.attachment

    def close(self):
        """Everything is left as it was."""
        self.worker.close()
        assert self.attributes() == self.before

    def attributes(self):
        engine = self.executor.model_engine
        owners = [self.executor, self.executor.kv_cache_manager, engine, engine.model]
        decoder = getattr(engine.model, "model", None)
        owners += [decoder] * (decoder is not None)
        for layer in getattr(decoder, "layers", ()):
            owners += [layer, layer.self_attn, layer.self_attn.attn]
        kept = [dict(vars(owner)) for owner in owners]
        # Weights are watched until the end, whatever else is attached.
        self.watched = [name for each in kept for name in WATCHED if name in each]
        kept = [{name: value for name, value in each.items() if name not in WATCHED} for each in kept]
        return [{**each, "_forward_pre_hooks": dict(each.get("_forward_pre_hooks") or {})} for each in kept]


WATCHED = ("load_weights", "reset_reuse_state")


@pytest.fixture
def site(tiny_qwen2_path):
    site = Site(tiny_qwen2_path)
    yield site
    site.worker.close()


@pytest.mark.promise("engines", "The wrapper attaches where the decoder is laid out as known, and leaves it as it was")
@pytest.mark.known_defect(12)
@pytest.mark.parametrize("style", ["1.2", "main"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_both_known_layouts_are_attached_to_and_left_as_they_were(tiny_model_paths, family, style):
    site = Site(tiny_model_paths[family], contract={"main": "1.4"}.get(style, style), style=style)
    attachment = site.attach()
    assert (attachment.guard_refusal, attachment.execution_refusal) == (None, None)
    assert site.runtime.publication_guard
    assert site.runtime.mode is EngineMode.STOCK, "no plan before the self-check has passed"
    assert site.attributes() != site.before
    assert sorted(site.watched) == ["load_weights", "reset_reuse_state"]
    shown = site.runtime.engine_facts
    assert shown["manager"] == ("KVCacheManager" if style == "1.2" else "KVCacheManagerV2")
    assert (shown["attention"], shown["decode_graphs"], shown["fails_requests"]) == ("TrtllmAttention", [True], False)
    site.close()
    assert not site.watched
    assert not site.runtime.publication_guard


def set_on(pick, **values):
    return lambda executor, args: vars(pick(executor)).update(values)


def set_args(**values):
    return lambda executor, args: vars(args).update(values)


engine, manager = attrgetter("model_engine"), attrgetter("kv_cache_manager")
decoder = attrgetter("model_engine.model.model")


def attention(executor):
    return decoder(executor).layers[1].self_attn


NO_EXECUTION = [
    (set_args(torch_compile_config=object()), "compiled_prefill"),
    (set_on(engine, _torch_compile_enabled=True), "compiled_prefill"),
    (set_args(prefill_cuda_graph_backend="breakable"), "prefill_graphs"),
    (set_args(prefill_cuda_graph_backend=SimpleNamespace(value="piecewise")), "prefill_graphs"),
    (set_on(engine, breakable_cuda_graph_runner=object()), "prefill_graphs"),
    (set_args(lora_config=object()), "lora"),
    (set_args(enable_lora=True), "lora"),
    (set_args(speculative_config=object()), "speculative_decoding"),
    (set_on(lambda e: e, drafter=object()), "speculative_decoding"),
    (set_args(sparse_attention_config=object()), "sparse_attention"),
    (set_args(context_parallel_size=2), "context_parallel"),
    (set_args(attn_backend="FLASHINFER"), "attention_backend"),
    (set_args(attn_backend="VANILLA"), "attention_backend"),
    (lambda _, args: delattr(args, "torch_compile_config"), "settings_unknown"),
    (lambda e, _: delattr(e.model_engine, "cuda_graph_runner"), "engine_layout"),
    (set_on(attrgetter("kv_connector_manager"), prefix_reservations_enabled=True), "prefix_reservations"),
    (lambda e, _: e.model_engine.model._modules.pop("model"), "model_layout"),
    (lambda e, _: e.model_engine.model.model.layers.pop(2), "model_layout"),
    (set_on(decoder, forward=print), "model_patched"),
    (set_on(lambda e: attention(e).attn, forward=print), "model_patched"),
    (set_on(attention, kv_lora_rank=512), "mla"),
    (set_on(attention, attn_output_gate=True), "attention_scaling"),
    (set_on(attention, q_scaling=0.0), "attention_scaling"),
    (set_on(attention, q_scaling=[1.0, 2.0]), "attention_scaling"),
    (set_on(attention, attention_chunk_size=8192), "attention_chunks"),
    (set_on(attention, has_quant_scale=True), "quantized_attention"),
    (set_on(attention, head_dim=32), "model_layout"),
    (set_on(manager, get_batch_cache_indices=None), "cache_manager_unknown"),
    (lambda e, _: e.kv_cache_manager.layer_offsets.update({1: 2}), "layer_offsets"),
]


@pytest.mark.promise("engines", "Elsewhere it executes no plan, names what is in the way, and serves as a stock engine")
@pytest.mark.known_defect(13)
@pytest.mark.parametrize(("change", "reason"), NO_EXECUTION)
def test_a_decoder_that_cannot_run_plans_is_left_untouched_behind_the_guard(tiny_qwen2_path, change, reason):
    site = Site(tiny_qwen2_path, change)
    attachment = site.attach()
    assert (attachment.guard_refusal, attachment.execution_refusal) == (None, reason)
    assert (attachment.forward, site.runtime.mode) == (None, EngineMode.STOCK)
    assert site.runtime.publication_guard
    changed = [before != after for before, after in zip(site.before, site.attributes(), strict=True)]
    assert changed == [index == 1 for index in range(len(changed))]  # the manager alone
    site.close()


def make_stubborn(executor, _args):
    """The manager lets itself be patched at some places only."""

    def set_some(manager, name, value):
        if name == "store_blocks_for_reuse":
            raise AttributeError(name)
        object.__setattr__(manager, name, value)

    executor.kv_cache_manager.__class__ = type("KVCacheManager", (KVCacheManager,), {"__setattr__": set_some})


@pytest.mark.promise("engines", "Elsewhere it executes no plan, names...")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (make_stubborn, "probe_failed"),
        (set_on(manager, is_vswa=True), "sliding_window"),
        (set_on(lambda e: e, kv_cache_transceiver=object()), "disaggregated"),
        (set_args(tensor_parallel_size=2), "ranks_unknown"),
    ],
)
def test_an_engine_that_cannot_be_guarded_is_left_untouched(tiny_qwen2_path, change, reason):
    site = Site(tiny_qwen2_path, change)
    attachment = site.attach()
    assert (attachment.guard_refusal, site.attributes()) == (reason, site.before)
    assert (site.runtime.mode, site.runtime.publication_guard) == (EngineMode.STOCK, False)
    site.worker.close()


@pytest.mark.parametrize(
    ("change", "refusals"),
    [
        (make_stubborn, ("probe_failed", "probe_failed")),
        (set_on(manager, is_vswa=True), ("sliding_window", "sliding_window")),
        (set_on(attention, kv_lora_rank=512), (None, "mla")),
    ],
)
def test_what_one_rank_cannot_attach_no_rank_attaches(tiny_qwen2_path, monkeypatch, change, refusals):
    monkeypatch.setattr("semblend_trt.connector.worker.join_ranks", lambda *_: None)
    sites = [Site(tiny_qwen2_path), Site(tiny_qwen2_path, change)]

    def attach(ranks):
        site = sites[ranks.rank]
        site.runtime.ranks = ranks
        attachment = site.attach()
        return attachment.guard_refusal, attachment.execution_refusal

    assert on_ranks(2, attach) == [refusals] * 2
    for site in sites:
        site.close()


class Unreadable:
    """A caller that cannot be looked at, and what it holds."""

    kv_connector_manager = property(lambda self: self)
    worker = property(lambda self: 1 / 0)


@pytest.mark.parametrize("caller", [None, Unreadable()], ids=["none", "unreadable"])
def test_without_an_executor_among_the_callers_nothing_is_attached(site, caller):
    def register(self):
        site.worker.register_kv_caches(site.executor.kv_cache_manager.pool)

    register(caller)
    assert (site.worker.attachment.guard_refusal, site.attributes()) == ("executor_unknown", site.before)


def test_a_refused_pool_attaches_nothing(site):
    own = manager(site.executor)
    own.pool = own.pool[:, :, :1].clone()
    assert site.attach().guard_refusal == "pool_layout"
    assert not site.runtime.publication_guard


@pytest.fixture
def pending(site, make_plan):
    """A plan waits for its forward."""
    site.attach()
    site.runtime.mode = EngineMode.WRAPPER
    site.worker.wait_for_save(None)
    site.runtime.active_plans.put(make_plan(tuple(range(40)), [(4, 20)]))
    site.worker._expected = [1]
    return site


def test_a_request_that_an_engine_drops_before_its_forward_fails_no_other(pending):
    """`PyExecutor._forward_step` (1.1) frees what it prepared in vain, and tells no connector."""
    request, own = LlmRequest(1, list(range(40))), manager(pending.executor)
    own.add_sequence(request)
    own.free_resources(request)
    pending.worker.wait_for_save(None)
    assert pending.runtime.refusal is None


def test_a_forward_past_a_plan_is_an_error_and_ends_reuse(pending):
    with pytest.raises(SemBlendError, match=r"plans of requests \[1\] were not executed"):
        pending.worker.wait_for_save(None)
    assert pending.runtime.refusal == "plan_not_executed"


@pytest.mark.parametrize(
    ("rope", "fused", "settings", "reason"),
    [
        ("default", True, {}, None),
        ("linear", True, {}, None),
        ("llama3", True, {}, None),
        ("yarn", True, {}, "rope_fused"),
        ("yarn", False, {}, None),
        ("default", True, {"pipeline_parallel_size": 2}, "pipeline_parallel"),
        ("default", True, {"tensor_parallel_size": 2}, "model_layout"),
    ],
)
def test_what_only_a_model_or_its_configuration_shows(tiny_llama_path, rope, fused, settings, reason):
    executor, facts = executor_of(tiny_llama_path, None, fused=fused), model_facts(tiny_llama_path)
    parts = ExecutorParts(executor, executor.kv_cache_manager, executor.model_engine)
    facts = replace(facts, rope_parameters=facts.rope_parameters | {"rope_type": rope})
    assert execution_refusal(parts, from_llm_args(LlmArgs(tiny_llama_path, **settings)), facts) == reason


def scaled(*scales):
    layers = [
        SimpleNamespace(attn=SimpleNamespace(kv_scale_quant_orig=scale, kv_scale_orig_quant=1 / scale))
        for scale in map(torch.tensor, scales)
    ]
    return SimpleNamespace(layers=[SimpleNamespace(self_attn=each) for each in layers])


def with_scales(**changes):
    found = scaled(1.0, 0.5)
    vars(found.layers[1].self_attn.attn).update(changes)
    return found


def test_each_layer_has_its_own():
    assert scales_of(scaled(1.0, 0.5, 0.25)) == (1.0, 0.5, 0.25)


@pytest.mark.promise("engines", "In TensorRT-LLM with the wrapper KV...")
@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, "decoder, NoneType, has no layers"),
        (SimpleNamespace(layers=[]), "has no layers"),
        (SimpleNamespace(layers=[SimpleNamespace()]), "layer 0 has no kv_scale_quant_orig"),
        (with_scales(kv_scale_orig_quant=None), "layer 1 has no kv_scale_orig_quant"),
        (with_scales(kv_scale_orig_quant=torch.tensor(0.0)), "kv_scale_orig_quant of 0.0"),
        (with_scales(kv_scale_orig_quant=torch.tensor(1.0)), "times 1.0 and reads it times 0.5"),
    ],
)
def test_a_scale_that_is_none_is_refused_with_its_value(found, told):
    with pytest.raises(LayoutError, match=told) as refusal:
        scales_of(found)
    assert refusal.value.reason == "kv_scales"


def test_an_fp8_cache_without_scales_is_refused_by_name(tiny_qwen2_path, caplog):
    args = LlmArgs(tiny_qwen2_path)
    executor = executor_of(tiny_qwen2_path, SemBlendKvConnectorWorker(args), kv_dtype=torch.float8_e4m3fn)
    del executor.model_engine.model.model.layers[1].self_attn.attn.kv_scale_orig_quant
    executor._maybe_init_kv_connector_manager()
    assert (runtime_for(args).pool, runtime_for(args).refusal) == (None, "kv_scales")
    assert "layer 1 has no kv_scale_orig_quant" in caplog.text
