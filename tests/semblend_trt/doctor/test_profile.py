"""A reuse profile is compared with a model as far as its engine is not needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from semblend_trt.config import load_settings
from semblend_trt.doctor.finding import Status
from semblend_trt.doctor.model import KnownModel, known_model
from semblend_trt.doctor.profile import profile
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile

if TYPE_CHECKING:
    from pathlib import Path


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
    made_for = ReuseProfile.made_for(
        namespace, known.geometry(2), policy="verified", check=ProfileCheck(layer=1, threshold=0.05)
    )
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


def test_no_profile_is_a_note() -> None:
    (note,) = profile(load_settings(), None)
    assert (note.status, note.reason) == (Status.NOTE, "no_profile")


def test_other_policies_use_none(made: str) -> None:
    assert list(profile(load_settings(policy="exact"), None)) == []
    (note,) = profile(load_settings(policy="exact", profile_path=made), None)
    assert note.status is Status.NOTE
