"""The namespace of an engine's KV, from the engine's arguments, the model's files and the adapters' contents."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.model_files import (
    TOKENIZER_FILES,
    DigestCache,
    FileState,
    adapter_files,
    digest_in,
    digest_of_files,
    snapshot,
    weights_digest,
)
from semblend_trt.errors import ConfigurationError
from semblend_trt.namespace import CacheNamespace, content_value, is_unknown, unknown_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from semblend_trt.config import Settings
    from semblend_trt.connector.layer_groups import LayerGroup
    from semblend_trt.connector.model_facts import ModelFacts

logger = logging.getLogger(__name__)


def namespace_for(
    llm_args: Any,
    facts: ModelFacts,
    settings: Settings,
    block_size: int,
    pool_dtype: torch.dtype | str,
    adapters: Adapters | None = None,
    scales: str | None = None,
) -> CacheNamespace:
    """The namespace of an engine's KV, before a request's salt and adapter are bound. `scales`: those of PoolFacts.

    `llm_args` is TensorRT-LLM's (or has its field names). What it does not tell becomes a value that matches none.
    Reads the model's weights, all of them where the digest cache does not know them: call it at the engine's start.
    """
    cache = DigestCache.from_setting(settings.digest_cache_path)
    tokenizer = _tokenizer_source(llm_args)
    cache_dtype = getattr(getattr(llm_args, "kv_cache_config", None), "dtype", None)
    extra = {
        "compute_dtype": _text(getattr(llm_args, "dtype", None)),
        "configuration": _configuration(llm_args, facts, adapters or Adapters(llm_args, settings.digest_cache_path)),
        "tenant": settings.donor_tenant,
        "template": settings.donor_template,
    }
    return CacheNamespace(
        model=_name(llm_args.model),
        model_revision=settings.model_revision or _model_revision(llm_args, cache),
        tokenizer=unknown_value() if tokenizer is None else _name(tokenizer),
        tokenizer_revision=settings.tokenizer_revision or _tokenizer_revision(llm_args),
        kv_layout="HND",
        block_size=block_size,
        kv_dtype=_text(pool_dtype),
        cache_dtype=_text(cache_dtype) + ("" if scales is None else f"+{scales}"),
        quantization=_quantization(facts, llm_args),
        adapter=settings.adapter_id,
        rope_config={
            **facts.rope_parameters,
            "rotary_dim": facts.rotation.rotary_dim,
            "interleaved": facts.rotation.interleaved,
            **_layers(facts.groups),
        },
        tensor_parallel=_parallel(llm_args),
        backend_cache_layout=_backend(llm_args),
        extra={name: value for name, value in extra.items() if value is not None},
    )


def _layers(groups: Sequence[LayerGroup]) -> dict[str, str]:
    """A digest of what layers attend to and rotate by; nothing where all attend to everything and rotate alike."""
    if len(groups) == 1 and groups[0].window is None:
        return {}
    told = json.dumps([asdict(group) for group in groups], sort_keys=True)
    return {"layer_groups": hashlib.sha256(told.encode()).hexdigest()}


def _quantization(facts: ModelFacts, llm_args: Any) -> str | None:
    """The checkpoint's quantisation and the one that the engine was asked for."""
    algorithm = getattr(getattr(llm_args, "quant_config", None), "quant_algo", None)
    return facts.quantization if algorithm is None else f"{facts.quantization or 'none'}+{_text(algorithm)}"


def _configuration(llm_args: Any, facts: ModelFacts, adapters: Adapters) -> str:
    """A digest of the model's configuration, and of the quantisation and adapters that the engine was started with."""
    asked = getattr(llm_args, "quant_config", None)
    # An engine that quantises nothing may say so at length.
    algorithms = [getattr(asked, name, None) for name in ("quant_algo", "kv_cache_quant_algo")]
    is_quantised = any(algorithm is not None for algorithm in algorithms)
    parts = [facts.configuration, _content(asked) if is_quantised else "none", *sorted(adapters.identities)]
    if any(is_unknown(part) for part in parts):
        return unknown_value()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _content(options: Any) -> str:
    """The options of an object as text, the same for equal ones."""
    dump = getattr(options, "model_dump", None)
    values = dump(mode="json") if callable(dump) else getattr(options, "__dict__", options)
    try:
        return json.dumps(values, sort_keys=True)
    except (TypeError, ValueError):
        return unknown_value()


def _model_revision(llm_args: Any, cache: DigestCache | None) -> str:
    """The digest of the weights. It is unknown for dummy weights, which are random, and with a loader of the user's
    own, which may read others."""
    is_dummy = "dummy" in str(getattr(llm_args, "load_format", "")).lower()
    if not is_dummy and getattr(llm_args, "checkpoint_loader", None) is None:
        with suppress(ConfigurationError):
            directory = snapshot(llm_args.model, getattr(llm_args, "revision", None))
            if directory is not None:
                return content_value(weights_digest(directory, cache))
    return unknown_value()


def _tokenizer_source(llm_args: Any) -> str | Path | None:
    """The path or hub id of the tokenizer; None for an object that does not name its source."""
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
    with suppress(ConfigurationError, OSError):
        directory = tokenizer_folder(llm_args)
        if directory is not None and (digest := digest_in(directory, TOKENIZER_FILES)) is not None:
            return content_value(digest)
    return unknown_value()


def _name(model: str | Path) -> str:
    """A hub id as it is; of a directory its name alone, so that replicas may keep it at different places."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def _text(value: object) -> str:
    return unknown_value() if value is None else str(value).removeprefix("torch.")


def _parallel(llm_args: Any) -> dict[str, int | str]:
    names = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size", "cp_size": "context_parallel_size"}
    sizes = {short: getattr(llm_args, name, None) for short, name in names.items()}
    return {short: unknown_value() if size is None else int(size) for short, size in sizes.items()}


def _backend(llm_args: Any) -> str:
    """Engine, attention backend and pool order: backends may round, or lay out, the same KV differently.

    vLLM's arguments say it themselves.
    """
    named = getattr(llm_args, "backend_cache_layout", None)
    if named is not None:
        return str(named)
    engine = type(llm_args).__module__.split(".", 1)[0]
    return f"{engine}/{getattr(llm_args, 'attn_backend', 'default')}/blocks.layers.kv.heads.tokens.channels"


# An engine holds far fewer; requests may name as many as they like.
MAX_REMEMBERED = 4096


class Adapters:
    """The adapters of an engine. Those in `lora_config.lora_dir` are read when this is made; requests read nothing.

    An adapter that first comes with a request has an identity of its own, for the life of this engine.
    """

    def __init__(self, llm_args: Any, cache_path: Path | None = None) -> None:
        folders = getattr(getattr(llm_args, "lora_config", None), "lora_dir", None) or ()
        cache = DigestCache.from_setting(cache_path)
        self._read = {_place(folder): _identity_of(str(folder), cache) for folder in folders}
        self._of_task: dict[int, tuple[str | None, str, tuple[FileState, ...]]] = {}

    @property
    def identities(self) -> list[str]:
        """The identities of the adapters that the engine was started with: their embeddings may replace the base
        model's."""
        return [identity for identity, _ in self._read.values()]

    def of(self, request: Any) -> str | None:
        """The identity of the request's adapter; None for the base model.

        The engine keeps the first adapter that comes under a task id, but may read it again. One that comes under the
        same id from another place, or whose files have changed since, matches nothing.
        """
        task = getattr(request, "lora_task_id", None)
        if task is None:
            return None
        path = getattr(request, "py_lora_path", None)
        if task not in self._of_task:
            if len(self._of_task) >= MAX_REMEMBERED:
                return unknown_value()
            self._of_task[task] = (path, self._unchanged(path), _states_or_none(path))
        seen, identity, states = self._of_task[task]
        return identity if path == seen and _states_or_none(path) == states else unknown_value()

    def _unchanged(self, path: str | None) -> str:
        """The identity of an adapter that was read at the start, if its files have not changed since: the engine reads
        them about now."""
        if path is not None and (read := self._read.get(_place(path))) is not None:
            with suppress(OSError, ConfigurationError):
                if _states(path) == read[1]:
                    return read[0]
        return unknown_value()


def _place(path: str | Path) -> str:
    return str(Path(path).absolute())


def _states_or_none(path: str | None) -> tuple[FileState, ...]:
    """The states of an adapter's files; none where it has no readable ones."""
    with suppress(OSError, ConfigurationError):
        return () if path is None else _states(path)
    return ()


def _states(path: str) -> tuple[FileState, ...]:
    return tuple(map(FileState.of, adapter_files(Path(path)).values()))


def _identity_of(path: str, cache: DigestCache | None) -> tuple[str, tuple[FileState, ...]]:
    """An adapter's identity, and the states of its files when it was read."""
    try:
        states = _states(path)
        return content_value(digest_of_files(adapter_files(Path(path)), cache)), states
    except (OSError, ConfigurationError) as error:
        logger.warning("adapter %s cannot be read, and its KV is shared with no other engine: %s", path, error)
        return unknown_value(), ()
