"""What must be known of a model to move its KV: its sizes, and how its layers attend and rotate.

Its own configuration tells all of it, as Transformers 4 or 5 understands it. What is not known to be safe is refused by
name: a wrong rotation is worse than none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kernels.layout import KvGeometry
from kernels.rope import RopeRotation, Rotation, by_layer, still
from semblend_trt.connector.attention_layout import (
    LLAMA4,
    PUBLISHED_CODE,
    READ_AS,
    LayerGroup,
    chunk_refusals,
    latent_refusals,
    latent_rotation,
    layer_groups,
    partial_rotary_factor,
    rope_parameters,
    rope_rotation,
    sizes_of,
)
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from semblend_trt.files import read_input
from semblend_trt.model_files import PARAMETER_FILES, digest_in, is_local, snapshot
from semblend_trt.model_tokenizer import imported

# Model types of known attention. All cache K after the rotation; latent ones and Llama 4 rotate neighbouring pairs.
_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# Those that take images too: their architecture, and the part that reads text. Requests with images are refused.
_WITH_IMAGES = {"gemma3": "Gemma3ForConditionalGeneration", "llama4": "Llama4ForConditionalGeneration"}
# Those whose full attention and windows have a RoPE each.
_ROPE_BY_ATTENTION = ("gemma3_text",)
# Those that name the layers that have none.
_NO_ROPE_LAYERS = ("smollm3", "llama4_text")
# Those whose code honours a partial_rotary_factor.
_PARTIAL_ROTARY = ("glm4_moe", "phi3")
# Those whose code may have a window in some layers, in every engine alike.
_WINDOWED = ("gemma3_text", "gpt_oss")
# Fields by which some engine or model attends otherwise, and the value of all that is known here.
_USUAL = {"use_bidirectional_attention": False, "attn_logit_softcapping": None, "is_causal": True}

# Fields of config.json that change no KV: who made it and with what, and how tokens are generated or classified.
_HARMLESS_FIELDS = (
    "_commit_hash _name_or_path bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id do_sample "
    "early_stopping eos_token_id finetuning_task forced_bos_token_id forced_eos_token_id id2label label2id "
    "length_penalty max_length min_length no_repeat_ngram_size num_beams num_return_sequences output_attentions "
    "output_hidden_states output_scores pad_token_id problem_type repetition_penalty return_dict "
    "return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tokenizer_class top_k "
    "top_p transformers_version typical_p use_cache"
)
HARMLESS_FIELDS = frozenset(_HARMLESS_FIELDS.split())


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of the whole model (not of one rank's shard), its layers, and the quantisation of its weights.

    `rope_parameters`: of the layers that rotate, of full attention if windows have others. `configuration`: a digest of
    all that can change what the model computes."""

    model_type: str
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    groups: tuple[LayerGroup, ...]
    rope_parameters: dict[str, Any]
    quantization: str | None
    configuration: str

    @property
    def rotation(self) -> Rotation:
        """How keys move, layer by layer if layers differ."""
        found = {layer: group.rotation for group in self.groups for layer in group.layers}
        return by_layer([found[layer] for layer in sorted(found)])

    @property
    def kv_factor(self) -> int:
        """2 (K and V), or 1 if a layer's KV is one latent row of `head_dim` channels a token (MLA)."""
        return 1 if all(group.attention == "latent" for group in self.groups) else 2

    def sizes(self, ranks: int) -> KvGeometry:
        """Return one rank's share of `ranks`, in blocks of one token."""
        return KvGeometry(self.num_layers, max(1, self.kv_heads // ranks), self.head_dim, 1, self.kv_factor)

    @property
    def takes_images(self) -> bool:
        """True if the model takes more than text; `groups` and sizes are of the part that reads text."""
        return self.model_type in _WITH_IMAGES

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer: the tokens that a token sees, itself included. None without one."""
        return sizes_of(self.groups, "window")

    @property
    def chunks(self) -> tuple[int | None, ...]:
        """The tokens of a chunk of each layer; a token sees its chunk from the first one on. None without chunks."""
        return sizes_of(self.groups, "chunks")

    @property
    def chunk(self) -> int | None:
        """The one size of the chunks, in tokens; None without them."""
        return next(filter(None, self.chunks), None)

    @property
    def lowest_check_layer(self) -> int:
        """The lowest layer whose KV shows text far away: one below has full attention. `num_layers` without one."""
        return min((group.layers[0] + 1 for group in self.groups if group.window is None), default=self.num_layers)


def model_facts(model: str | Path, revision: str | None = None, tells_kv_scales: bool = False) -> ModelFacts:
    """Read the facts from the configuration of `model`, a directory or a hub id; a directory needs no network.

    With `tells_kv_scales` a quantised KV cache is allowed. Raises ConfigurationError without a readable configuration,
    UnsupportedModelError for a model whose KV cannot be moved safely."""
    whole, config = _load_config(model, revision)
    raw = whole
    if whole["model_type"] in _WITH_IMAGES:
        raw, config = whole["text_config"], config.text_config
    model_type = raw["model_type"]
    ropes = _ropes(raw, config)
    heads, layers, is_latent = config.num_attention_heads, config.num_hidden_layers, model_type in READ_AS
    if is_latent:
        latent, rotary = config.kv_lora_rank, config.qk_rope_head_dim
        kv_heads, head_dim = 1, latent + rotary
        turning = _rotations(model_type, config, ropes, rotary)
        rotations = [latent_rotation(each, ropes[""]["rope_type"], latent) for each in turning]
    else:
        kv_heads, head_dim = config.num_key_value_heads, _head_dim(config)
        rotations = _rotations(model_type, config, ropes, head_dim)
    _refuse(chunk_refusals(model_type, config))
    directory = snapshot(model, revision)
    try:
        files = None if directory is None else digest_in(directory, PARAMETER_FILES)
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    groups = layer_groups(config, rotations, is_latent=is_latent)
    _refuse(_window_refusals(model_type, sizes_of(groups, "window"), config, next(iter(ropes.values()))))
    return ModelFacts(
        model_type=whole["model_type"],
        num_layers=layers,
        num_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=config.max_position_embeddings,
        groups=groups,
        rope_parameters=next(iter(ropes.values())),
        quantization=_quantization({**raw, **whole}, directory, tells_kv_scales),
        configuration=configuration_digest({**whole, "files of quantisation": files}),
    )


def _head_dim(config: Any) -> int:
    layers, heads, kv_heads = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    if min(layers, heads, kv_heads, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        sizes = f"{layers} layers of {heads} query heads over {kv_heads} KV heads of {head_dim} channels"
        raise UnsupportedModelError("geometry", f"{sizes} are not a grouped attention that can be moved")
    return head_dim


def _load_config(model: str | Path, revision: str | None) -> tuple[dict[str, Any], Any]:
    """Return the configuration as written and as Transformers understands it."""
    config_class, auto_config = imported("PretrainedConfig"), imported("AutoConfig")
    options = {"revision": revision, "local_files_only": is_local(model)}
    try:
        raw, _ = config_class.get_config_dict(str(model), **options)
        if raw:
            _refuse(_type_refusals(raw))
            if (known := READ_AS.get(raw["model_type"], raw["model_type"])) != raw["model_type"]:
                return raw, type(auto_config.for_model(known)).from_dict({**raw, "model_type": known})
            return raw, auto_config.from_pretrained(str(model), trust_remote_code=False, **options)
    except UnsupportedModelError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if options["local_files_only"]:
            raise ConfigurationError(f"{Path(model, 'config.json')} cannot be read, mend it: {reason}") from error
        raise ConfigurationError(
            f"model {str(model)!r} is no directory, and nothing can be read under it as a hub id; give a directory, or "
            f"download the model: {reason}"
        ) from error
    raise ConfigurationError(f"model {str(model)!r} has no config.json; name a directory or hub id that has one")


def _refuse(refusals: Iterable[tuple[str, str]]) -> None:
    for reason, sentence in refusals:
        raise UnsupportedModelError(reason, sentence)


def _type_refusals(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield why a configuration, as written, is of no known type: reasons with their sentences."""
    model_type: Any = raw.get("model_type")
    if model_type in _WITH_IMAGES and isinstance(raw.get("text_config"), dict):
        yield from _architecture_refusals(raw, _WITH_IMAGES[model_type])
        yield from _type_refusals(raw["text_config"])
        return
    if raw.get("kv_lora_rank") and model_type not in READ_AS:
        yield "mla", f"model type {model_type!r} caches latent attention (MLA) of a form not known"
    if raw.get("dual_chunk_attention_config"):
        where = "whose keys rotate by their place in a chunk"
        yield "attention_layout", f"model type {model_type!r} has dual chunk attention, {where}"
    if any(name in raw for name in ("vision_config", "audio_config", "text_config", "thinker_config")):
        yield "multimodal", f"model type {model_type!r} takes more than text"
    ropes = [raw.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    if any("mrope_section" in rope or "mrope" in (rope.get("rope_type"), rope.get("type")) for rope in ropes):
        yield "rope_multimodal", f"model type {model_type!r} uses multimodal RoPE (mrope)"
    if model_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        yield "unknown_model_type", f"model type {model_type!r} is not one whose KV is known to be movable: {known}"
    yield from _architecture_refusals(raw, _ARCHITECTURES[model_type])
    for name, usual in _USUAL.items():
        if (found := raw.get(name)) not in (None, usual):
            why = f"no model of type {model_type!r} is known to have it"
            yield "attention_layout", f"{name} is {found!r}, and {why}"


def _architecture_refusals(raw: dict[str, Any], expected: str) -> Iterator[tuple[str, str]]:
    model_type, reason = raw["model_type"], "unknown_architecture"
    if (given := raw.get("architectures") or [expected]) != [expected]:
        yield reason, f"architecture {given} of model type {model_type!r} is not {expected}"
    own = (raw.get("auto_map") or {}).get("AutoModelForCausalLM")
    if own and not (model_type in READ_AS and own == PUBLISHED_CODE):
        code = f"code of its own, {own}, which may compute otherwise than {expected}"
        yield reason, f"model type {model_type!r} brings {code}"
    if model_type in READ_AS:
        yield from latent_refusals(raw)


def _ropes(raw: dict[str, Any], config: Any) -> dict[str, dict[str, Any]]:
    """Return RoPE's parameters by attention type, full attention first; under one name if all layers have the same."""
    model_type = raw["model_type"]
    if model_type in _ROPE_BY_ATTENTION:
        ropes = {kind: rope_parameters(*_of_attention(kind, raw, config)) for kind in sorted(set(config.layer_types))}
    else:
        ropes = {"": rope_parameters(raw, config)}
    for factor in map(partial_rotary_factor, ropes.values()):
        if model_type not in _PARTIAL_ROTARY and factor != 1.0:
            code = f"{_ARCHITECTURES[model_type]} does not define what it means"
            raise UnsupportedModelError("rope_partial", f"partial_rotary_factor {factor:g} is set, but {code}")
    return ropes


def _of_attention(kind: str, raw: dict[str, Any], config: Any) -> tuple[dict[str, Any], Any]:
    """Return `raw` and `config` with the RoPE of layers of one attention type alone."""
    # The old form's fields for full attention and for windows (Transformers, `configuration_gemma3.py`).
    is_full = kind == "full_attention"
    theta, scaling = ("rope_theta", "rope_scaling") if is_full else ("rope_local_base_freq", "")
    written = raw.get("rope_parameters") or {}
    known = written.get(kind) if set(written) <= {"full_attention", "sliding_attention"} else written
    named = (("rope_parameters", known), ("rope_theta", raw.get(theta)))
    own = {name: value for name, value in named if value is not None}
    own |= {"rope_scaling": raw[scaling]} if scaling in raw else {}
    if getattr(config, theta, None) is None:
        return own, SimpleNamespace(rope_parameters=(config.rope_parameters or {}).get(kind))
    return own, SimpleNamespace(rope_theta=getattr(config, theta), rope_scaling=getattr(config, scaling or "_", None))


def _rotations(model_type: str, config: Any, ropes: Mapping[str, dict[str, Any]], head_dim: int) -> list[RopeRotation]:
    """Return each layer's rotation, by its attention type; SmolLM3 and Llama 4 name layers that have none."""
    own = {kind: rope_rotation(rope, head_dim) for kind, rope in ropes.items()}
    if len(own) > 1:
        return [own[kind] for kind in config.layer_types]
    (rotation,), layers = own.values(), config.num_hidden_layers
    turning = list(config.no_rope_layers) if model_type in _NO_ROPE_LAYERS else [1] * layers
    if len(turning) != layers or set(turning) - {0, 1}:
        why = f"no_rope_layers is {turning}; {layers} layers need a 1 (RoPE) or 0 (none) each"
        raise UnsupportedModelError("rope_per_layer", why)
    found = [rotation if each else still(rotation.rotary_dim) for each in turning]
    return [replace(each, interleaved=model_type in LLAMA4) for each in found]


def _window_refusals(
    model_type: str, windows: Sequence[int | None], config: Any, rope: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    if any(windows) and (model_type not in _WINDOWED or None not in windows):
        window, positions = config.sliding_window, config.max_position_embeddings
        why = f"shorter than the {positions} positions of the model; KV outside it is dropped by the engine"
        yield "sliding_window", f"a sliding window of {window} tokens is in use, {why}"
    if model_type != "gpt_oss":
        return
    # vLLM's code for it takes these for granted (`model_executor/models/gpt_oss.py`).
    if list(windows) != [None if layer % 2 else windows[0] for layer in range(len(windows))]:
        where = "engines put one into every other layer from 0 on"
        yield "attention_layout", f"gpt_oss has windows {list(windows)}; {where}"
    if rope["rope_type"] != "yarn":
        yield "rope_unknown", f"gpt_oss has RoPE of type {rope['rope_type']!r}; engines rotate it by yarn"


def _quantization(raw: dict[str, Any], directory: Path | None, tells_kv_scales: bool) -> str | None:
    """Return name and digest of the weights' quantisation. Raises UnsupportedModelError for KV by unknown scales."""
    declared = dict(raw.get("quantization_config") or {})
    # ModelOpt checkpoints, which TensorRT-LLM reads, keep it in a file of its own.
    modelopt = None if directory is None else directory / "hf_quant_config.json"
    if modelopt is not None and modelopt.is_file():
        try:
            declared.update(json.loads(read_input(modelopt)).get("quantization") or {})
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigurationError(f"{modelopt} cannot be read: {error}") from error
    if not declared:
        return None
    kv_scheme = declared.get("kv_cache_scheme") or declared.get("kv_cache_quant_algo")
    if kv_scheme and not tells_kv_scales:
        why = f"the KV cache is quantised ({kv_scheme}); it cannot be moved where its scales are not known"
        raise UnsupportedModelError("kv_quantized", why)
    name = declared.get("quant_method") or declared.get("quant_algo") or "unnamed"
    content = json.dumps(declared, sort_keys=True, default=str).encode()
    return f"{name}:{hashlib.sha256(content).hexdigest()[:32]}"


def configuration_digest(config: Mapping[str, Any], *, besides: frozenset[str] = frozenset()) -> str:
    """Digest a model's configuration without `besides` and the fields known to change no KV. An unknown field counts.
    The order of fields, and 1 or 1.0, do not."""
    harmless = HARMLESS_FIELDS | besides
    text = json.dumps({name: value for name, value in config.items() if name not in harmless}, default=str)
    kept = json.loads(text, parse_float=lambda number: int(float(number)) if float(number) % 1 == 0 else float(number))
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
