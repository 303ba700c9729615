"""Every setting tells its value and the variable that gave it, and no secret."""

from __future__ import annotations

import pytest

from semblend_trt.config import Settings, load_settings
from semblend_trt.settings.in_use import MASK, masked, settings_in_use


@pytest.fixture(autouse=True)
def no_settings(monkeypatch) -> None:
    for row in settings_in_use(load_settings()):
        if row.source is not None:
            monkeypatch.delenv(row.source)


def in_use() -> dict[str, object]:
    return {row.name: row for row in settings_in_use(load_settings())}


def test_every_setting_is_there_with_its_default() -> None:
    rows = in_use()
    assert list(rows) == list(Settings.model_fields)
    assert {(row.source, row.ignored) for row in rows.values()} == {(None, ())}
    shown = [(name, rows[name].variable, rows[name].value, rows[name].text) for name in ("policy", "enabled")]
    assert shown == [("policy", "SEMBLEND_POLICY", "verified", "verified"), ("enabled", "SEMBLEND_ENABLED", True, "1")]
    assert (rows["disk_path"].value, rows["disk_path"].text) == (None, "unset")


def test_the_variable_that_decides_is_the_source(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRTLLM_SEMBLEND_MIN_SPAN", "96")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "128")
    monkeypatch.setenv("SEMBLEND_TRTLLM_MIN_MATCH_LENGTH", "256")
    monkeypatch.setenv("SEMBLEND_TRTLLM_AUDIT_PATH", str(tmp_path))
    monkeypatch.setenv("SEMBLEND_POLICY", " ")
    rows = in_use()
    assert (rows["min_span_tokens"].value, rows["min_span_tokens"].source) == (96, "TRTLLM_SEMBLEND_MIN_SPAN")
    assert rows["min_span_tokens"].ignored == ("SEMBLEND_MIN_SPAN", "SEMBLEND_TRTLLM_MIN_MATCH_LENGTH")
    assert (rows["audit_path"].value, rows["audit_path"].source) == (str(tmp_path), "SEMBLEND_TRTLLM_AUDIT_PATH")
    assert rows["policy"].source is None


def test_no_secret_is_told(monkeypatch) -> None:
    monkeypatch.setenv("SEMBLEND_NATS_TOKEN", "hunter2")
    monkeypatch.setenv("SEMBLEND_NATS_URL", "nats://alice:hunter2@127.0.0.1:4222")
    rows = in_use()
    assert (rows["nats_token"].value, rows["nats_url"].value) == (MASK, MASK)
    assert "hunter2" not in repr(rows)


@pytest.mark.parametrize(
    "address", ["nats://127.0.0.1:4222", "tls://nats-0.example:4222, nats://[::1]:4222", "wss://broker/"]
)
def test_an_address_without_a_user_is_no_secret(address: str) -> None:
    assert masked(address) == address


@pytest.mark.parametrize(
    "secret",
    [
        "token",
        "nats://alice@broker",
        "nats://alice:12,34@broker",
        "nats://alice:12#4@broker",
        "alice:secret",
        "nats://alice:secret",
        "nats://broker, alice:12@other",
    ],
)
def test_whatever_may_hold_a_password_is_masked(secret: str) -> None:
    assert masked(secret) == MASK
