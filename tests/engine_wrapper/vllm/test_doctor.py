"""`semblend-trt doctor --engine vllm` says beforehand what an engine would be refused for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from engine_wrapper.vllm.refusals import REASONS
from semblend_trt.cli.main import main
from validation.models import shipped_model
from validation.vllm_engine import TRANSFER as OURS

if TYPE_CHECKING:
    from pathlib import Path

AREAS = ("engine", "options")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def looked_at(options: dict[str, Any] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """The findings of areas engine and options."""
    arguments = ["doctor", "--json", "--engine", "vllm", "--model", str(shipped_model())]
    if options is not None:
        (tmp_path / "vllm.yaml").write_text(json.dumps(options))
        arguments += ["--engine-options", str(tmp_path / "vllm.yaml")]
    main(arguments)
    told = capsys.readouterr().out
    findings = json.loads(told[told.index("{\n") :])["findings"]
    return [
        (each["status"], each["reason"], each["text"]) for each in findings if each["area"] in ("engine", "options")
    ]


def test_options_that_are_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (None, {"dtype": "float32", "kv-transfer-config": json.dumps(OURS)}):
        version, own = looked_at(options, tmp_path, capsys)
        assert version[0] == own[0] == "ok"
        assert own[2] == "nothing in these options is refused"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_transfer_config": {**OURS, "kv_load_failure_policy": "fail"}}, "load_failure_policy"),
        ({"kv_transfer_config": {**OURS, "kv_role": "kv_producer"}}, "kv_role"),
        ({"enable-lora": True}, "lora"),
        ({"kv_transfer_config": {**OURS, "kv_connector_extra_config": {"min_span": 0}}}, "settings_invalid"),
    ],
)
def test_a_refusal_is_told_with_what_to_change(
    options: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, named, text = looked_at(options, tmp_path, capsys)[-1]
    assert (status, named) == ("refused", reason)
    assert text.lower() == REASONS[reason].lower().removesuffix(".")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_transfer_config": {**OURS, "kv_connector": "NixlConnector"}}, "the connector is 'NixlConnector'"),
        ({"kv_transfer_config": 7}, "kv_transfer_config holds no names with values"),
        ({"max_model_len": -5}, "vLLM refuses these options"),
    ],
)
def test_what_vllm_would_not_start_with_is_told(
    options: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, text = looked_at(options, tmp_path, capsys)[-1]
    assert status == "failed"
    assert sentence in text


def test_keys_that_no_setting_has_are_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"min_similarity": 0.7, "lookup_top_k": 3}
    options = {"kv_transfer_config": {**OURS, "kv_connector_extra_config": extra}}
    told = [text for status, _, text in looked_at(options, tmp_path, capsys) if status == "note"]
    assert any("lookup_top_k" in text for text in told)
