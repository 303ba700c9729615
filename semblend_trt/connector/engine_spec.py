"""EngineSpec and EngineRequest: what the connector knows of an engine and of its requests, whichever it is.

Only a constructor reads an engine's own objects: `from_llm_args` and `LlmRequestView` read those of TensorRT-LLM and of
the embedded engine."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.policy import BROKEN_PROFILES, COLD, EXACT_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

# The module of the connector that also attaches to its engine.
WRAPPER_MODULE = "engine_wrapper.connector"


@dataclass(frozen=True, slots=True)
class AskedQuantization:
    """The quantisation that an engine was asked for; None for what is not known. `options`: all of them as text."""

    algorithm: str | None
    options: str | None


@dataclass(frozen=True, slots=True)
class Caches:
    """An engine's KV caches; None for what is not known.

    `dtype`: as asked, with a digest of the scales if known. `layout`: engine, attention backend and order in memory,
    because backends may round, or order, the same KV in different ways."""

    dtype: str | None
    layout: str | None


@dataclass(frozen=True, eq=False)  # no slots: halves of a connector hold it weakly
class EngineSpec:
    """One engine. None means that the engine does not say it, which is never taken for off.

    Sizes of parallelism that are None are the engine's default of 1, but unknown to a namespace.

    - `kv_dtype`: of K and V in the caches, as torch names it.
    - `read_caches`: some engines know their caches only after these are registered.
    - `has_model_overrides`: something other than the model's files changes its configuration.
    - `attention_windows`: the windows that the engine was asked to keep KV for.
    - `orders_blocks_by_head`: a block is known to hold [heads, tokens, head_dim], which the pool's shape does not show.
    - `compiles_prefill` to `sparse_attention`: with these TensorRT-LLM executes no plan.
    - `contract`: TensorRT-LLM's version, whose own code computes the model. None: windows and RoPE are computed as
      Transformers does, with the KV of all tokens in one pool.
    - `halved_model_types`: model types whose channels the engine reorders, so that halves of a head rotate.
    - `holds_saved_blocks`: an ended request's blocks are held until `get_finished` names it.
    - `tells_whole_prefix`: a request's local match counts all tokens of its prefix that the engine reuses.
    - `settings`: of the connector; they win over the environment.
    - `refusal`: why nothing is reused, if its constructor has found a reason."""

    name: str
    model: str | Path
    revision: str | None
    tokenizer: str | Path | None
    tokenizer_revision: str | None
    dtype: str | None
    read_caches: Callable[[], Caches] = field(repr=False)
    quantization: AskedQuantization | None
    reads_own_weights: bool
    has_model_overrides: bool
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    context_parallel_size: int | None
    max_num_tokens: int | None
    speculates: bool | None
    orders_blocks_by_head: bool
    contract: str | None
    tells_kv_scales: bool
    holds_saved_blocks: bool
    kv_dtype: str | None = None
    max_seq_len: int | None = None
    attention_windows: tuple[int | None, ...] = ()
    attention_dp: bool = False
    offloads_to_host: bool = False
    is_disaggregated: bool = False
    attn_backend: str | None = None
    compiles_prefill: bool | None = None
    prefill_graphs: bool = False
    lora: bool | None = None
    sparse_attention: bool = False
    lora_dirs: tuple[str, ...] = ()
    halved_model_types: tuple[str, ...] = ()
    tells_whole_prefix: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # an address may hold a password
    refusal: str | None = None

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size or 1


def tokenizer_source(tokenizer: Any, model: str | Path) -> str | Path | None:
    """Return the path or hub id of an engine's tokenizer, by default its model's; None if an object names no source."""
    source = model if tokenizer is None else tokenizer
    if not isinstance(source, (str, Path)):
        source = getattr(source, "name_or_path", None)
    return source if isinstance(source, (str, Path)) and str(source) else None


def text_of(value: object) -> str | None:
    """Return a dtype's name, as an engine or torch gives it."""
    return None if value is None else str(value).removeprefix("torch.")


def options_text(options: Any) -> str | None:
    """Return an object's options as text, the same for equal ones; None if they cannot be written."""
    dump = getattr(options, "model_dump", None)
    values = dump(mode="json") if callable(dump) else getattr(options, "__dict__", options)
    try:
        return json.dumps(values, sort_keys=True)
    except (TypeError, ValueError):
        return None


class EngineRequest(ABC):
    """One request as the scheduler half reads it. Each engine has a view of its own requests, which derives from this.

    `max_new_tokens`: 0 if it is not known. `refusal`: why it is served as if there were no connector; nothing else is
    read then. `adapter_identity`: of the weights that the engine has loaded; without it `lora_task` names the adapter,
    None the base model, and `lora_path` its folder. `taken_tokens`: of the offer, None if the engine does not say."""

    request_id: int
    prompt_len: int
    max_new_tokens: int = 0
    cache_salt: str | None = None
    adapter_identity: str | None = None
    lora_task: int | None = None
    lora_path: str | None = None
    exact_only: bool = False
    cold: bool = False
    broken_profiles: Sequence[str] = ()
    taken_tokens: int | None = None

    @property
    @abstractmethod
    def refusal(self) -> str | None: ...

    @abstractmethod
    def token_array(self, count: int) -> npt.NDArray[np.int32]:
        """Return the first tokens, int32 [count]."""

    def ask(self, given: object) -> None:
        """Take what the request asks of the connector, by a dictionary with names of `semblend_trt.policy`."""
        asked = given if isinstance(given, dict) else {}
        self.exact_only, self.cold = asked.get(EXACT_ONLY) is True, asked.get(COLD) is True
        broken = asked.get(BROKEN_PROFILES)
        self.broken_profiles = broken if isinstance(broken, list) else []
