"""What the doctor says of a model and a reuse profile is what the connector reads of them, and refuses as it does."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.evidence.models import published
from semblend_trt.config import load_settings
from semblend_trt.doctor.finding import Finding, Status
from semblend_trt.doctor.model import KnownModel, known_model, model, profile
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.conftest import save_tiny_model
from tests.semblend_trt.engine_specs import engine
from tests.semblend_trt.test_reuse_profile import evidence

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


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct"])
def test_of_latent_attention_a_token_takes_one_row_a_layer(tmp_path: Path, name: str) -> None:
    (published_model,) = (each for each in published() if each.name == name)
    published_model.save(tmp_path)
    geometry, rope, weights, size, *_ = told(known_model(str(tmp_path), "auto"), host_bytes=1 << 30)
    assert "quantised weights (fp8), KV as it is" in weights.text
    assert "one latent row of 576 channels" in geometry.text
    assert "on 64 of 576 channels: its KV can be moved" in rope.text
    assert size.details["bytes_per_token"] == 61 * 576 * 2
    assert size.details["tokens"]["host"] == (1 << 30) // (61 * 576 * 2)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen2", ""),
        ("smollm3", ", none in 1 of 3 layers"),
        ("gemma3_text", ", another one in 2 of 3 layers"),
        ("llama4_text", ", none in 1 of 3 layers"),
    ],
)
def test_layers_that_rotate_otherwise_are_told(tmp_path: Path, family: str, layers: str) -> None:
    _, rope, *_ = told(known_model(str(save_tiny_model(family, tmp_path)), "auto"))
    assert f"of 16 channels{layers}: its KV can be moved" in rope.text


WINDOWS_SAID = "in TensorRT-LLM it is served from 1.2 on, with max_attention_window: [max_seq_len]"
YARN_SAID = "in TensorRT-LLM, which truncates yarn, only text that is identical from position 0 is reused"


@pytest.mark.parametrize(
    ("family", "notes"),
    [
        ("gpt_oss", [(None, WINDOWS_SAID), ("rope_unknown", YARN_SAID)]),
        ("gemma3_text", [(None, WINDOWS_SAID)]),
        ("qwen2", []),
    ],
)
def test_windows_and_what_tensorrt_llm_does_with_a_model_are_told(
    tiny_model_paths: dict[str, Path], family: str, notes: list[tuple[str | None, str]]
) -> None:
    found = told(known_model(str(tiny_model_paths[family]), "auto"))
    windows = [(each.details["windows"], each.text) for each in found if "windows" in each.details]
    said = "2 of 3 layers see 32 tokens; checks lie in layer 2 or above"
    assert windows == ([([32, None, 32], said)] if notes else [])
    assert [(each.reason, each.text) for each in found if each.text.startswith("in TensorRT-LLM")] == notes
    assert all(each.status is Status.NOTE for each in found if each.text.startswith("in TensorRT-LLM"))


def test_chunks_and_what_tensorrt_llm_refuses_of_a_model_are_told(tmp_path: Path) -> None:
    found = told(known_model(str(save_tiny_model("llama4_text", tmp_path)), "auto"))
    (chunks,) = (each for each in found if "chunks" in each.details)
    assert chunks.details["chunks"] == [64, None, 64]
    assert chunks.text.startswith("2 of 3 layers see a chunk of 64 tokens; a run is moved where it lies in one")
    (note,) = (each for each in found if each.reason == "attention_layout")
    assert note.text == "in TensorRT-LLM it is refused: no plan was tried over its chunks there"


def test_the_kv_dtype_may_differ_from_the_models(tiny_qwen2_path: Path) -> None:
    known = known_model(str(tiny_qwen2_path), "bfloat16")
    assert isinstance(known, KnownModel)
    assert known.dtype is torch.bfloat16
    assert "in bfloat16" in told(known)[2].text


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_engine_that_tells_its_scales_may_keep_kv_in_fp8(tiny_qwen2_path: Path, kv_dtype: str) -> None:
    own = replace(engine(tiny_qwen2_path), kv_dtype="float8_e4m3fn", tells_kv_scales=True)
    known = known_model(str(tiny_qwen2_path), kv_dtype, own)
    assert isinstance(known, KnownModel)
    assert known.dtype is torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("kv_dtype", "reason"), [("fp8", "kv_scales"), ("int8", "pool_layout"), ("nvfp4", "pool_layout")]
)
def test_a_kv_dtype_that_no_pool_may_have(tiny_qwen2_path: Path, kv_dtype: str, reason: str) -> None:
    refused = known_model(str(tiny_qwen2_path), kv_dtype)
    assert isinstance(refused, Finding)
    assert (refused.status, refused.reason) == (Status.REFUSED, reason)


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
        ({"model_type": "deepseek_v3", "architectures": None, "index_topk": 64}, "attention_layout"),
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


def of(path: Path, kv_dtype: str = "auto") -> KnownModel:
    known = known_model(str(path), kv_dtype)
    assert isinstance(known, KnownModel)
    return known


@pytest.fixture
def made(tiny_qwen2_path: Path, tmp_path: Path) -> str:
    """A profile for the tiny Qwen2 model in float32, on two ranks."""
    known = of(tiny_qwen2_path)
    namespace = known.namespace(
        load_settings(),
        dtype="float32",
        kv_cache_config=SimpleNamespace(dtype="auto"),
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        context_parallel_size=1,
    )
    check, figures = ProfileCheck(layer=1, threshold=0.05), evidence("verified layer 1 threshold 0.05")
    made_for = ReuseProfile.made_for(namespace, known.geometry(2), policy="verified", check=check, figures=figures)
    made_for.write(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_it_can_hold_for_its_model(made: str, tiny_qwen2_path: Path) -> None:
    allowed, holds = profile(load_settings(profile_path=made), of(tiny_qwen2_path))
    assert (allowed.details["policy"], "0.05 at layer 1" in allowed.text) == ("verified", True)
    assert holds.status is Status.OK
    assert f"in {ReuseProfile.read(made).engines[0]}; " in holds.text


@pytest.mark.parametrize(
    ("family", "kv_dtype", "what"), [("llama", "auto", "weights"), ("qwen2", "bfloat16", "KV dtype")]
)
def test_it_does_not_hold_for_another(made: str, tiny_model_paths, family: str, kv_dtype: str, what: str) -> None:
    _, refused = profile(load_settings(profile_path=made), of(tiny_model_paths[family], kv_dtype))
    assert (refused.status, refused.reason) == (Status.REFUSED, "profile_mismatch")
    assert f"made for {what}" in refused.text
    assert "engine and cache layout" not in refused.text


def test_it_does_not_hold_for_another_adapter(made: str, tiny_qwen2_path: Path) -> None:
    _, refused = profile(load_settings(profile_path=made, adapter_id="a"), of(tiny_qwen2_path))
    assert refused.details["differences"] == ["The profile was made for adapter none; this engine runs a."]


def test_without_a_model_it_says_what_it_was_made_for(made: str, tiny_qwen2_path: Path) -> None:
    _, note = profile(load_settings(profile_path=made), None)
    assert (note.status, tiny_qwen2_path.name in note.text) == (Status.NOTE, True)


def test_a_profile_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{}")
    (refused,) = profile(load_settings(profile_path=str(tmp_path / "profile.json")), None)
    assert (refused.status, refused.reason) == (Status.REFUSED, "profile_unreadable")


def test_a_profile_that_others_can_write_or_that_leaves_text_unchecked(made: str) -> None:
    os.chmod(made, 0o666)
    (refused,) = profile(load_settings(profile_path=made), None)
    assert (refused.status, refused.reason) == (Status.REFUSED, "profile_writable")
    os.chmod(made, 0o644)
    ReuseProfile.read(made).model_copy(update={"policy": "position_fix", "check": None}).write(made)
    (refused,) = profile(load_settings(profile_path=made), None)
    assert (refused.status, refused.reason) == (Status.REFUSED, "profile_evidence")
    note, allowed, _ = profile(load_settings(profile_path=made, profile_trial=True), None)
    assert (note.status, allowed.details["policy"]) == (Status.NOTE, "position_fix")


def test_other_policies_use_none(made: str) -> None:
    assert list(profile(load_settings(policy="exact"), None)) == []
    (note,) = profile(load_settings(policy="exact", profile_path=made), None)
    assert note.status is Status.NOTE
