"""Loads a decoder model through Transformers, or says in one sentence why not, and runs an executor's slices.

Reuse plans that are pending for the slices are run as well."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_wrapper.batch import EngineForward
from engine_wrapper.self_check import measured
from engine_wrapper.sparse_forward import SparseForward, check_latent_cache
from engine_wrapper.token_schedule import SequenceSlice, works_of
from kernels.device import current_stream
from kernels.layout import indexable
from semblend_trt.connector.model_facts import configuration_digest, model_facts
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from semblend_trt.model_files import file_states, snapshot
from semblend_trt.model_tokenizer import embedded_engine_refusal, load_tokenizer, reason_of
from semblend_trt.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_wrapper.layer_schedule import EvidenceSink
    from engine_wrapper.sparse_forward import LayerHook
    from kernels.layout import KvGeometry, PagedKv
    from kernels.rope import Rotation
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.cost import CostModel
    from semblend_trt.model_files import FileState
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.transfer.load import LayerReadiness

SUPPORTED_MODEL_TYPES = (
    *("qwen2", "qwen3", "llama", "mistral", "mixtral", "qwen3_moe", "glm4_moe", "olmo2", "granite", "smollm3"),
    *("gpt_oss", "gemma3_text", "llama4_text", "deepseek_v3"),
)

_DTYPES = ("float32", "bfloat16", "float16")


# -- loading -----------------------------------------------------------------------------------------------------------


def _load_weights(model: str, dtype: torch.dtype | None) -> Any:
    """Return a Transformers model in `dtype`, None for the checkpoint's. Raises ConfigurationError."""
    try:
        loaded, loading = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with their names
        )
    except Exception as error:  # safetensors, hub and torch each raise their own types
        raise ConfigurationError(f"model {model}: its weights cannot be read: {reason_of(error)}") from error
    for problem, keys in (("missing", loading["missing_keys"]), ("of another shape", loading["mismatched_keys"])):
        if names := sorted(key if isinstance(key, str) else key[0] for key in keys):
            raise ConfigurationError(
                f"model {model}: {len(names)} weights are {problem}, the first is {names[0]}; they would be random"
            )
    return loaded


def _check_describes(folder: str, model: Any) -> None:
    """Raise ConfigurationError if the config.json of `folder` is another model's."""
    if _digest(AutoConfig.from_pretrained(folder, local_files_only=True)) != _digest(model.config):
        raise ConfigurationError(
            f"{folder} describes a model that computes otherwise than the one in memory; save its own "
            "configuration there"
        )


def _digest(config: Any) -> str:
    """Digest of the fields that the model's class computes text with; the dtype is that of the weights."""
    return configuration_digest(
        config.get_text_config().to_dict(), besides=frozenset({"architectures", "dtype", "torch_dtype"})
    )


def _states(model: str) -> dict[str, FileState] | None:
    """Return the states of the model's files, None when there are none or they cannot be read."""
    try:
        folder = snapshot(model)
        return None if folder is None else file_states(folder)
    except (OSError, ConfigurationError):
        return None


def _supported_facts(model: str) -> ModelFacts:
    if (refusal := embedded_engine_refusal()) is not None:
        raise ConfigurationError(refusal)
    facts = model_facts(model)
    if facts.model_type not in SUPPORTED_MODEL_TYPES and not facts.takes_images:
        raise UnsupportedModelError(
            "engine_model_type",
            f"model {model} is of type {facts.model_type}; the embedded engine runs {', '.join(SUPPORTED_MODEL_TYPES)}",
        )
    return facts


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Return the torch dtype of a setting; None for "auto". Raises ConfigurationError."""
    if dtype == "auto":
        return None
    if (name := str(dtype).removeprefix("torch.")) not in _DTYPES:
        raise ConfigurationError(f"dtype {dtype} is not supported; use auto, {', '.join(_DTYPES)}")
    return getattr(torch, name)  # type: ignore[no-any-return]


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device of a setting; "auto": CUDA where it is, else the CPU. Raises ConfigurationError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device {device} is unknown; use auto, cpu, cuda or cuda:N") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device {device} is not supported; use auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device {device} was asked for, but this machine has {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return resolved


def _text_part(model: Any) -> Any:
    """Return the model; of one that takes images, only what reads and writes text."""
    text = model
    if hasattr(getattr(model, "language_model", None), "lm_head"):  # as Llama 4 keeps it
        text = model.language_model
    elif hasattr(model.model, "language_model"):
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(model.config.text_config)
        text.model, text.lm_head = model.model.language_model, model.lm_head
        text.config, text.generation_config = text.model.config, model.generation_config
    check_latent_cache(text)
    return text.eval().requires_grad_(False)


# -- running -----------------------------------------------------------------------------------------------------------


class ModelRunner:
    """One model over one pool.

    The engine wrapper sets three attributes. `forward` asks `plan_source` once for each slice that has no plan yet.
    With `readiness`, while KV is on its way into the pool, every layer waits for its own. `evidence_sink` gets what the
    checks of a forward found. Every layer of every forward calls `before_layer` and `after_layer` with its index."""

    def __init__(
        self,
        model_path: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        *,
        model: Any = None,
    ) -> None:
        """Load a folder or a hub id in `dtype` (auto: the checkpoint's) onto `device` (auto: CUDA where it is).

        A `model` in memory is taken as it is, on its device, in its dtype; prompts are token ids. `model_path` is then
        a folder with its config.json, which engine and connector read again. No file identifies the weights, so no
        other engine shares their KV unless SEMBLEND_MODEL_REVISION names them. Raises ConfigurationError if something
        cannot be read, a setting is unknown, or the folder describes another model, UnsupportedModelError if the
        model's architecture or positions are not supported."""
        self._path, target, place = str(model_path), resolve_dtype(dtype), resolve_device(device)
        self.tokenizer: Any = None
        self.facts = _supported_facts(self._path)
        # The model's files as they were read; None for weights of no file.
        self.files: dict[str, FileState] | None = None
        if model is None:
            files = _states(self._path)
            self.tokenizer = load_tokenizer(self._path)
            # The Transformers model; called directly, it runs plain SDPA and touches no pool.
            self.model = _text_part(_load_weights(self._path, target)).to(place)
            self.files = files or _states(self._path)  # the model was downloaded just now
        else:
            _check_describes(self._path, model)
            self.model = _text_part(model)
        self.config = self.model.config
        # Of weights and hidden rows, and of the pool unless it is in fp8.
        self.dtype: torch.dtype = self.model.dtype
        self.device: torch.device = self.model.device
        self._detach()

    def _detach(self) -> None:
        self._forward: SparseForward | None = None
        self._max_rows: int | None = None
        self.plan_source: Callable[[int], SemanticKvPlan | None] | None = None
        self.readiness: LayerReadiness | None = None
        self.evidence_sink: EvidenceSink | None = None
        self.before_layer: LayerHook | None = None
        self.after_layer: LayerHook | None = None

    def check_source(self, model: str) -> None:
        """Raise ConfigurationError if `model` is another than the runner's, or its files have changed since."""
        own, other = (snapshot(name) or name for name in (self._path, model))
        if Path(own).resolve() != Path(other).resolve():
            raise ConfigurationError(
                f"model is {model}, and the runner holds {self._path}; lend a runner of the same model, or none"
            )
        if self.files is not None and _states(model) != self.files:
            raise ConfigurationError(f"the files of model {model} have changed since they were loaded; load again")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a generation by the model's generation settings or its tokenizer."""
        sources = self.model.generation_config, self.config, self.tokenizer
        given = (getattr(source, "eos_token_id", None) for source in sources)
        lists = (ids if isinstance(ids, (list, tuple)) else [ids] for ids in given if ids is not None)
        return frozenset(token for ids in lists for token in ids)

    def share(self) -> ModelRunner:
        """Return a runner with the same weights for another engine: without pool, plan source and hooks."""
        runner = copy.copy(self)
        runner._detach()
        return runner

    def attach_pool(self, pool: torch.Tensor, geometry: KvGeometry, max_rows: int | None = None) -> None:
        """Set the pool, [blocks, layers, 2, kv_heads * block_size * head_dim], and the most rows of one forward.

        Plans that add more rows run in several (see `engine_wrapper.batch`)."""
        self._forward = SparseForward(self.model, pool, geometry)
        self._max_rows = max_rows

    def forward(self, slices: Sequence[SequenceSlice], all_rows: bool = False) -> torch.Tensor:
        """Run one iteration; return logits, float32 [len(slices), vocabulary], of each slice's last row.

        With `all_rows`, returns those of all slices' tokens. Raises PlanError when a plan does not fit its slice,
        ConfigurationError without a pool."""
        if (decoder := self._forward) is None:
            raise ConfigurationError("the model runner has no pool; call attach_pool before forward")
        if (source := self.plan_source) is not None:
            slices = [replace(each, plan=source(each.request_id)) if each.plan is None else each for each in slices]
        works = works_of(slices, self.facts.num_layers)
        if not all_rows:
            works = [replace(work, outputs=1) for work in works]

        hooks: dict[str, Any] = {"before_layer": self._before, "after_layer": self.after_layer}
        own = partial(decoder, **hooks), partial(decoder.lowest, **hooks)
        forward = EngineForward(decoder.geometry, Ranks(), *own, self._max_rows)
        return decoder.logits(forward.hidden(works, self.device, self.evidence_sink))

    def replay(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run a recorded decode step, in which no hook runs; return logits as `forward` does.

        Raises RuntimeError if a plan waits for one of the slices: what was recorded asks for no plan."""
        source = self.plan_source
        if source is not None and any(source(each.request_id) is not None for each in slices):
            raise RuntimeError("a plan waits for a decode step, which is replayed; at least two tokens must be left")
        if self.readiness is not None:
            self.readiness.join(current_stream(self.device))
        hooks = source, self.before_layer, self.after_layer
        self.plan_source = self.before_layer = self.after_layer = None
        try:
            return self.forward(slices)
        finally:
            self.plan_source, self.before_layer, self.after_layer = hooks

    def measured_costs(self, kv: PagedKv, rotation: Rotation, longest: int) -> CostModel | None:
        """Measure what plans cost, over blocks that are zero before and after it (`engine_wrapper.self_check`)."""

        def run(tokens: list[int], begin: int, blocks: list[int], plan: SemanticKvPlan | None) -> None:
            self.forward([SequenceSlice(0, begin, tuple(tokens[begin:]), tuple(blocks), plan)])

        with torch.inference_mode():
            some = range(min(997, self.config.get_text_config().vocab_size))
            found = measured(run, some, kv, rotation, Ranks(), min(longest, self._max_rows or longest))
            indexable(kv.memory)[kv.block_ids] = 0
        return found

    def _before(self, layer: int) -> None:
        """Wait for the layer's KV, then call `before_layer`."""
        if self.readiness is not None:
            self.readiness.wait(layer, current_stream(self.device))
        if self.before_layer is not None:
            self.before_layer(layer)
