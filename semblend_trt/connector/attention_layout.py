"""How a model's layers attend and rotate: groups that do so alike, latent attention (MLA), chunks, and RoPE.

A token of a layer with a window sees itself and the `sliding_window - 1` tokens before it. A token of a layer with
chunks sees the tokens from the first one of its chunk up to itself. Positions are cut into chunks from 0 on. A layer
with latent attention caches one row a token for all heads (DeepSeek-AI 2024, DeepSeek-V2). Its first `kv_lora_rank`
channels do not depend on the position; the next `qk_rope_head_dim` rotate.

Facts of Transformers: `configuration_utils.py`, `masking_utils.py`, `models/deepseek_v3/` and `models/llama4/` (pairs
of neighbouring channels rotate; K is normed without weights after the rotation, so that it moves as any other). Facts
of vLLM: `model_executor/models/deepseek_v2.py` and `deepseek_scaling_rope.py` (neighbouring channels rotate, every RoPE
type but the default is computed as yarn); `model_executor/models/llama4.py` (which reorders the channels of Q and K as
it loads them, so that halves rotate); `transformers_utils/config.py` (which reads kimi_k2 as DeepSeek-V3).

RoPE's parameters get one form for every version of Transformers. Transformers 5 keeps `rope_parameters`; Transformers 4
keeps `rope_theta`, `rope_scaling` and `partial_rotary_factor`, and does not read the other form. The formulas are those
of Transformers 5 (`modeling_rope_utils.py`), to the last bit: Transformers 4.53 computes yarn from another factor than
TensorRT-LLM does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

import torch

from kernels.rope import RopeRotation
from semblend_trt.errors import UnsupportedModelError

Attention = Literal["full", "window", "chunks", "latent"]

# Model types with latent attention of DeepSeek-V3's form, and the types by which Transformers reads them.
READ_AS = {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"}
# DeepSeek's published code, which checkpoints of the form name and no engine that is served runs.
PUBLISHED_CODE = "modeling_deepseek.DeepseekV3ForCausalLM"
# What such a configuration must say itself if Transformers does not know its type: defaults would be guesses.
_NEEDED = (
    "kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim num_hidden_layers num_attention_heads hidden_size "
    "max_position_embeddings rope_theta"
)
# Fields that change what such a layer caches or attends to, and the values that change nothing.
_NOT_KNOWN = {
    "index_topk": ("attention_layout", "a sparse indexer picks the tokens that it attends to"),
    "sliding_window": ("sliding_window", "engines compute it without a window"),
    "llama_4_scaling": ("attention_layout", "queries are scaled by their position"),
    "truncate": ("rope_unknown", "engines compute its RoPE in different ways"),
    "apply_yarn_scaling": ("rope_unknown", "engines compute its RoPE in different ways"),
}
# Model types with chunks: of text alone, and of a model that takes images too.
LLAMA4 = ("llama4_text", "llama4")
# RoPE types whose frequencies cannot be known, and the reasons.
_REFUSED = {"dynamic": "rope_dynamic", "ntk": "rope_dynamic", "longrope": "rope_longrope", "su": "rope_longrope"}
_REFUSED |= {"mrope": "rope_multimodal"}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`layers` with one attention and one rotation, which `is_still` without RoPE.

    `window`: the most tokens that a token sees, itself included, in a "window" or a chunk of "chunks"; None for all.
    "latent" is full attention whose KV is one row a token."""

    layers: tuple[int, ...]
    attention: Attention
    window: int | None
    rotation: RopeRotation


def layer_groups(config: Any, rotations: Sequence[RopeRotation], *, is_latent: bool = False) -> tuple[LayerGroup, ...]:
    """Return the groups of the model of `config`, in the order of their first layers, by each layer's rotation.
    Raises UnsupportedModelError for an unknown attention, and unless each layer has a type."""
    whole: Attention = "latent" if is_latent else "full"
    # Each type's attention, and its window or chunk; None if that hides nothing.
    kinds: dict[str, tuple[Attention, int | None]] = {
        "full_attention": (whole, None),
        "sliding_attention": ("window", getattr(config, "sliding_window", None)),
        "chunked_attention": ("chunks", getattr(config, "attention_chunk_size", None)),
    }
    layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if unknown := sorted(set(types or ()) - kinds.keys()):
        raise UnsupportedModelError("attention_layout", f"layer types {unknown} are not among {', '.join(kinds)}")
    if types and len(types) != layers:
        raise UnsupportedModelError("attention_layout", f"{len(types)} layer types are named for {layers} layers")
    for kind, (_, size) in kinds.items():
        if size is None or size >= config.max_position_embeddings:
            kinds[kind] = (whole, None)
    found: dict[tuple[tuple[Attention, int | None], RopeRotation], list[int]] = {}
    for layer, (kind, rotation) in enumerate(zip(types or ["sliding_attention"] * layers, rotations, strict=True)):
        found.setdefault((kinds[kind], rotation), []).append(layer)
    return tuple(LayerGroup(tuple(own), *seen, rotation) for (seen, rotation), own in found.items())


def sizes_of(groups: Sequence[LayerGroup], attention: Attention) -> tuple[int | None, ...]:
    """Return the window, or the chunk, of each layer with that attention; None for the others."""
    found = {layer: group.window for group in groups if group.attention == attention for layer in group.layers}
    return tuple(found.get(layer) for layer in range(sum(len(group.layers) for group in groups)))


def latent_refusals(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield why a configuration, as written, is not of DeepSeek-V3's form: reasons with their sentences."""
    kind = raw.get("model_type")
    given = {**(raw.get("rope_parameters") or raw.get("rope_scaling") or {}), **raw}
    if kind not in READ_AS.values() and (missing := [name for name in _NEEDED.split() if given.get(name) is None]):
        yield "geometry", f"model type {kind!r} is given without {', '.join(missing)}"
    sizes = {name: raw.get(name, 2) for name in ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")}
    if any(type(size) is not int or size < 1 for size in sizes.values()) or sizes["qk_rope_head_dim"] % 2:
        listed = ", ".join(f"{name} {size!r}" for name, size in sizes.items())
        yield "geometry", f"{listed} make no latent rows that can be moved; all must be above 0, and the last even"
    for name, (reason, what) in _NOT_KNOWN.items():
        if (found := given.get(name)) not in (None, True):
            yield reason, f"{name} of model type {kind!r} is {found!r}: {what}"
    if (turns := raw.get("rope_interleave", True)) is not True:
        yield "rope_unknown", f"rope_interleave is {turns!r}; engines turn neighbouring channels, true"


def latent_rotation(rotation: RopeRotation, rope_type: str, latent: int) -> RopeRotation:
    """Return the rotation of a whole row, from that of its rotating channels, which follow `latent` others.
    Raises UnsupportedModelError for a RoPE type that engines compute otherwise."""
    if rope_type not in ("default", "yarn"):
        why = f"RoPE type {rope_type!r} of latent attention is computed as yarn by vLLM; supported are default, yarn"
        raise UnsupportedModelError("rope_unknown", why)
    return replace(rotation, interleaved=True, first_channel=latent)


def chunk_refusals(model_type: str, config: Any) -> Iterator[tuple[str, str]]:
    """Yield why layers with chunks are of another form than Llama 4's. There layers with chunks have RoPE (1 in
    `no_rope_layers`), and layers with full attention have none."""
    types, reason = list(getattr(config, "layer_types", None) or ()), "attention_layout"
    if model_type != LLAMA4[0]:
        if "chunked_attention" in types:
            yield reason, f"model type {model_type!r} is not known to have chunks"
        return
    chunk, rotates = config.attention_chunk_size, list(config.no_rope_layers)
    if type(chunk) is not int or chunk < 1:
        yield reason, f"attention_chunk_size is {chunk!r}; a whole number of tokens above 0 is needed"
    if types != [("full_attention", "chunked_attention")[each] for each in rotates]:
        where = "engines put chunks into the layers with RoPE"
        yield reason, f"layer types {types} do not fit no_rope_layers {rotates}; {where}"
    if 0 not in rotates and chunk < config.max_position_embeddings:
        yield reason, f"all layers have chunks of {chunk}; no check could see far"
    if config.attention_bias:
        yield reason, f"attention_bias is {config.attention_bias}; vLLM computes {model_type} without"


def rope_parameters(raw: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the rotation's parameters, equal for every form and version: `rope_type`, `rope_theta`, the type's own.

    `raw` is the configuration as written; the engine rotates by `config`, as Transformers understands it. Raises
    UnsupportedModelError if the two differ, or layers do."""
    own_theta = getattr(config, "rope_theta", None)  # Transformers 4 alone has it beside the parameters
    understood = _one_form(getattr(config, "rope_parameters" if own_theta is None else "rope_scaling", None) or {})
    if own_theta is not None:
        understood |= {"rope_theta": own_theta, **_partial(getattr(config, "partial_rotary_factor", None))}
    if "rope_theta" not in understood:
        raise UnsupportedModelError("rope_unknown", "the configuration has no rope_theta")
    scaling = _one_form(raw["rope_scaling"] or {}) if "rope_scaling" in raw else {}
    theta = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    old_form = {**scaling, **theta, **_partial(raw.get("partial_rotary_factor"))}
    new_form = _one_form(raw["rope_parameters"]) if raw.get("rope_parameters") else {}
    for written in (new_form, old_form):
        for name in sorted(written.keys() & understood.keys()):
            if written[name] != understood[name]:
                raise UnsupportedModelError(
                    "rope_unknown",
                    f"{name} of RoPE is {written[name]!r} in the configuration, but Transformers "
                    f"{metadata.version('transformers')} reads {understood[name]!r}; save the model with that version",
                )
        # A model that rotates whole heads ignores partial_rotary_factor; it is kept here so that it is refused.
        understood = {**written, **understood} if "partial_rotary_factor" in written else understood
    if understood["rope_type"] in ("llama3", "yarn"):
        # Engines differ in its default. Transformers and TensorRT-LLM prefer what is written beside the RoPE.
        name = "original_max_position_embeddings"
        understood.pop(name, None)
        places = (raw, raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {})
        understood.update(next(({name: each[name]} for each in places if each.get(name)), {}))
    if understood.get("partial_rotary_factor") == 1:  # only some model types name it
        del understood["partial_rotary_factor"]
    return understood


def rope_rotation(parameters: dict[str, Any], head_dim: int) -> RopeRotation:
    """Return the rotation by `parameters`, as `rope_parameters` gives them.
    Raises UnsupportedModelError if frequencies depend on the length, or values are unusable."""
    kind = parameters["rope_type"]
    if kind not in _FREQUENCIES:
        why = f"RoPE type {kind!r} cannot be moved; supported are {', '.join(_FREQUENCIES)}"
        raise UnsupportedModelError(_REFUSED.get(kind, "rope_unknown"), why)
    rotary_dim = int(head_dim * partial_rotary_factor(parameters))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise UnsupportedModelError("rope_unknown", f"RoPE of {rotary_dim} channels does not fit heads of {head_dim}")
    frequencies = _FREQUENCIES[kind](parameters, rotary_dim)
    if not bool(frequencies.isfinite().all()):
        raise UnsupportedModelError("rope_unknown", f"RoPE by {parameters} has frequencies that are not finite")
    return RopeRotation(tuple(frequencies.double().tolist()), rotary_dim, interleaved=False)


def partial_rotary_factor(parameters: dict[str, Any]) -> float:
    """Return the share of a head's channels that rotates."""
    return _number(parameters, "partial_rotary_factor", 1.0)


def _one_form(written: dict[str, Any]) -> dict[str, Any]:
    """Return `written` with its type under `rope_type` and without values that are None."""
    if any(isinstance(value, dict) for value in written.values()):
        raise UnsupportedModelError("rope_per_layer", f"RoPE differs by layer type: {sorted(written)}")
    parameters = {name: value for name, value in written.items() if value is not None}
    parameters |= _partial(parameters.get("partial_rotary_factor"))
    old_type = parameters.pop("type", None)
    kind = parameters.setdefault("rope_type", old_type or "default")
    if old_type not in (None, kind):
        raise UnsupportedModelError("rope_unknown", f"RoPE has type {old_type!r} and rope_type {kind!r} at once")
    return parameters


def _partial(factor: float | None) -> dict[str, float]:
    return {} if factor is None else {"partial_rotary_factor": float(factor)}


def _number(parameters: dict[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModelError("rope_unknown", f"{name} of RoPE is {value!r}; it must be a number above 0")
    return float(value)


def _waves(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    """Return theta^(2i/rotary_dim), float32 [rotary_dim / 2]."""
    return torch.pow(_number(parameters, "rope_theta"), torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim)


def _llama3(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    """Stretch long waves by the factor, leave short ones, and blend those between."""
    frequencies = 1.0 / _waves(parameters, rotary_dim)
    factor, original = _number(parameters, "factor"), _number(parameters, "original_max_position_embeddings")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if low > high:
        why = f"low_freq_factor {low:g} of RoPE is above high_freq_factor {high:g}"
        raise UnsupportedModelError("rope_unknown", why)
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > original / low, frequencies / factor, frequencies)
    # If both factors are equal, as in Llama 4, no wave is between.
    smooth = (original / waves - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = ~(waves < original / high) * ~(waves > original / low)
    return torch.where(between, blended, stretched)


def _yarn(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    """Return the frequencies of YaRN (Peng et al. 2023); its scaling of cos and sin does not change how a key moves."""
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UnsupportedModelError("rope_unknown", f"truncate of RoPE is {truncate!r}; it must be true or false")
    theta, factor = _number(parameters, "rope_theta"), _number(parameters, "factor")
    if parameters.get("extrapolation_factor", 1) != 1:
        why = f"extrapolation_factor of yarn is {parameters['extrapolation_factor']!r}; only vLLM reads it"
        raise UnsupportedModelError("rope_unknown", why)
    if theta <= 1:
        raise UnsupportedModelError("rope_unknown", f"rope_theta is {theta:g}; yarn needs one above 1")
    original = _number(parameters, "original_max_position_embeddings")
    fast, slow = _number(parameters, "beta_fast", 32.0), _number(parameters, "beta_slow", 1.0)

    def channel(turns: float) -> float:
        return (rotary_dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(theta))

    first, last = channel(fast), channel(slow)
    if truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, rotary_dim - 1.0)
    if first == last:
        last += 0.001  # as Transformers does, against a division by 0
    kept = 1 - torch.clamp((torch.arange(rotary_dim // 2, dtype=torch.float) - first) / (last - first), 0, 1)
    waves = _waves(parameters, rotary_dim)
    return 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept


_FREQUENCIES: dict[str, Callable[[dict[str, Any], int], torch.Tensor]] = {
    "default": lambda parameters, rotary_dim: 1.0 / _waves(parameters, rotary_dim),
    "linear": lambda parameters, rotary_dim: 1.0 / _waves(parameters, rotary_dim) / _number(parameters, "factor"),
    "llama3": _llama3,
    "yarn": _yarn,
}
