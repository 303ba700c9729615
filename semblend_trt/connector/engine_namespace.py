"""The namespace of an engine's KV, from the engine's arguments and the model's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.model_files import commit_of, snapshot, tokenizer_digest, weights_digest
from semblend_trt.errors import ConfigurationError
from semblend_trt.namespace import CacheNamespace, unknown_value

if TYPE_CHECKING:
    import torch

    from semblend_trt.config import Settings
    from semblend_trt.connector.model_facts import ModelFacts


def namespace_for(
    llm_args: Any, facts: ModelFacts, settings: Settings, block_size: int, pool_dtype: torch.dtype | str
) -> CacheNamespace:
    """The namespace of an engine's KV, before a request's salt and adapter are bound.

    `llm_args` is TensorRT-LLM's (or has its field names). What it does not tell becomes a value that nobody matches.
    """
    tokenizer = _tokenizer_source(llm_args)
    cache_dtype = getattr(getattr(llm_args, "kv_cache_config", None), "dtype", None)
    extra = {
        "compute_dtype": _text(getattr(llm_args, "dtype", None)),
        "tenant": settings.donor_tenant,
        "template": settings.donor_template,
    }
    return CacheNamespace(
        model=_name(llm_args.model),
        model_revision=settings.model_revision or _model_revision(llm_args),
        tokenizer=unknown_value() if tokenizer is None else _name(tokenizer),
        tokenizer_revision=settings.tokenizer_revision or _tokenizer_revision(llm_args),
        kv_layout="HND",
        block_size=block_size,
        kv_dtype=_text(pool_dtype),
        cache_dtype=_text(cache_dtype),
        quantization=_joined_quantization(facts, llm_args),
        adapter=settings.adapter_id,
        rope_config={
            **facts.rope_parameters,
            "rotary_dim": facts.rotation.rotary_dim,
            "interleaved": facts.rotation.interleaved,
        },
        tensor_parallel=_parallel(llm_args),
        backend_cache_layout=_backend(llm_args),
        extra={name: value for name, value in extra.items() if value is not None},
    )


def _joined_quantization(facts: ModelFacts, llm_args: Any) -> str | None:
    """The checkpoint's quantisation and the one that the engine was asked for."""
    asked = getattr(llm_args, "quant_config", None)
    algorithm = getattr(asked, "quant_algo", None)
    if algorithm is None:
        return facts.quantization
    return f"{facts.quantization or 'none'}+{_text(algorithm)}"


def _model_revision(llm_args: Any) -> str:
    # Dummy weights are random: no digest of files describes them.
    if "dummy" in str(getattr(llm_args, "load_format", "")).lower():
        return unknown_value()
    try:
        directory = snapshot(llm_args.model, getattr(llm_args, "revision", None))
        if directory is None:
            return unknown_value()
        return commit_of(directory) or weights_digest(directory)
    except ConfigurationError:
        return unknown_value()


def _tokenizer_source(llm_args: Any) -> str | Path | None:
    """The path or hub id of the tokenizer; None for an object that does not say where it comes from."""
    tokenizer = getattr(llm_args, "tokenizer", None)
    if tokenizer is None:
        source: Any = llm_args.model
    elif isinstance(tokenizer, (str, Path)):
        source = tokenizer
    else:
        source = getattr(tokenizer, "name_or_path", None)
    return source if isinstance(source, (str, Path)) and str(source) else None


def tokenizer_folder(llm_args: Any) -> Path | None:
    """The folder of the engine's tokenizer on this machine, None without one. Raises ConfigurationError for a name that
    is neither a folder nor a hub id."""
    tokenizer = _tokenizer_source(llm_args)
    revision = getattr(llm_args, "tokenizer_revision", None) or getattr(llm_args, "revision", None)
    return None if tokenizer is None else snapshot(tokenizer, revision)


def _tokenizer_revision(llm_args: Any) -> str:
    try:
        directory = tokenizer_folder(llm_args)
        digest = None if directory is None else tokenizer_digest(directory)
    except (ConfigurationError, OSError):
        digest = None
    return digest or unknown_value()


def _name(model: str | Path) -> str:
    """A hub id as it is; a directory's own name, so that replicas may keep it at different places."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def _text(value: object) -> str:
    return unknown_value() if value is None else str(value).removeprefix("torch.")


def _parallel(llm_args: Any) -> dict[str, int | str]:
    names = {
        "tp_size": "tensor_parallel_size",
        "pp_size": "pipeline_parallel_size",
        "cp_size": "context_parallel_size",
    }
    sizes = {short: getattr(llm_args, name, None) for short, name in names.items()}
    return {short: unknown_value() if size is None else int(size) for short, size in sizes.items()}


def _backend(llm_args: Any) -> str:
    """Engine, attention backend and pool order: backends may round, or lay out, the same KV differently."""
    engine = type(llm_args).__module__.split(".", 1)[0]
    return f"{engine}/{getattr(llm_args, 'attn_backend', 'default')}/blocks.layers.kv.heads.tokens.channels"
