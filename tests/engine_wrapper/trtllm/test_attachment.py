"""Attaching to TensorRT-LLM's executor: all that is needed, or nothing and a reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine_wrapper.connector import SemBlendKvConnectorWorker
from engine_wrapper.trtllm.attachment import execution_refusal
from engine_wrapper.trtllm.hooks import ExecutorParts
from semblend_trt.connector.engine_spec import from_llm_args
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import SemBlendError
from semblend_trt.plan import EngineMode
from semblend_trt.runtime import runtime_for
from tests.engine_wrapper.trtllm.stand_ins import (
    BLOCK,
    KVCacheManager,
    KVCacheManagerV2,
    LlmArgs,
    LlmRequest,
    executor_of,
)
from tests.semblend_trt.rank_threads import on_ranks


class Site:
    """An executor, a worker that registers with it, and every attribute of what could be attached to."""

    def __init__(
        self,
        path,
        change=None,
        contract="1.2",
        **options,
    ):
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

    def attributes(self):
        engine = self.executor.model_engine
        owners: list[Any] = [self.executor, self.executor.kv_cache_manager, engine, engine.model]
        decoder = getattr(engine.model, "model", None)
        owners.append(decoder)
        for layer in getattr(decoder, "layers", ()):
            owners += [layer, layer.self_attn, getattr(layer.self_attn, "attn", None)]
        kept = [dict(vars(owner)) for owner in owners if hasattr(owner, "__dict__")]
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


@pytest.mark.known_defect(12)
@pytest.mark.parametrize("style", ["1.2", "main"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_both_known_layouts_are_attached_to_and_left_as_they_were(tiny_model_paths, family, style):
    site = Site(tiny_model_paths[family], contract=style, style=style)
    attachment = site.attach()
    assert (attachment.guard_refusal, attachment.execution_refusal) == (None, None)
    assert site.runtime.publication_guard
    assert site.runtime.mode is EngineMode.STOCK, "no plan before the self-check has passed"
    assert site.attributes() != site.before
    assert sorted(site.watched) == ["load_weights", "reset_reuse_state"]
    site.worker.close()
    assert site.attributes() == site.before
    assert not site.watched
    assert not site.runtime.publication_guard


def attention(executor):
    return executor.model_engine.model.model.layers[1].self_attn


def set_on(pick, **values):
    return lambda executor, args: vars(pick(executor, args)).update(values)


def args_of(_executor, args):
    return args


def forget(name):
    return lambda _executor, args: delattr(args, name)


GRAPHS = SimpleNamespace(enabled=True)
NO_EXECUTION = {
    "torch.compile": (set_on(args_of, torch_compile_config=object()), "compiled_prefill"),
    "compiled engine": (set_on(lambda e, _: e.model_engine, _torch_compile_enabled=True), "compiled_prefill"),
    "CUDA graphs": (set_on(args_of, cuda_graph_config=object()), "cuda_graphs"),
    "graph runner": (set_on(lambda e, _: e.model_engine, cuda_graph_runner=GRAPHS), "cuda_graphs"),
    "silent graph runner": (set_on(lambda e, _: e.model_engine, cuda_graph_runner=object()), "cuda_graphs"),
    "prefill graphs": (set_on(lambda e, _: e.model_engine, breakable_cuda_graph_runner=object()), "cuda_graphs"),
    "LoRA": (set_on(args_of, lora_config=object()), "lora"),
    "LoRA switch": (set_on(args_of, enable_lora=True), "lora"),
    "speculation": (set_on(args_of, speculative_config=object()), "speculative_decoding"),
    "drafter": (set_on(lambda e, _: e, drafter=object()), "speculative_decoding"),
    "sparse attention": (set_on(args_of, sparse_attention_config=object()), "sparse_attention"),
    "context parallel": (set_on(args_of, context_parallel_size=2), "context_parallel"),
    "FlashInfer": (set_on(args_of, attn_backend="FLASHINFER"), "attention_backend"),
    "plain attention": (set_on(args_of, attn_backend="VANILLA"), "attention_backend"),
    "unknown settings": (forget("cuda_graph_config"), "settings_unknown"),
    "unknown engine": (lambda e, _: delattr(e.model_engine, "cuda_graph_runner"), "engine_layout"),
    "unknown model": (lambda e, _: e.model_engine.model._modules.pop("model"), "model_layout"),
    "a layer less": (lambda e, _: e.model_engine.model.model.layers.pop(2), "model_layout"),
    "another wrapper": (set_on(lambda e, _: e.model_engine.model.model, forward=print), "model_patched"),
    "another attention": (set_on(lambda e, _: attention(e).attn, forward=print), "model_patched"),
    "MLA": (set_on(lambda e, _: attention(e), kv_lora_rank=512), "mla"),
    "gated attention": (set_on(lambda e, _: attention(e), attn_output_gate=True), "attention_scaling"),
    "scaled attention": (set_on(lambda e, _: attention(e), q_scaling=0.0), "attention_scaling"),
    "attention scaled by layer": (set_on(lambda e, _: attention(e), q_scaling=[1.0, 2.0]), "attention_scaling"),
    "chunked attention": (set_on(lambda e, _: attention(e), attention_chunk_size=8192), "attention_chunks"),
    "quantised output": (set_on(lambda e, _: attention(e), has_quant_scale=True), "quantized_attention"),
    "other heads": (set_on(lambda e, _: attention(e), head_dim=32), "model_layout"),
    "unlisted blocks": (
        set_on(lambda e, _: e.kv_cache_manager, get_batch_cache_indices=None),
        "cache_manager_unknown",
    ),
    "layer offsets": (lambda e, _: e.kv_cache_manager.layer_offsets.update({1: 2}), "layer_offsets"),
}


@pytest.mark.known_defect(13)
@pytest.mark.parametrize("case", NO_EXECUTION)
def test_a_decoder_that_cannot_run_plans_is_left_untouched_behind_the_guard(tiny_qwen2_path, case):
    change, reason = NO_EXECUTION[case]
    site = Site(tiny_qwen2_path, change)
    attachment = site.attach()
    assert (attachment.guard_refusal, attachment.execution_refusal) == (None, reason)
    assert attachment.forward is None
    assert site.runtime.publication_guard
    assert site.runtime.mode is EngineMode.STOCK
    manager = 1  # of the attributes; nothing else may differ
    after = site.attributes()
    assert after[:manager] + after[manager + 1 :] == site.before[:manager] + site.before[manager + 1 :]
    site.worker.close()
    assert site.attributes() == site.before


class Stubborn(KVCacheManager):
    """Lets itself be patched at some places only."""

    def __setattr__(self, name, value):
        if name == "store_blocks_for_reuse":
            raise AttributeError(name)
        super().__setattr__(name, value)


def make_stubborn(executor, _args):
    executor.kv_cache_manager.__class__ = type("KVCacheManager", (Stubborn,), {})


NOTHING = {
    "a half guard": (make_stubborn, "probe_failed"),
    "windows by layer": (set_on(lambda e, _: e.kv_cache_manager, is_vswa=True), "sliding_window"),
    "disaggregated": (set_on(lambda e, _: e, kv_cache_transceiver=object()), "disaggregated"),
    "ranks that cannot agree": (set_on(args_of, tensor_parallel_size=2), "ranks_unknown"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_an_engine_that_cannot_be_guarded_is_left_untouched(tiny_qwen2_path, case):
    change, reason = NOTHING[case]
    site = Site(tiny_qwen2_path, change)
    attachment = site.attach()
    assert attachment.guard_refusal == reason
    assert site.attributes() == site.before
    assert (site.runtime.mode, site.runtime.publication_guard) == (EngineMode.STOCK, False)
    site.worker.close()


OF_ONE_RANK = {
    "half the guard": (make_stubborn, ("probe_failed", "probe_failed")),
    "the guard": (lambda e, _: vars(e.kv_cache_manager).update(is_vswa=True), ("sliding_window", "sliding_window")),
    "the decoder": (lambda e, _: vars(attention(e)).update(kv_lora_rank=512), (None, "mla")),
}


@pytest.mark.parametrize("case", OF_ONE_RANK)
def test_what_one_rank_cannot_attach_no_rank_attaches(tiny_qwen2_path, monkeypatch, case):
    # Each stand-in holds the whole model, and is no part of a larger one.
    monkeypatch.setattr("semblend_trt.connector.worker.join_ranks", lambda *_: None)
    change, refusals = OF_ONE_RANK[case]
    sites = [Site(tiny_qwen2_path), Site(tiny_qwen2_path, change)]

    def attach(ranks):
        site = sites[ranks.rank]
        site.runtime.ranks = ranks
        attachment = site.attach()
        return attachment.guard_refusal, attachment.execution_refusal

    assert on_ranks(2, attach) == [refusals] * 2
    for site in sites:
        site.worker.close()
        assert site.attributes() == site.before


def test_the_v2_manager_is_guarded_and_no_plan_is_executed(site):
    stock, manager = site.executor.kv_cache_manager, KVCacheManagerV2()
    manager.get_unique_primary_pool = stock.get_unique_primary_pool  # type: ignore[attr-defined]
    site.executor.kv_cache_manager = manager
    attachment = site.attach()
    assert (attachment.guard_refusal, attachment.execution_refusal) == (None, "cache_manager_v2")


class Unreadable:
    """A caller that cannot be looked at, and what it holds."""

    def __init__(self):
        self.kv_connector_manager = self

    @property
    def worker(self):
        raise RuntimeError("not now")

    def register(self, site):
        site.worker.register_kv_caches(site.executor.kv_cache_manager.pool)


@pytest.mark.parametrize("caller", [None, Unreadable()], ids=["none", "unreadable"])
def test_without_an_executor_among_the_callers_nothing_is_attached(site, caller):
    if caller is None:
        site.worker.register_kv_caches(site.executor.kv_cache_manager.pool)
    else:
        caller.register(site)
    assert site.worker.attachment is not None
    assert site.worker.attachment.guard_refusal == "executor_unknown"
    assert site.attributes() == site.before


def test_a_refused_pool_attaches_nothing(site):
    manager = site.executor.kv_cache_manager
    manager.pool = manager.pool[:, :, :1].clone()
    assert site.attach().guard_refusal == "pool_layout"
    assert not site.runtime.publication_guard


@pytest.fixture
def pending(site, make_plan):
    """A plan waits for its forward."""
    site.attach()
    site.runtime.mode = EngineMode.WRAPPER
    site.worker.wait_for_save(None)
    site.runtime.active_plans.put(make_plan(tuple(range(40)), [(4, 20)], num_layers=3, block_size=BLOCK))
    return site


def test_a_request_that_an_engine_drops_before_its_forward_fails_no_other(pending):
    """`PyExecutor._forward_step` (1.1) frees what it prepared in vain, and tells no connector."""
    request, manager = LlmRequest(1, list(range(40))), pending.executor.kv_cache_manager
    manager.add_sequence(request)
    manager.free_resources(request)
    pending.worker.wait_for_save(None)
    assert pending.runtime.refusal is None


def test_a_forward_past_a_plan_is_an_error_and_ends_reuse(pending):
    with pytest.raises(SemBlendError, match="without asking for its plans"):
        pending.worker.wait_for_save(None)
    assert pending.runtime.refusal == "plan_not_executed"


@pytest.mark.parametrize(
    ("rope", "fused", "settings", "reason"),
    [
        ("default", True, {}, None),
        ("linear", True, {}, None),
        ("llama3", True, {}, None),
        # It also scales, which is left to the engine.
        ("yarn", True, {}, "rope_fused"),
        ("yarn", False, {}, None),
        ("default", True, {"pipeline_parallel_size": 2}, "pipeline_parallel"),
        # Each rank has to hold its share of the heads.
        ("default", True, {"tensor_parallel_size": 2}, "model_layout"),
    ],
)
def test_what_only_a_model_or_its_configuration_shows(tiny_llama_path, rope, fused, settings, reason):
    executor, facts = executor_of(tiny_llama_path, None, fused=fused), model_facts(tiny_llama_path)
    parts = ExecutorParts(executor, executor.kv_cache_manager, executor.model_engine)
    facts = replace(facts, rope_parameters=facts.rope_parameters | {"rope_type": rope})
    assert execution_refusal(parts, from_llm_args(LlmArgs(tiny_llama_path, **settings)), facts) == reason
