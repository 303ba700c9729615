"""RoPE of a model: its parameters in one form for every version of Transformers, and the rotation that they make.

Transformers 5 keeps `rope_parameters`; Transformers 4 keeps `rope_theta`, `rope_scaling` and `partial_rotary_factor`,
and does not read the other form. The formulas are those of Transformers 5 (`modeling_rope_utils.py`), to the last bit:
Transformers 4.53 computes yarn from another factor than TensorRT-LLM does."""

from __future__ import annotations

import math
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from kernels.rope import RopeRotation
from semblend_trt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

_REFUSED = {
    "dynamic": "rope_dynamic",
    "ntk": "rope_dynamic",
    "longrope": "rope_longrope",
    "su": "rope_longrope",
    "mrope": "rope_multimodal",
}


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
        raise UnsupportedModelError(
            _REFUSED.get(kind, "rope_unknown"),
            f"RoPE type {kind!r} cannot be moved; supported are {', '.join(_FREQUENCIES)}",
        )
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
    parameters = {
        name: value for name, value in written.items() if value is not None and name != "partial_rotary_factor"
    }
    old_type = parameters.pop("type", None)
    kind = parameters.setdefault("rope_type", old_type or "default")
    if old_type not in (None, kind):
        raise UnsupportedModelError("rope_unknown", f"RoPE has type {old_type!r} and rope_type {kind!r} at once")
    return {**parameters, **_partial(written.get("partial_rotary_factor"))}


def _partial(factor: float | None) -> dict[str, float]:
    return {} if factor is None else {"partial_rotary_factor": float(factor)}


def _number(parameters: dict[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModelError("rope_unknown", f"{name} of RoPE is {value!r}; it must be a number above 0")
    return float(value)


def _waves(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    """Return theta^(2i/rotary_dim), float32 [rotary_dim / 2]."""
    theta = _number(parameters, "rope_theta")
    return torch.pow(theta, torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim)


def _default(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    return 1.0 / _waves(parameters, rotary_dim)


def _llama3(parameters: dict[str, Any], rotary_dim: int) -> torch.Tensor:
    """Stretch long waves by the factor, leave short ones, and blend those between."""
    frequencies = _default(parameters, rotary_dim)
    factor, original = _number(parameters, "factor"), _number(parameters, "original_max_position_embeddings")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    if low > high:
        raise UnsupportedModelError(
            "rope_unknown", f"low_freq_factor {low:g} of RoPE is above high_freq_factor {high:g}"
        )
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
        raise UnsupportedModelError(
            "rope_unknown",
            f"extrapolation_factor of yarn is {parameters['extrapolation_factor']!r}; only vLLM reads it",
        )
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
    "default": _default,
    "linear": lambda parameters, rotary_dim: _default(parameters, rotary_dim) / _number(parameters, "factor"),
    "llama3": _llama3,
    "yarn": _yarn,
}
