"""An arm's engine sees exactly the arm's settings."""

from __future__ import annotations

import os

import pytest

from semblend_trt.errors import ConfigurationError
from validation.engines import EMBEDDED, FP8, TRTLLM, environment
from validation.models import engines_of


def test_the_callers_settings_neither_leak_in_nor_get_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_SEMBLEND_POLICY", "off")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "7")
    monkeypatch.setenv("SEMBLENDER", "another program's")
    before = dict(os.environ)
    with pytest.raises(RuntimeError), environment({"SEMBLEND_POLICY": "boundary"}):  # noqa: PT012
        ours = {name: value for name, value in os.environ.items() if "SEMBLEND_" in name}
        assert ours == {"SEMBLEND_POLICY": "boundary"}
        assert os.environ["SEMBLENDER"] == "another program's"
        raise RuntimeError
    assert dict(os.environ) == before


@pytest.mark.parametrize("engine", [EMBEDDED, TRTLLM])
def test_kv_of_another_type_is_for_vllm_alone(engine: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--kv-dtype fp8_e4m3 is for --engine vllm; the engine {engine}"):
        engines_of(engine, None, "cpu", "auto", FP8)
