"""Extra configuration of the connector: our settings, the keys of an older connector, and what is neither."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from engine_wrapper.vllm.arguments import arguments_of
from engine_wrapper.vllm.extra_config import settings_of, settings_off
from semblend_trt.config import Settings, load_settings, settings_table
from semblend_trt.errors import ConfigurationError
from semblend_trt.policy import ReusePolicy
from tests.engine_wrapper.vllm.engine_configs import engine_config


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"host_bytes": 1 << 30}, "host_bytes", 1 << 30),
        ({"semblend_host_bytes": "1073741824"}, "host_bytes", 1 << 30),
        ({"SEMBLEND_HOST_BYTES": 1e9}, "host_bytes", 10**9),
        ({"trtllm_semblend_min_span": 128}, "min_span_tokens", 128),
        ({"min_span_tokens": 128}, "min_span_tokens", 128),
        ({"semblend_min_span_tokens": 128}, "min_span_tokens", 128),
        ({"semblend_trtllm_audit_path": "/a"}, "audit_path", Path("/a")),
        ({"metrics": False}, "metrics", False),
        ({"metrics": 0}, "metrics", False),
        ({"policy": "exact"}, "policy", ReusePolicy.EXACT),
        ({"donor_tenant": 7}, "donor_tenant", "7"),
        ({"min_reuse_ratio": 1}, "min_reuse_ratio", 1.0),
        ({"profile": "/p.json"}, "profile_path", Path("/p.json")),
    ],
)
def test_a_key_is_a_setting_whatever_type_its_value_has(extra: dict[str, Any], field: str, value: object) -> None:
    assert getattr(load_settings(**settings_of(extra)), field) == value


def test_every_setting_can_be_given_by_its_variable_in_lower_case() -> None:
    given = {row.variables[1].lower(): "x" for row in settings_table()}
    assert set(settings_of(given)) == set(Settings.model_fields)


def test_extra_configuration_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_SEMBLEND_MIN_SPAN", "256")
    monkeypatch.setenv("SEMBLEND_MAX_DONORS", "3")
    settings = load_settings(**settings_of({"min_span": 96}))
    assert (settings.min_span_tokens, settings.max_donors) == (96, 3)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_an_empty_value_counts_as_unset(value: object) -> None:
    assert settings_of({"audit_path": value, "nonsense": value}) == {}


@pytest.mark.parametrize(
    ("extra", "settings"),
    [
        ({"min_semantic_span": 512}, {"min_span_tokens": "512"}),
        ({"min_semantic_span": 512, "min_span": 96}, {"min_span_tokens": "96"}),
        ({"kv_storage_path": "/kv", "disk_bytes": 9}, {"disk_path": "/kv", "disk_bytes": "9"}),
        ({"mode": "discovery_only"}, {"discovery_only": "1"}),
        ({"mode": "exact_prefix"}, {"policy": "exact"}),
        ({"min_similarity": 0.7, "min_reuse_ratio": 0.5}, {"min_similarity": "0.7", "min_reuse_ratio": "0.5"}),
    ],
)
def test_keys_of_the_older_connector_that_mean_a_setting_are_understood(
    caplog: pytest.LogCaptureFixture, extra: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert settings_of(extra) == settings
    load_settings(**settings_of(extra))
    assert not caplog.records


def test_replaced_keys_are_told_in_one_warning_and_unknown_ones_in_another(caplog: pytest.LogCaptureFixture) -> None:
    old = {"mode": "semantic_span_experimental", "capture_policy": "all", "kv_storage_path": "/kv", "lookup_top_k": 5}
    assert settings_of({**old, "host_byte": 1, "\x1b[31m" + "n" * 99: 1}) == {"disk_path": "/kv"}
    replaced, unknown = (record.getMessage() for record in caplog.records)
    assert all(f"{key}: " in replaced for key in old)
    assert "verified" in replaced
    assert "disk_bytes" in replaced
    assert "'host_byte' (did you mean host_bytes?)" in unknown
    assert "\x1b" not in unknown
    assert "n" * 65 not in unknown


@pytest.mark.parametrize(
    "extra",
    [
        {"host_bytes": -1},
        {"host_bytes": "much"},
        {"host_bytes": True},
        {"host_bytes": [1]},
        {"audit_path": {"a": 1}},
        {"policy": ["exact"]},
        {"min_reuse_ratio": float("nan")},
        {"min_span": 64, "min_span_tokens": 65},
    ],
    ids=str,
)
def test_a_value_out_of_range_turns_reuse_off_with_one_sentence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    arguments = arguments_of(engine_config(**extra))
    assert arguments.refusal == "settings_invalid"
    (told,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert next(iter(extra)).replace("min_span", "min_span_tokens") in told.getMessage()
    assert load_settings(**arguments.settings)


def test_a_wrong_variable_turns_reuse_off_too_and_the_halves_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMBLEND_HOST_BYTES", "much")
    with pytest.raises(ConfigurationError):
        load_settings()
    arguments = arguments_of(engine_config())
    assert arguments.refusal == "settings_invalid"
    assert set(arguments.settings) == set(settings_off()) == set(Settings.model_fields)
    # Reuse is not off by a setting: the reason that counts is settings_invalid.
    assert load_settings(**arguments.settings).enabled


def test_settings_that_fit_refuse_nothing_and_reach_the_arguments() -> None:
    arguments = arguments_of(engine_config(host_bytes=5))
    assert (arguments.refusal, arguments.settings) == (None, {"host_bytes": "5"})
