"""An arm's engine sees exactly the arm's settings."""

import os

import pytest

from validation.engines import environment


def test_the_callers_settings_neither_leak_in_nor_get_lost(monkeypatch):
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
