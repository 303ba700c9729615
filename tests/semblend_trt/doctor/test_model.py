"""What the doctor says of a model and a reuse profile is what the connector reads of them, and refuses as it does."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.evidence.models import published
from semblend_trt.config import load_settings
from semblend_trt.doctor import Finding
from semblend_trt.doctor.model import KnownModel, known_model, model, profile
from semblend_trt.reuse_profile import ProfileBound, ProfileCheck, ProfileLevel, ReuseProfile
from tests.random_models import save_tiny_model
from tests.semblend_trt.engine_specs import engine
from tests.semblend_trt.test_reuse_profile import evidence

FP8 = torch.float8_e4m3fn
GEOMETRIES = {
    "qwen2": [
        "qwen2: 3 layers, 4 query heads and 2 KV heads of 16 channels",
        "RoPE of type default on 16 of 16 channels: its KV can be moved",
        "768 bytes of KV a token in float32, on one rank; room for donors: 1365 tokens on the host",
        "Under policy verified it reuses identical text from position 0",
    ],
    "gpt_oss": ["2 of 3 layers see a window of 32 tokens; checks lie in layer 2 or above"],
    "llama4_text": [
        "2 of 3 layers see a chunk of 64 tokens; checks lie in layer",
        "llama4_text has layers with chunks",
    ],
    "deepseek-ai/DeepSeek-V3": ["row of 576 channels", "on 64 of 576 channels", f"{61 * 576 * 2} bytes of KV a token"],
}
WINDOW = {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3}


def config_folder(folder, source, **changes):
    """A folder with the configuration of `source`, changed, and nothing else."""
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def of(path, kv_dtype="auto", own=None):
    known = known_model(str(path), kv_dtype, own)
    assert isinstance(known, KnownModel)
    return known


def told(known, **settings):
    return list(model(known, load_settings(**settings)))


@pytest.mark.parametrize("source", GEOMETRIES)
def test_geometry_rotation_and_size(tmp_path, source):
    if "/" in source:
        (published_model,) = (each for each in published() if each.name == source)
        published_model.save(tmp_path)
    else:
        tmp_path = save_tiny_model(source, tmp_path)
    found = [each.text for each in told(of(tmp_path), host_bytes=1 << 20)]
    assert [text for text in GEOMETRIES[source] if not any(text in each for each in found)] == []


@pytest.mark.parametrize(
    ("kv_dtype", "scaled", "dtype"), [("bfloat16", False, torch.bfloat16), ("auto", True, FP8), ("fp8", True, FP8)]
)
def test_the_kv_dtype_may_differ_from_the_models(tiny_qwen2_path, kv_dtype, scaled, dtype):
    """An engine that names its scales may keep KV in fp8."""
    own = replace(engine(tiny_qwen2_path), kv_dtype="float8_e4m3fn", tells_kv_scales=True) if scaled else None
    known = of(tiny_qwen2_path, kv_dtype, own)
    assert known.dtype is dtype
    assert f"in {str(dtype).removeprefix('torch.')}" in told(known)[2].text


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "reason"),
    [
        (WINDOW, "auto", "sliding_window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "auto", "rope_dynamic"),
        ({"model_type": "mamba"}, "auto", "unknown_model_type"),
        ({"kv_lora_rank": 512}, "auto", "mla"),
        ({"model_type": "deepseek_v3", "architectures": None, "index_topk": 64}, "auto", "attention_layout"),
        *(({}, *each) for each in (("fp8", "kv_scales"), ("int8", "pool_layout"), ("nvfp4", "pool_layout"))),
        (None, "auto", "configuration"),
    ],
)
def test_refusals_have_the_connectors_names(tmp_path, tiny_qwen2_path, changes, kv_dtype, reason):
    """Of a configuration, of a dtype of the cache, and of a model that is not there."""
    nowhere = str(tmp_path / "nowhere")
    refused = known_model(nowhere if changes is None else config_folder(tmp_path, tiny_qwen2_path, **changes), kv_dtype)
    assert isinstance(refused, Finding)
    assert (refused.status, refused.reason) == ("refused", reason)
    assert changes is not None or "nowhere" in refused.text


def test_what_does_not_fit_a_model_is_told(tmp_path, tiny_qwen2_path):
    notes = told(of(config_folder(tmp_path, tiny_qwen2_path), "float32"), policy="exact")[3:]
    assert [note.status for note in notes] == ["note", "note"]
    assert [name in note.text for name, note in zip(("MODEL_REV", "TOKENIZER_REV"), notes, strict=True)] == [True, True]
    *_, policy = told(of(tiny_qwen2_path), policy="boundary", recompute_boundary_layer=9)
    assert (policy.status, policy.reason) == ("refused", "configuration")
    size = told(of(tiny_qwen2_path), host_bytes=1024)[2]
    assert (size.status, "raise SEMBLEND_HOST_BYTES" in size.text) == ("failed", True)


@pytest.fixture
def made(tiny_qwen2_path, tmp_path):
    """A profile for the tiny Qwen2 model in float32, on two ranks."""
    known = of(tiny_qwen2_path)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "context_parallel_size": 1}
    cache = SimpleNamespace(dtype="auto")
    namespace = known.namespace(load_settings(), dtype="float32", kv_cache_config=cache, **sizes)
    check, figures = ProfileCheck(layer=1, threshold=0.05), evidence("verified layer 1 threshold 0.05")
    made_for = ReuseProfile.made_for(namespace, known.facts.sizes(2), policy="verified", check=check, figures=figures)
    made_for.write(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_it_can_hold_for_its_model(made, tiny_qwen2_path):
    allowed, unstated, holds = profile(load_settings(profile_path=made), of(tiny_qwen2_path))
    assert "states no bound" in unstated.text
    assert "policy verified, computes tokens that deviate by more than 0.05 at layer 1" in allowed.text
    assert holds.status == "ok"
    assert f"in {ReuseProfile.read(made).engines[0]}; " in holds.text


@pytest.mark.parametrize(
    ("family", "kv_dtype", "what"), [("llama", "auto", "weights"), ("qwen2", "bfloat16", "KV dtype")]
)
def test_it_does_not_hold_for_another(made, tiny_model_paths, family, kv_dtype, what):
    *_, refused = profile(load_settings(profile_path=made), of(tiny_model_paths[family], kv_dtype))
    assert (refused.status, refused.reason) == ("refused", "profile_mismatch")
    assert f"made for {what}" in refused.text
    assert "engine and cache layout" not in refused.text


def test_without_a_model_it_says_what_it_was_made_for(made, tiny_qwen2_path):
    *_, note = profile(load_settings(profile_path=made), None)
    assert (note.status, tiny_qwen2_path.name in note.text) == ("note", True)


def test_a_profile_that_cannot_be_used(made, tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    (refused,) = profile(load_settings(profile_path=str(tmp_path / "empty.json")), None)
    assert (refused.status, refused.reason) == ("refused", "profile_unreadable")
    os.chmod(made, 0o666)
    (refused,) = profile(load_settings(profile_path=made), None)
    assert (refused.status, refused.reason) == ("refused", "profile_writable")
    os.chmod(made, 0o644)
    ReuseProfile.read(made).model_copy(update={"policy": "position_fix", "check": None}).write(made)
    (refused,) = profile(load_settings(profile_path=made), None)
    assert (refused.status, refused.reason) == ("refused", "profile_evidence")
    allowed, *_ = profile(load_settings(profile_path=made, profile_trial=True), None)
    assert "policy position_fix; SEMBLEND_PROFILE_TRIAL uses it without its evidence" in allowed.text


@pytest.mark.parametrize(
    ("max_kl", "status", "reason", "text"),
    [
        (0.02, "ok", None, "all but 0.05 of the answers are within 0.01 nats of cold's"),
        (0.005, "note", "no_bound", "Raise SEMBLEND_MAX_KL"),
        ("unbounded", "note", None, "reused unchecked"),
    ],
)
def test_it_says_which_bound_is_kept(made, max_kl, status, reason, text):
    bound = ProfileBound(max_kl=0.01, risk=0.05, levels=[ProfileLevel(deviation=0.1, share=0.0)])
    check = ProfileCheck(layer=1, threshold=1.0, sample_every=8)
    ReuseProfile.read(made).model_copy(update={"check": check, "bounds": [bound]}).write(made)
    _, told, _ = profile(load_settings(profile_path=made, max_kl=max_kl, profile_trial=True), None)
    assert (told.status, told.reason, text in told.text) == (status, reason, True)
