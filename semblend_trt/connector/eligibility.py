"""Which engines and models may be served with reuse, by EngineSpec.

TensorRT-LLM lets combinations reach a connector that give wrong data, as block ids outside of the pool."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semblend_trt.config import Settings, terms_of
from semblend_trt.connector.attention_layout import LLAMA4
from semblend_trt.connector.contract import V11, from_llm_args
from semblend_trt.connector.engine_spec import EngineSpec
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from semblend_trt.policy import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from semblend_trt.connector.model_facts import ModelFacts

logger = logging.getLogger(__name__)


def spec_of(llm_args: Any) -> EngineSpec:
    """Return the description of an engine by what it gives its connector. Raises as `from_llm_args`."""
    return llm_args if isinstance(llm_args, EngineSpec) else from_llm_args(llm_args)


def engine_refusal(engine: EngineSpec) -> str | None:
    """Return why no request of this engine may be reused."""
    off = {
        "host_offload": engine.offloads_to_host,  # after a swap a block id is no longer its row in the pool
        "attention_window": cuts_kv(engine, engine.attention_windows),
        "speculative_decoding": engine.speculates,
        "model_kwargs": engine.has_model_overrides,
        "attention_dp": engine.attention_dp,
        **_parallel(engine),
        "disaggregated": engine.is_disaggregated,  # version 1.1 then holds no block for a save
        "attention_backend": not engine.orders_blocks_by_head,
    }
    return next((reason for reason, is_on in off.items() if is_on), None)


def cuts_kv(engine: EngineSpec, windows: Iterable[int | None]) -> bool:
    """Return whether the engine may drop KV outside of one of `windows`, in tokens.

    That is one shorter than its longest sequence. Facts: `resource_manager.py` (V1) and `kv_cache_manager_v2.py` free a
    block once a window has passed it. Each window shorter than `max_seq_len` has a pool, or a layer group."""
    longest = engine.max_seq_len
    return any(window is not None and (longest is None or window < longest) for window in windows)


def _parallel(engine: EngineSpec) -> dict[str, bool]:
    sizes = {"context_parallel": engine.context_parallel_size, "pipeline_parallel": engine.pipeline_parallel_size}
    return {reason: (size or 1) > 1 for reason, size in sizes.items()}


def decoder_refusal(engine: EngineSpec) -> str | None:
    """Return why no plan can be executed under these settings of TensorRT-LLM."""
    off = {
        "compiled_prefill": engine.compiles_prefill,
        "prefill_graphs": engine.prefill_graphs,
        "lora": engine.lora,
        "speculative_decoding": engine.speculates,
        "sparse_attention": engine.sparse_attention,
        **_parallel(engine),
        # FlashInfer's pages are laid out in another way, and the plain backend has one page for all tokens.
        "attention_backend": engine.attn_backend != "TRTLLM",
    }
    for reason, is_on in off.items():
        if is_on is None:
            return "settings_unknown"
        if is_on:
            return reason
    return None


def facts_in_engine(facts: ModelFacts, engine: EngineSpec) -> ModelFacts:
    """Return the facts of a model as this engine computes it; `facts` are those of Transformers."""
    if facts.model_type not in engine.halved_model_types:
        return facts
    halves = (replace(each, rotation=replace(each.rotation, interleaved=False)) for each in facts.groups)
    return replace(facts, groups=tuple(halves))


def served_facts(engine: EngineSpec, policy: ReusePolicy) -> ModelFacts:
    """Return the facts of the engine's model. Raises ConfigurationError, and UnsupportedModelError for KV that `policy`
    cannot move, or that the engine computes otherwise than Transformers."""
    facts = model_facts(engine.model, engine.revision, engine.tells_kv_scales)
    if engine.contract is None:
        return facts_in_engine(facts, engine)
    if (refusal := trtllm_refusal(facts, engine.contract, policy)) is not None:
        raise refusal
    return facts


def rotates_otherwise(facts: ModelFacts) -> bool:
    """Return whether TensorRT-LLM rotates by other frequencies. Its create_sinusoidal_positions_yarn always truncates
    (`functional.py`), so KV of such a model is reused at its own place alone."""
    return facts.rope_parameters.get("truncate", True) is not True


def trtllm_refusal(facts: ModelFacts, version: str, policy: ReusePolicy) -> UnsupportedModelError | None:
    """Return why this version of TensorRT-LLM, unlike other engines, does not serve a model under `policy`.

    Facts: before pull request 6768 a layer with a window wrote around, in the window's tokens. Attention takes the size
    of chunks as an argument (`attention_backend/trtllm.py`), and no plan was tried there."""
    kind = facts.model_type
    if any(facts.windows) and version == V11:
        why = f"{kind} has layers with a sliding window, and TensorRT-LLM {version} writes new KV over what lies"
        return UnsupportedModelError("sliding_window", f"{why} outside of it; use TensorRT-LLM 1.2 or later, or vLLM")
    if kind in LLAMA4:
        why = f"{kind} has layers with chunks, over which no plan was tried in TensorRT-LLM; serve it with vLLM"
        return UnsupportedModelError("attention_layout", why)
    if rotates_otherwise(facts) and policy not in (ReusePolicy.EXACT, ReusePolicy.VERIFIED):
        why = "yarn with truncate off is computed otherwise by TensorRT-LLM, which truncates, and no key can be moved"
        way_out = f"there as policy {policy.value} asks; use policy verified or exact, or vLLM"
        return UnsupportedModelError("rope_unknown", f"{why} {way_out}")
    return None


def facts_or_refusal(engine: EngineSpec, settings: Settings) -> tuple[ModelFacts | None, str | None]:
    """Return the model's facts, or the reason why no request of this engine may be reused. Never raises."""
    if settings.policy is ReusePolicy.OFF:
        return None, "policy_off"
    if (refusal := engine_refusal(engine)) is not None:
        from semblend_trt.reasons import Scope, advice  # not for an engine that is served

        text = "KV reuse is off: the engine uses %s, with which block contents cannot be trusted. %s"
        logger.warning(text, refusal, advice(refusal, Scope.ENGINE))
        return None, refusal
    try:
        facts = served_facts(engine, settings.policy)
        terms_of(settings.policy, settings, facts.num_layers, facts.lowest_check_layer)
    except ConfigurationError as error:
        logger.error("KV reuse is off: %s", error)
        return None, "configuration"
    except UnsupportedModelError as error:
        logger.warning("KV reuse is off for this model: %s", error)
        return None, error.reason
    except Exception:
        logger.exception("KV reuse is off: the model's configuration cannot be read")
        return None, "model_unreadable"
    return facts, None
