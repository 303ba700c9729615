"""Which engines, models and requests may be served with reuse, by EngineSpec and by TensorRT-LLM's LlmRequest.

TensorRT-LLM lets several combinations reach a connector that give wrong data (block ids that are no pool rows, more
than one beam, multimodal placeholders that are equal for different images). They are refused here, by name.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.attention_layout import LLAMA4, halved
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from semblend_trt.outcome import Scope, advice
from semblend_trt.policy import ReusePolicy, allows_reuse, terms_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from semblend_trt.config import Settings
    from semblend_trt.connector.contract import ContractVersion
    from semblend_trt.connector.engine_spec import EngineSpec
    from semblend_trt.connector.model_facts import ModelFacts

logger = logging.getLogger(__name__)

# Policies under which an engine that executes no plans reuses text at its own place alone.
_AT_ITS_PLACE = (ReusePolicy.EXACT, ReusePolicy.VERIFIED)
_MISSING = object()
# A request's salt is text in main, an unsigned 64-bit number in 1.3rc.
_SALTS = {"cache_salt": str, "cache_salt_id": int}


class IneligibleRequest(Exception):  # noqa: N818 - a refusal, not an error
    """The request must be served as if the connector were absent; `reason` is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def engine_refusal(engine: EngineSpec) -> str | None:
    """The reason for which no request of this engine may be reused, None when there is none."""
    # After a swap to host memory a block id is no longer its row in the pool.
    if engine.offloads_to_host:
        return "host_offload"
    if cuts_kv(engine, engine.attention_windows):
        return "attention_window"
    if engine.speculates:
        return "speculative_decoding"
    if engine.has_model_overrides:
        return "model_kwargs"
    if engine.attention_dp:
        return "attention_dp"
    if (parallel := _parallel_refusal(engine)) is not None:
        return parallel
    # Version 1.1 holds no block for a save then.
    if engine.is_disaggregated:
        return "disaggregated"
    return None if engine.orders_blocks_by_head else "attention_backend"


def cuts_kv(engine: EngineSpec, windows: Iterable[int | None]) -> bool:
    """Whether the engine drops KV outside of one of `windows`, in tokens, None for none: one that is shorter than its
    longest sequence, or may be.

    Facts: `resource_manager.py` (V1) and `kv_cache_manager_v2.py` free a block once a window has passed it, and have a
    pool, or a layer group, for each window that is shorter than `max_seq_len`.
    """
    longest = engine.max_seq_len
    return any(window is not None and (longest is None or window < longest) for window in windows)


def _parallel_refusal(engine: EngineSpec) -> str | None:
    if (engine.context_parallel_size or 1) > 1:
        return "context_parallel"
    return "pipeline_parallel" if (engine.pipeline_parallel_size or 1) > 1 else None


def check_eligible(request: Any) -> None:
    """Raises IneligibleRequest for every request whose KV may not be shared. `request.refusal` is what the engine's own
    half has found."""
    if (refusal := getattr(request, "refusal", None)) is not None:
        raise IneligibleRequest(refusal)
    if _flag(request, "is_dummy_request"):
        raise IneligibleRequest("dummy_request")
    if _flag(request, "is_generation_only_request"):
        raise IneligibleRequest("generation_only")
    if _beam_width(request) > 1:
        raise IneligibleRequest("beam_search")
    if getattr(request, "py_multimodal_data", None) or getattr(request, "multimodal_hashes", None):
        raise IneligibleRequest("multimodal")
    if getattr(request, "draft_tokens", None):
        raise IneligibleRequest("speculative_decoding")
    if _flag(request, "py_return_context_logits"):
        raise IneligibleRequest("context_logits")


def cache_salt_of(request: Any) -> str | None:
    """The request's salt: `cache_salt` (main) or `cache_salt_id` (1.3rc); None when it has none.

    Raises IneligibleRequest when the engine has neither attribute, because isolation is unknown then, and for a salt of
    another type or size: its text could equal another salt's.
    """
    for name, kind in _SALTS.items():
        salt = getattr(request, name, _MISSING)
        if salt is _MISSING:
            continue
        if salt is None:
            return None
        if type(salt) is not kind or (isinstance(salt, int) and not 0 <= salt < 1 << 64):
            raise IneligibleRequest("salt_invalid")
        return str(salt)
    raise IneligibleRequest("salt_unknown")


def _beam_width(request: Any) -> int:
    sampling = getattr(request, "sampling_config", None)
    return int(getattr(sampling, "beam_width", 1) or 1)


def _flag(request: Any, name: str) -> bool:
    # `is_generation_only_request` is a property of the C++ binding and a method of the Python subclass.
    value = getattr(request, name, False)
    return bool(value() if callable(value) else value)


def decoder_refusal(engine: EngineSpec) -> str | None:
    """Why no plan can be executed under these settings of TensorRT-LLM; None when it can."""
    off = {
        "compiled_prefill": engine.compiles_prefill,
        "cuda_graphs": engine.cuda_graphs,
        "lora": engine.lora,
        "speculative_decoding": engine.speculates,
        "sparse_attention": engine.sparse_attention,
    }
    for reason, is_on in off.items():
        if is_on is None:
            return "settings_unknown"
        if is_on:
            return reason
    if (parallel := _parallel_refusal(engine)) is not None:
        return parallel
    # FlashInfer's pages are laid out in another way, and the plain backend has one page for all tokens.
    return None if engine.attn_backend == "TRTLLM" else "attention_backend"


def facts_in_engine(facts: ModelFacts, engine: EngineSpec) -> ModelFacts:
    """Facts of a model as this engine computes it; `facts` are those of Transformers."""
    if facts.model_type not in engine.halved_model_types:
        return facts
    return replace(facts, groups=halved(facts.groups))


def served_facts(engine: EngineSpec, policy: ReusePolicy) -> ModelFacts:
    """The facts of the engine's model. Raises ConfigurationError, and UnsupportedModelError for a model whose KV cannot
    be moved, or that this engine computes otherwise than Transformers, as far as `policy` asks for it."""
    facts = model_facts(engine.model, engine.revision, engine.tells_kv_scales)
    if engine.contract is None:
        return facts_in_engine(facts, engine)
    if (refusal := trtllm_refusal(facts, engine.contract, policy)) is not None:
        raise refusal
    return facts


def rotates_otherwise(facts: ModelFacts) -> bool:
    """Whether TensorRT-LLM rotates by other frequencies than these facts: create_sinusoidal_positions_yarn of its
    `functional.py` always truncates. There KV of such a model is reused at its own place alone."""
    return facts.rope_parameters.get("truncate", True) is not True


def trtllm_refusal(facts: ModelFacts, version: ContractVersion, policy: ReusePolicy) -> UnsupportedModelError | None:
    """Why TensorRT-LLM of a contract's version does not serve a model under `policy` that vLLM and the embedded engine
    do; None when it does. Facts: pull request 6768 (windows); attention takes the size of chunks as
    an argument (`attention_backend/trtllm.py`), and no plan was tried there."""
    if any(facts.windows) and not version.keeps_windowed_kv:
        return UnsupportedModelError(
            "sliding_window",
            f"{facts.model_type} has layers with a sliding window, and TensorRT-LLM {version.name} writes new KV over "
            "what lies outside of it; use TensorRT-LLM 1.2 or later, or vLLM",
        )
    if facts.model_type in LLAMA4:
        return UnsupportedModelError(
            "attention_layout",
            f"{facts.model_type} has layers with chunks, over which no plan was tried in TensorRT-LLM; serve it with "
            "vLLM",
        )
    if rotates_otherwise(facts) and policy not in _AT_ITS_PLACE:
        return UnsupportedModelError(
            "rope_unknown",
            "yarn with truncate off is computed otherwise by TensorRT-LLM, which truncates, and no key can be moved "
            f"there as policy {policy.value} asks; use policy verified or exact, or vLLM",
        )
    return None


def facts_or_refusal(engine: EngineSpec, settings: Settings) -> tuple[ModelFacts | None, str | None]:
    """The model's facts, or the reason for which no request of this engine may be reused. Never raises."""
    if not allows_reuse(settings.policy):
        return None, "policy_off"
    refusal = engine_refusal(engine)
    if refusal is not None:
        logger.warning(
            "KV reuse is off: the engine uses %s, with which block contents cannot be trusted. %s",
            refusal,
            advice(refusal, Scope.ENGINE),
        )
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
