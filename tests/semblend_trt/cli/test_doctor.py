"""`semblend-trt doctor` ends with a status that scripts can use, and tells people and programs why."""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from semblend_trt.cli import doctor
from semblend_trt.cli.main import main
from semblend_trt.config import Settings, load_settings
from semblend_trt.doctor import Area, Finding

pytestmark = pytest.mark.usefixtures("no_settings")
GIB = 1 << 30
METADATA = """Metadata-Version: 2.4
Name: semblend-trt
Version: 9.9
Requires-Dist: numpy>={numpy}
Provides-Extra: dev
Requires-Dist: a-linter; extra == 'dev'
Provides-Extra: nats
Requires-Dist: numpy>={numpy}; extra == 'nats'
Requires-Dist: no-such-package>=1; extra == 'nats'
Provides-Extra: metrics
Requires-Dist: numpy>=1; extra == 'metrics'
Provides-Extra: semantic
Requires-Dist: no-such-index>=1; extra == 'semantic'
"""
NATS = {"nats_url": "nats://127.0.0.1:4222"}
LACKS = "is not complete: no-such"


@pytest.mark.promise("commands", "`semblend-trt doctor` says what is missing or refused, and its status is for scripts")
def test_all_is_fine(tiny_qwen2_path, capsys):
    assert main(["doctor", "--model", str(tiny_qwen2_path)]) == 0
    shown = capsys.readouterr().out
    areas = [line for line in shown.splitlines() if line and not line.startswith(" ")]
    assert areas == ["engine", "software", "machine", "settings", "model", "profile", "no problems"]
    assert "  note     no_profile: Set SEMBLEND_PROFILE to a calibrated reuse profile" in shown


@pytest.mark.promise("commands", "`semblend-trt doctor` says what is missing...")
def test_a_refusal_is_named(tiny_qwen2_path, capsys, monkeypatch):
    words = ["doctor", "--model", str(tiny_qwen2_path), "--kv-dtype", "fp8"]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "  refused  kv_scales: a KV cache of fp8 is taken in vLLM" in shown
    assert shown.endswith("\n1 problem\n")
    monkeypatch.setenv("SEMBLEND_POLICY", "off")
    assert main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    refused = [(each["area"], each["reason"]) for each in told["findings"] if each["status"] == "refused"]
    assert (told["problems"], refused) == (2, [("settings", "policy_off"), ("model", "kv_scales")])
    assert all(set(finding) == {"area", "status", "reason", "text"} for finding in told["findings"])


def test_a_setting_out_of_range_leaves_the_rest_to_be_checked(tiny_qwen2_path, capsys, monkeypatch):
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "0")
    assert main(["doctor", "--model", str(tiny_qwen2_path)]) == 1
    shown = capsys.readouterr().out
    assert "  failed   SEMBLEND_MIN_SPAN is '0'; allowed is 1..1048576" in shown
    assert "3 layers" in shown


@pytest.mark.parametrize(
    ("module", "refused"), [("semblend_trt.connector", [("model", "kv_scales")]), ("engine_wrapper.connector", [])]
)
def test_the_engines_options_decide_the_kv_dtype(tiny_qwen2_path, tmp_path, capsys, module, refused):
    file = tmp_path / "options.yaml"
    cache = "kv_cache_config: {dtype: fp8, host_cache_size: 0}"
    file.write_text(f"{{{cache}, kv_connector_config: {{connector_module: {module}}}}}")
    assert main(["doctor", "--json", "--model", str(tiny_qwen2_path), "--engine-options", str(file)]) == bool(refused)
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["area"], each["reason"]) for each in found if each["status"] in ("failed", "refused")] == refused


def test_what_a_file_holds_is_shown_and_does_nothing(tmp_path, capsys):
    file = tmp_path / "options.yaml"
    assert main(["doctor", "--engine-options", str(file)]) == 2
    assert "options.yaml cannot be read" in capsys.readouterr().err
    file.write_text('{kv_cache_config: {use_kv_cache_manager_v2: "x\\e[2J\\u202e"}}')
    assert main(["doctor", "--engine-options", str(file)]) == 1
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert r"use_kv_cache_manager_v2 is 'x\x1b[2J\u202e'" in shown


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_doctor_says_so(capsys):
    assert main(["doctor", "--engine", "vllm"]) == 1
    assert "failed   vllm cannot be imported here; `pip install 'semblend-trt[vllm]'`" in capsys.readouterr().out


def test_what_ends_a_check_is_a_finding_that_failed():
    area = Area("engine")

    def check():
        yield area.ok("first")
        raise OSError("libnothing.so: cannot open\nand more")

    first, second = area.collect(check())
    assert (first.status, first.is_problem) == ("ok", False)
    assert second == Finding("engine", "failed", "cannot be checked: OSError: libnothing.so: cannot open")
    assert second.is_problem


@pytest.mark.parametrize(
    ("numpy", "settings", "problems"),
    [
        ("1.0", {}, []),
        ("1.0", NATS, [f"[nats] {LACKS}-package>=1 is missing; SEMBLEND_NATS_URL needs it"]),
        ("1.0", NATS | {"enabled": False}, []),
        ("1.0", {"embedder": "static"}, [f"[semantic] {LACKS}-index>=1 is missing; SEMBLEND_EMBEDDER=static needs it"]),
        ("999", {}, [" 9.9 is not complete: numpy is "]),
    ],
)
def test_a_package_that_is_needed_and_missing_or_too_old_is_a_problem(numpy, settings, problems, tmp_path, monkeypatch):
    folder = tmp_path / "semblend_trt-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA.format(numpy=numpy))
    monkeypatch.syspath_prepend(tmp_path)
    python, base, metrics, *others = doctor.software(load_settings(**settings))
    assert python.text.startswith("Python 3.")
    assert metrics.text == "semblend-trt[metrics] is complete"
    assert all("is not complete" in each.text for each in others)
    found = [each.text for each in (base, *others) if each.status == "failed"]
    assert [text[: len(told) + 12] for text, told in zip(found, problems, strict=True)] == [
        f"semblend-trt{told}" for told in problems
    ]


@pytest.fixture(params=["host", "card"])
def place(request, monkeypatch, tmp_path):
    """A container with 64 GiB, in one of the cases with a card of 8 GiB."""
    (tmp_path / "memory.max").write_text(f"{64 * GIB}\n")
    (tmp_path / "other").write_text("max\n")
    monkeypatch.setattr(doctor, "_LIMITS", (tmp_path / "memory.max", tmp_path / "other", tmp_path / "missing"))
    monkeypatch.setattr(doctor.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 26}[name])
    card = SimpleNamespace(name="a card", major=9, minor=0, total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param == "card")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    return request.param


@pytest.mark.parametrize("setting", ["host_bytes", "device_bytes", "snapshot_bytes", "staging_bytes"])
def test_a_tier_beyond_the_memory_is_told(place, setting):
    fits, findings = (doctor.machine(load_settings(**{setting: size})) for size in (4 * GIB, 65 * GIB))
    assert not any("lower" in each.text for each in fits)
    found = [each for each in findings if "lower" in each.text]
    if place == "host" and setting == "staging_bytes":  # there is none without a card
        assert found == []
        return
    (told,) = found
    assert told.status is ("failed" if place == "card" else "note")
    assert f"SEMBLEND_{setting.upper()} ({65 * GIB})" in told.text
    assert f"has {8 * GIB if setting != 'host_bytes' and place == 'card' else 64 * GIB} bytes" in told.text


def variables(**settings):
    return list(doctor.variables(load_settings(**settings), {}, has_trtllm=True))


def test_every_variable_is_read_or_told(monkeypatch):
    monkeypatch.setenv("TRTLLM_SEMBLEND_MIN_SPAN", "96")
    for name, value in (("MIN_SPAN", "128"), ("MAX_DONORS", "7"), ("MAX_DONOR", "7"), ("DONOR_DTYPE", "model")):
        monkeypatch.setenv(f"SEMBLEND_{name}", value)
    assert [(each.status, each.text.partition(";")[0][:42]) for each in variables()] == [
        ("note", "SEMBLEND_DONOR_DTYPE is ignored: donors ar"),
        ("failed", "SEMBLEND_MAX_DONOR is not read"),
        ("note", "SEMBLEND_MIN_SPAN is set and not read, bec"),
        ("ok", f"2 of {len(Settings.model_fields)} settings are given: TRTLLM_SEMBLEN"),
        ("note", "TensorRT-LLM hands only variables that beg"),
    ]


@pytest.mark.parametrize(
    ("settings", "reason"), [({"enabled": False}, "disabled"), ({"policy": "off"}, "policy_off"), ({}, None)]
)
def test_what_is_switched_off_is_refused(settings, reason):
    assert [each.reason for each in variables(**settings) if each.is_problem] == [each for each in [reason] if each]
