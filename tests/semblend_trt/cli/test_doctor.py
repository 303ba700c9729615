"""`semblend-trt doctor` ends with a status that scripts can use, and tells people and programs why."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from semblend_trt.cli.main import main
from semblend_trt.config import PREFIXES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_settings(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)


def test_all_is_fine(tiny_qwen2_path: Path, capsys) -> None:
    assert main(["doctor", "--model", str(tiny_qwen2_path)]) == 0
    shown = capsys.readouterr().out
    areas = [line for line in shown.splitlines() if line and not line.startswith(" ")]
    assert areas == ["software", "engine", "machine", "settings", "model", "profile", "no problems"]
    assert "  note     no_profile: SEMBLEND_PROFILE is not set" in shown


def test_every_area_is_told_once(tiny_qwen2_path: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    for name, value in (("EMBEDDER", "minilm"), ("EMBEDDER_MODEL", tmp_path), ("AUDIT_PATH", tmp_path / "audit.jsonl")):
        monkeypatch.setenv(f"SEMBLEND_{name}", str(value))
    assert main(["doctor", "--model", str(tiny_qwen2_path)]) == 1
    shown = capsys.readouterr().out
    areas = [line for line in shown.splitlines() if line and not line.startswith(" ")]
    assert areas == ["software", "engine", "machine", "settings", "files", "model", "profile", "1 problem"]
    assert f"  failed   embedder minilm: '{tmp_path}' is neither" in shown


def test_a_refusal_is_named(tiny_qwen2_path: Path, capsys) -> None:
    assert main(["doctor", "--model", str(tiny_qwen2_path), "--kv-dtype", "fp8"]) == 1
    shown = capsys.readouterr().out
    assert "  refused  kv_scales: a KV cache of fp8 is taken in vLLM" in shown
    assert shown.endswith("\n1 problem\n")


def test_json(tiny_qwen2_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SEMBLEND_POLICY", "off")
    assert main(["doctor", "--json", "--model", str(tiny_qwen2_path)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == 1
    (refused,) = [finding for finding in told["findings"] if finding["status"] == "refused"]
    assert (refused["area"], refused["reason"]) == ("settings", "policy_off")
    assert all(set(finding) == {"area", "status", "reason", "text", "details"} for finding in told["findings"])


def test_a_setting_out_of_range_leaves_the_rest_to_be_checked(tiny_qwen2_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "0")
    assert main(["doctor", "--model", str(tiny_qwen2_path)]) == 1
    shown = capsys.readouterr().out
    assert "  failed   SEMBLEND_MIN_SPAN is '0'; allowed is 1..1048576" in shown
    assert "3 layers" in shown


@pytest.mark.parametrize(
    ("words", "told"), [(["--kv-dtype", "int3"], "invalid choice: 'int3'"), (["--model", ""], "the name is empty")]
)
def test_bad_usage_ends_with_two(words: list[str], told: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "refused"),
    [("semblend_trt.connector", [("model", "kv_scales")]), ("engine_wrapper.connector", [])],
)
def test_the_engines_options_decide_the_kv_dtype(
    tiny_qwen2_path: Path, tmp_path: Path, capsys, module: str, refused: list[tuple[str, str]]
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(f"{{kv_cache_config: {{dtype: fp8}}, kv_connector_config: {{connector_module: {module}}}}}")
    assert main(["doctor", "--json", "--model", str(tiny_qwen2_path), "--engine-options", str(file)]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    problems = [(each["area"], each["reason"]) for each in found if each["status"] in ("failed", "refused")]
    assert problems == [("options", None), *refused]


def test_options_that_cannot_be_read_are_bad_usage(tmp_path: Path, capsys) -> None:
    assert main(["doctor", "--engine-options", str(tmp_path / "nowhere.yaml")]) == 2
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err


def test_what_a_file_holds_is_shown_and_does_nothing(tiny_qwen2_path: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        '{scheduler_config: {capacity_scheduler_policy: "x\\e[2J\\u202e"}, kv_cache_config: {max_tokens: 0}}'
    )
    assert main(["doctor", "--model", str(tiny_qwen2_path), "--engine-options", str(file)]) == 1
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert r"no connector in with x\x1b[2J\u202e" in shown
    assert "kv_cache_config.max_tokens is 0; give a whole number" in shown


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_doctor_says_so(capsys) -> None:
    assert main(["doctor", "--engine", "vllm"]) == 1
    assert "failed   vllm cannot be imported here; `pip install 'semblend-trt[vllm]'`" in capsys.readouterr().out
