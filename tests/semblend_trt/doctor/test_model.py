"""What the doctor says of a model is what the connector reads of it, and refuses as it does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from semblend_trt.config import load_settings
from semblend_trt.doctor.finding import Finding, Status
from semblend_trt.doctor.model import KnownModel, known_model, model

if TYPE_CHECKING:
    from pathlib import Path


def config_folder(folder: Path, source: Path, **changes: object) -> str:
    """A folder with the configuration of `source`, changed, and nothing else."""
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def told(known: KnownModel | Finding, **settings: object) -> list[Finding]:
    assert isinstance(known, KnownModel)
    return list(model(known, load_settings(**settings)))


def test_geometry_rotation_and_size(tiny_qwen2_path: Path) -> None:
    geometry, rope, size, policy = told(known_model(str(tiny_qwen2_path), "auto"), host_bytes=1 << 20)
    assert (geometry.details["num_layers"], geometry.details["num_heads"], geometry.details["kv_heads"]) == (3, 4, 2)
    head_dim = geometry.details["head_dim"]
    assert rope.details["rotary_dim"] == head_dim
    per_token = 3 * 2 * 2 * head_dim * 4
    assert size.details["bytes_per_token"] == per_token
    assert size.details["tokens"]["host"] == (1 << 20) // per_token
    assert (policy.status, policy.reason) == (Status.NOTE, "check_needs_wrapper")


def test_the_kv_dtype_may_differ_from_the_models(tiny_qwen2_path: Path) -> None:
    known = known_model(str(tiny_qwen2_path), "bfloat16")
    assert isinstance(known, KnownModel)
    assert known.dtype is torch.bfloat16
    assert "in bfloat16" in told(known)[2].text


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "nvfp4"])
def test_a_kv_dtype_that_no_pool_may_have(tiny_qwen2_path: Path, kv_dtype: str) -> None:
    refused = known_model(str(tiny_qwen2_path), kv_dtype)
    assert isinstance(refused, Finding)
    assert (refused.status, refused.reason) == (Status.REFUSED, "pool_layout")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3},
            "sliding_window",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_dynamic"),
        ({"model_type": "mamba"}, "unknown_model_type"),
        ({"kv_lora_rank": 512}, "mla"),
    ],
)
def test_refusals_have_the_connectors_names(tmp_path: Path, tiny_qwen2_path: Path, changes, reason: str) -> None:
    refused = known_model(config_folder(tmp_path, tiny_qwen2_path, **changes), "auto")
    assert isinstance(refused, Finding)
    assert (refused.status, refused.reason) == (Status.REFUSED, reason)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    refused = known_model(str(tmp_path / "nowhere"), "auto")
    assert isinstance(refused, Finding)
    assert (refused.status, refused.reason) == (Status.REFUSED, "configuration")
    assert "nowhere" in refused.text


def test_a_folder_without_weights_is_told(tmp_path: Path, tiny_qwen2_path: Path) -> None:
    notes = told(known_model(config_folder(tmp_path, tiny_qwen2_path), "float32"), policy="exact")[3:]
    assert [note.status for note in notes] == [Status.NOTE, Status.NOTE]
    assert [name in note.text for name, note in zip(("MODEL_REV", "TOKENIZER_REV"), notes, strict=True)] == [True, True]


def test_a_policy_that_the_model_cannot_have(tiny_qwen2_path: Path) -> None:
    *_, policy = told(known_model(str(tiny_qwen2_path), "auto"), policy="boundary", recompute_boundary_layer=9)
    assert (policy.status, policy.reason) == (Status.REFUSED, "configuration")


def test_tiers_that_hold_no_donor(tiny_qwen2_path: Path) -> None:
    size = told(known_model(str(tiny_qwen2_path), "auto"), host_bytes=1024)[2]
    assert (size.status, "raise SEMBLEND_HOST_BYTES" in size.text) == (Status.FAILED, True)
