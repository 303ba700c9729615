"""What must be known of a model before its KV may be moved: its geometry and its rotation.

Everything is read from the model's own configuration, as Transformers 4 or 5 understands it. Whatever is not known to
be safe is refused by name: a wrong rotation is worse than none.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.engine_namespace import namespace_for
from semblend_trt.connector.model_files import is_local, quantisation_digest, snapshot, weights_digest
from semblend_trt.connector.rope_reading import partial_rotary_factor, rope_parameters, rope_rotation
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from semblend_trt.transformers_version import imported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.rope import RopeRotation

__all__ = ["ModelFacts", "model_facts", "namespace_for", "weights_digest"]


@dataclass(frozen=True, slots=True)
class _Family:
    """A model type whose attention is known. `partial_rotary`: its code honours a partial_rotary_factor."""

    architecture: str
    partial_rotary: bool = False


# All of them rotate half-split (NeoX) pairs and cache K after the rotation.
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM"),
    "phi3": _Family("Phi3ForCausalLM", partial_rotary=True),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM"),
}


# Of config.json: who made it and with what, and what a generation or a classification takes from it.
HARMLESS_FIELDS = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "decoder_start_token_id",
        "do_sample",
        "early_stopping",
        "eos_token_id",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "problem_type",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "transformers_version",
        "typical_p",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of the whole model (not of one rank's shard), its rotation, and the quantisation of its weights.

    `configuration` is a digest of everything in its configuration that can change what it computes.
    """

    model_type: str
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rotation: RopeRotation
    rope_parameters: dict[str, Any]
    quantization: str | None
    configuration: str


def model_facts(model: str | Path, revision: str | None = None) -> ModelFacts:
    """Reads the facts from the configuration of `model`, a directory or a hub id; a directory needs no network.

    Raises ConfigurationError when there is no readable configuration, UnsupportedModelError when the model has a
    feature whose KV cannot be moved safely.
    """
    raw, config = _load_config(model, revision)
    family = _FAMILIES[raw["model_type"]]
    _refuse_attention(config)
    rope = rope_parameters(raw, config)
    if not family.partial_rotary and partial_rotary_factor(rope) != 1.0:
        raise UnsupportedModelError(
            "rope_partial",
            f"partial_rotary_factor {partial_rotary_factor(rope):g} is set, but {family.architecture} does not define "
            "what it means",
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    if min(heads, kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        raise UnsupportedModelError(
            "geometry",
            f"{heads} query heads over {kv_heads} KV heads of {head_dim} channels are not a grouped attention that can "
            "be moved",
        )
    directory = snapshot(model, revision)
    return ModelFacts(
        model_type=raw["model_type"],
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=config.max_position_embeddings,
        rotation=rope_rotation(rope, head_dim),
        rope_parameters=rope,
        quantization=_quantization(raw, directory),
        configuration=_configuration(raw, directory),
    )


def configuration_digest(config: Mapping[str, Any], *, besides: frozenset[str] = frozenset()) -> str:
    """Digest of a model's configuration less `besides` and what is known to change no KV: names, versions, and how
    tokens are generated. An unknown field counts. The order of fields, and 1 or 1.0, do not."""
    harmless = HARMLESS_FIELDS | besides
    kept = {name: _canonical(value) for name, value in config.items() if name not in harmless}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def _load_config(model: str | Path, revision: str | None) -> tuple[dict[str, Any], Any]:
    """Returns the configuration as written and as Transformers understands it."""
    config_class, auto_config = imported("PretrainedConfig"), imported("AutoConfig")
    options = {"revision": revision, "local_files_only": is_local(model)}
    try:
        raw, _ = config_class.get_config_dict(str(model), **options)
        if raw:
            _refuse_type(raw)
            return raw, auto_config.from_pretrained(str(model), trust_remote_code=False, **options)
    except UnsupportedModelError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if options["local_files_only"]:
            raise ConfigurationError(f"{Path(model, 'config.json')} cannot be read, mend it: {told}") from error
        raise ConfigurationError(
            f"model {str(model)!r} is no directory, and nothing can be read under it as a hub id; give a directory, or "
            f"download the model: {told}"
        ) from error
    raise ConfigurationError(f"model {str(model)!r} has no config.json; name a directory or hub id that has one")


def _refuse_type(raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if raw.get("kv_lora_rank"):
        raise UnsupportedModelError("mla", f"model type {model_type!r} caches latent attention (MLA), not K and V")
    if any(name in raw for name in ("vision_config", "audio_config", "text_config", "thinker_config")):
        raise UnsupportedModelError("multimodal", f"model type {model_type!r} takes more than text")
    ropes = [raw.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    if any("mrope_section" in rope or "mrope" in (rope.get("rope_type"), rope.get("type")) for rope in ropes):
        raise UnsupportedModelError("rope_multimodal", f"model type {model_type!r} uses multimodal RoPE (mrope)")
    if model_type not in _FAMILIES:
        raise UnsupportedModelError(
            "unknown_model_type",
            f"model type {model_type!r} is not one whose KV is known to be movable: {', '.join(_FAMILIES)}",
        )
    expected = _FAMILIES[model_type].architecture
    architectures = raw.get("architectures") or [expected]
    if architectures != [expected] or "AutoModelForCausalLM" in (raw.get("auto_map") or {}):
        raise UnsupportedModelError(
            "unknown_architecture",
            f"architecture {architectures} of model type {model_type!r} is not {expected}, or brings its own code",
        )


def _refuse_attention(config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if window is not None and window < config.max_position_embeddings and layer_types != {"full_attention"}:
        raise UnsupportedModelError(
            "sliding_window",
            f"a sliding window of {window} tokens is in use, shorter than the {config.max_position_embeddings} "
            "positions of the model; KV outside it is dropped by the engine",
        )
    if layer_types - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError("attention_layout", f"layer types {sorted(layer_types)} are not all full attention")


def _quantization(raw: dict[str, Any], directory: Path | None) -> str | None:
    """Name and digest of the weights' quantisation. Raises UnsupportedModelError when the KV is quantised too."""
    declared = dict(raw.get("quantization_config") or {})
    # ModelOpt checkpoints, which TensorRT-LLM reads, keep it in a file of its own.
    modelopt = None if directory is None else directory / "hf_quant_config.json"
    if modelopt is not None and modelopt.is_file():
        try:
            declared.update(json.loads(modelopt.read_text("utf-8")).get("quantization") or {})
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ConfigurationError(f"{modelopt} cannot be read: {error}") from error
    if not declared:
        return None
    kv_scheme = declared.get("kv_cache_scheme") or declared.get("kv_cache_quant_algo")
    if kv_scheme:
        raise UnsupportedModelError("kv_quantized", f"the KV cache is quantised ({kv_scheme}); it cannot be moved")
    return _described(declared)


def _configuration(raw: dict[str, Any], directory: Path | None) -> str:
    try:
        files = None if directory is None else quantisation_digest(directory)
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    return configuration_digest({**raw, "files of quantisation": files})


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _canonical(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _described(quantization: dict[str, Any]) -> str:
    name = quantization.get("quant_method") or quantization.get("quant_algo") or "unnamed"
    content = json.dumps(quantization, sort_keys=True, default=str).encode()
    return f"{name}:{hashlib.sha256(content).hexdigest()[:32]}"
