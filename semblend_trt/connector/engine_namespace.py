"""The namespace of an engine's KV, from its EngineSpec, the model's files and the adapters' contents."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.connector.engine_spec import text_of
from semblend_trt.connector.requests import Adapters
from semblend_trt.errors import ConfigurationError
from semblend_trt.model_files import DigestCache, snapshot, tokenizer_digest, weights_digest
from semblend_trt.namespace import CacheNamespace, content_value, is_unknown, unknown_value

if TYPE_CHECKING:
    import torch

    from semblend_trt.config import Settings
    from semblend_trt.connector.engine_spec import EngineSpec
    from semblend_trt.connector.model_facts import ModelFacts

logger = logging.getLogger(__name__)


def namespace_for(
    engine: EngineSpec,
    facts: ModelFacts,
    settings: Settings,
    block_size: int,
    pool_dtype: torch.dtype | str,
    adapters: Adapters | None = None,
    scales: str | None = None,
) -> CacheNamespace:
    """Return the namespace of an engine's KV, before a request's salt and adapter are bound; `scales` as in PoolFacts.

    What the engine does not say becomes a value that matches none. Call it at the engine's start: it reads all weights
    that the digest cache does not know."""
    quantization, asked = facts.quantization, engine.quantization
    if asked is not None and asked.algorithm is not None:
        quantization = f"{quantization or 'none'}+{asked.algorithm}"
    cache, caches = DigestCache.from_setting(settings.digest_cache_path), engine.read_caches()
    adapters = adapters or Adapters(engine.lora_dirs, settings.digest_cache_path)
    model_revision, tokenizer_revision = settings.model_revision, settings.tokenizer_revision
    if model_revision is None and engine.reads_own_weights:
        with suppress(ConfigurationError):
            if (directory := snapshot(engine.model, engine.revision)) is not None:
                model_revision = content_value(weights_digest(directory, cache))
    if tokenizer_revision is None and engine.tokenizer is not None:
        tokenizer_revision = tokenizer_digest(engine.tokenizer, engine.tokenizer_revision or engine.revision)
    extra = {
        "compute_dtype": _known(engine.dtype),
        "configuration": _configuration(engine, facts, adapters),
        "tenant": settings.donor_tenant,
        "template": settings.donor_template,
    }
    layers = {}  # what they attend to and rotate by, where they do not all attend to everything and rotate alike
    if len(facts.groups) > 1 or facts.groups[0].window is not None:
        described = json.dumps([asdict(group) for group in facts.groups], sort_keys=True)
        layers = {"layer_groups": hashlib.sha256(described.encode()).hexdigest()}
    sizes = {
        "tp_size": engine.tensor_parallel_size,
        "pp_size": engine.pipeline_parallel_size,
        "cp_size": engine.context_parallel_size,
    }
    return CacheNamespace(
        model=_name(engine.model),
        model_revision=model_revision or unknown_value(),
        tokenizer=unknown_value() if engine.tokenizer is None else _name(engine.tokenizer),
        tokenizer_revision=tokenizer_revision or unknown_value(),
        kv_layout="HND",
        block_size=block_size,
        kv_dtype=_known(text_of(pool_dtype)),
        cache_dtype=_known(caches.dtype) + ("" if scales is None else f"+{scales}"),
        quantization=quantization,
        adapter=settings.adapter_id,
        rope_config={
            **facts.rope_parameters,
            "rotary_dim": facts.rotation.rotary_dim,
            "interleaved": facts.rotation.interleaved,
            **layers,
        },
        tensor_parallel={name: unknown_value() if size is None else size for name, size in sizes.items()},
        backend_cache_layout=_known(caches.layout),
        extra={name: value for name, value in extra.items() if value is not None},
    )


def _configuration(engine: EngineSpec, facts: ModelFacts, adapters: Adapters) -> str:
    """Return a digest of the model's configuration, and of quantisation and adapters at the engine's start."""
    asked = "none" if engine.quantization is None else _known(engine.quantization.options)
    parts = [facts.configuration, asked, *sorted(adapters.identities)]
    if any(map(is_unknown, parts)):
        return unknown_value()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def tokenizer_folder(engine: EngineSpec) -> Path | None:
    """Return the tokenizer's folder on this machine, None without one. Raises ConfigurationError for a bad name."""
    revision = engine.tokenizer_revision or engine.revision
    return None if engine.tokenizer is None else snapshot(engine.tokenizer, revision)


def _name(model: str | Path) -> str:
    """Return a hub id as it is, of a directory its name alone: its place may differ between replicas."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def _known(value: str | None) -> str:
    return unknown_value() if value is None else value
