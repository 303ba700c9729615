"""Both forms of a configuration give one rotation, the model's own; what engines would read differently is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from semblend_trt.connector.model_facts import ModelFacts, model_facts
from semblend_trt.connector.rope_reading import rope_parameters, rope_rotation
from semblend_trt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
# The fields of a configuration as Transformers 4 writes them.
OLD: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6, "rope_scaling": None},
    "default_named": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "yarn": {"rope_theta": 1e6, "rope_scaling": YARN},
    "yarn_betas": {"rope_theta": 1e6, "rope_scaling": {**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": True}},
}


def new_form(old: dict[str, Any]) -> dict[str, Any]:
    parameters = {"rope_theta": old["rope_theta"], **(old["rope_scaling"] or {})}
    parameters["rope_type"] = parameters.pop("type", None) or parameters.get("rope_type", "default")
    return {"rope_parameters": parameters}


def facts_of(folder: Path, fields: dict[str, Any], model_type: str = "llama") -> ModelFacts:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **fields}))
    return model_facts(folder)


@pytest.mark.parametrize("kind", OLD)
def test_the_old_form_gives_the_rotation_of_the_model(tmp_path: Path, kind: str) -> None:
    facts = facts_of(tmp_path, OLD[kind])
    own = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    assert facts.rotation.inverse_frequencies == tuple(own.double().tolist())


@pytest.mark.skipif(version("transformers") < "5", reason="Transformers 4 does not read the form of 5")
@pytest.mark.parametrize("kind", OLD)
def test_an_object_of_transformers_4_is_read_as_one_of_5(tmp_path: Path, kind: str) -> None:
    """With equal parameters the namespace is equal too, so that donors outlive an upgrade."""
    new = facts_of(tmp_path, new_form(OLD[kind]))
    raw = {**SIZES, **copy.deepcopy(OLD[kind])}
    parameters = rope_parameters(raw, SimpleNamespace(**raw))
    assert parameters == new.rope_parameters
    assert rope_rotation(parameters, 64) == new.rotation


def test_a_configuration_without_any_rope_has_the_default_of_its_type(tmp_path: Path) -> None:
    assert facts_of(tmp_path, {}).rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_partial_rotation_in_the_old_form(tmp_path: Path, factor: float) -> None:
    old = {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": factor}
    facts = facts_of(tmp_path, old, "phi3")
    own = Phi3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    assert facts.rotation.inverse_frequencies == tuple(own.double().tolist())
    assert facts.rotation.rotary_dim == 64 * factor
    parameters = rope_parameters(old, SimpleNamespace(**old))
    assert parameters == facts.rope_parameters
    assert ("partial_rotary_factor" in parameters) == (factor != 1)


def test_a_file_with_both_forms_that_agree(tmp_path: Path) -> None:
    both = facts_of(tmp_path / "both", {**OLD["yarn"], **new_form(OLD["yarn"])})
    assert replace(both, configuration="") == replace(facts_of(tmp_path / "old", OLD["yarn"]), configuration="")


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("rope_dynamic", {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "longrope": ("rope_longrope", {"rope_theta": 1e4, "rope_scaling": LONGROPE}),
    "mrope": ("rope_multimodal", {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]}}),
    "mrope_beside_the_new_form": (
        "rope_multimodal",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": {"type": "mrope"}},
    ),
    "partial": ("rope_partial", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "nested": ("multimodal", {"text_config": {**SIZES, **OLD["default"]}}),
    "theta_twice": ("rope_unknown", {"rope_theta": 1e4, **new_form(OLD["default"])}),
    "scaling_twice": ("rope_unknown", {**OLD["linear"], **new_form(OLD["yarn"])}),
    "yarn_of_no_length": ("rope_unknown", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "yarn_not_truncated": ("rope_unknown", {"rope_theta": 1e6, "rope_scaling": {**YARN, "truncate": False}}),
    "two_types": ("rope_unknown", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", **YARN}}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_old_form_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    reason, fields = REFUSED[kind]
    with pytest.raises(UnsupportedModelError) as refused:
        facts_of(tmp_path, fields)
    assert refused.value.reason == reason
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_a_form_that_transformers_4_does_not_read_is_refused(kind: str) -> None:
    """It leaves `rope_parameters` as it is and rotates by its defaults, and so does the engine."""
    raw = new_form(OLD[kind])
    config = SimpleNamespace(**raw, rope_theta=1e4, rope_scaling=None)
    with pytest.raises(UnsupportedModelError, match=r"but Transformers .* reads") as refused:
        rope_parameters(raw, config)
    assert refused.value.reason == "rope_unknown"
    agreed = SimpleNamespace(**raw, rope_theta=1e6, rope_scaling=None)
    if kind == "default":
        assert rope_parameters(raw, agreed) == raw["rope_parameters"]


def test_a_partial_rotation_that_transformers_4_does_not_read_is_refused() -> None:
    raw = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    config = SimpleNamespace(**raw, rope_theta=1e4, rope_scaling=None, partial_rotary_factor=1.0)
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor of RoPE is 0\.5 .* reads 1\.0"):
        rope_parameters(raw, config)


@given(
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    values=st.dictionaries(
        st.sampled_from(["rope_theta", "factor", "low_freq_factor", "high_freq_factor", *YARN]),
        st.sampled_from([None, 0, -1.0, float("nan"), float("inf"), "4", True, [1.0], 1, 0.5, 1e-30]),
        min_size=1,
    ),
)
@settings(max_examples=200)
def test_a_value_that_is_no_number_never_makes_a_rotation(kind: str, values: dict[str, Any]) -> None:
    values = {**LLAMA3, **YARN, "rope_theta": 1e6, **values, "rope_type": kind}
    try:
        frequencies = rope_rotation(values, 64).inverse_frequencies
    except UnsupportedModelError as refused:
        reason = refused.reason
    else:
        reason = "rope_unknown"
        assert all(0 <= each < float("inf") for each in frequencies)
        assert isinstance(values["rope_theta"], (int, float))
    assert reason == "rope_unknown"
