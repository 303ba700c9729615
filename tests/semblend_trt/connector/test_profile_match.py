"""A profile holds for its own namespace; everywhere else it is refused by name, and told once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from kernels.layout import KvGeometry
from semblend_trt.config import load_settings
from semblend_trt.connector.profile_match import ProfileMatch, ProfileMatcher
from semblend_trt.namespace import CacheNamespace
from semblend_trt.plan import EngineMode
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRY = KvGeometry(3, 2, 16, 32)


def namespace(**changes: Any) -> CacheNamespace:
    fields: dict[str, Any] = {
        "model": "m",
        "model_revision": "w",
        "tokenizer": "t",
        "tokenizer_revision": "r",
        "kv_layout": "HND",
        "block_size": 32,
        "kv_dtype": "bfloat16",
        "cache_dtype": "auto",
        "quantization": None,
        "adapter": None,
        "rope_config": {"rope_type": "default"},
        "tensor_parallel": {"tp_size": 1, "pp_size": 1, "cp_size": 1},
        "backend_cache_layout": "engine",
        "extra": {"compute_dtype": "bfloat16", "configuration": "c"},
    }
    return CacheNamespace(**{**fields, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "reuse-profile.json"
    ReuseProfile.made_for(namespace(), GEOMETRY, policy="position_fix").write(made)
    return made


def matcher(path: Path | None, policy: str = "verified") -> ProfileMatcher:
    return ProfileMatcher(load_settings(policy=policy, profile_path=path))


def match(asked: ProfileMatcher, space: CacheNamespace, mode: EngineMode = EngineMode.WRAPPER) -> ProfileMatch:
    return asked.match(space, GEOMETRY, mode)


def test_it_holds_for_its_namespace_with_any_salt(path: Path) -> None:
    asked = matcher(path)
    for salt in (None, "a", "b"):
        assert match(asked, namespace().for_request(salt, None)).profile == ReuseProfile.read(path)


def test_no_profile(caplog: pytest.LogCaptureFixture) -> None:
    asked = matcher(None)
    with caplog.at_level(logging.WARNING):
        assert match(asked, namespace()) == match(asked, namespace()) == ProfileMatch(None, "no_profile")
    (record,) = caplog.records
    assert "SEMBLEND_PROFILE" in record.getMessage()


def test_another_namespace_is_refused_and_told_once_with_what_differs(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = matcher(path)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            found = match(asked, namespace(kv_dtype="float16"))
    assert (found.profile, found.refusal) == (None, "profile_mismatch")
    (record,) = caplog.records
    assert "made for KV dtype bfloat16; this engine runs float16." in record.getMessage()


def test_a_request_with_an_adapter_is_another_namespace(path: Path) -> None:
    asked = matcher(path)
    assert match(asked, namespace()).profile is not None
    assert match(asked, namespace().for_request(None, "legal")).refusal == "profile_mismatch"
    assert match(asked, namespace()).profile is not None


def test_any_number_of_adapters_is_compared_and_few_are_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = matcher(path)
    with caplog.at_level(logging.ERROR):
        for index in range(200):
            assert match(asked, namespace().for_request(None, f"adapter-{index}")).refusal == "profile_mismatch"
    assert len(caplog.records) <= 64
    assert match(asked, namespace()).profile is not None


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_file_that_cannot_be_read_is_refused_not_raised(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)
    with caplog.at_level(logging.ERROR):
        found = match(matcher(path), namespace())
    assert (found.profile, found.refusal) == (None, "profile_unreadable")
    assert str(path) in found.differences[0]
    assert str(path) in caplog.text


def test_other_policies_read_no_profile(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asked = matcher(path, "exact")
        assert match(asked, namespace()) == ProfileMatch(None)
        match(matcher(None, "exact"), namespace())
    assert [record.getMessage() for record in caplog.records] == [
        "SEMBLEND_PROFILE is set, but policy exact uses no profile"
    ]


def test_what_is_said_follows_the_engine_from_before_the_self_check_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrapper starts as a stock engine, and may be given back; what is said then is said once each time."""
    asked = matcher(path)
    said = []
    for mode in (EngineMode.STOCK, EngineMode.STOCK, EngineMode.WRAPPER, EngineMode.WRAPPER, EngineMode.STOCK):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert match(asked, namespace(), mode).profile is not None
        said.append(caplog.text)
    stock, again, wrapper, still, back = said
    assert "needs the wrapper on this engine, with its self-check passed" in stock
    assert "a stock engine cannot" not in stock
    assert f"reuse profile {path} holds" in wrapper
    assert again == still == ""
    assert "needs the wrapper" in back


def test_the_file_is_read_once(path: Path) -> None:
    asked = matcher(path)
    path.unlink()
    assert match(asked, namespace()).profile is not None


def test_the_layers_to_prepare_checks_for_are_known_before_any_request(tmp_path: Path, path: Path) -> None:
    check = ProfileCheck(layer=2, threshold=0.1, max_span_share=0.5, min_saved_share=0.1)
    checked = tmp_path / "checked.json"
    ReuseProfile.made_for(namespace(), GEOMETRY, policy="verified", check=check).write(checked)
    assert matcher(checked).check_layers == (2,)
    assert matcher(checked, "position_fix").check_layers == ()
    assert matcher(path).check_layers == ()
    assert matcher(None).check_layers == ()
    assert matcher(None, "cacheblend").check_layers == (1,)
