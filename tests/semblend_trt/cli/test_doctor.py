"""`semblend-trt doctor` ends with a status that scripts can use, and tells people and programs why."""

import json
import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from semblend_trt.cli import doctor
from semblend_trt.cli.main import main
from semblend_trt.config import PREFIXES, load_settings
from semblend_trt.doctor import Area, Finding, Status

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)


def test_all_is_fine(tiny_qwen2_path, capsys):
    assert main(["doctor", "--model", str(tiny_qwen2_path)]) == 0
    shown = capsys.readouterr().out
    areas = [line for line in shown.splitlines() if line and not line.startswith(" ")]
    assert areas == ["engine", "software", "machine", "settings", "model", "profile", "no problems"]
    assert "  note     no_profile: only identical text from position 0 is reused. Set SEMBLEND_PROFILE" in shown


def test_a_refusal_is_named(tiny_qwen2_path, capsys):
    assert main(["doctor", "--model", str(tiny_qwen2_path), "--kv-dtype", "fp8"]) == 1
    shown = capsys.readouterr().out
    assert "  refused  kv_scales: a KV cache of fp8 is taken in vLLM" in shown
    assert shown.endswith("\n1 problem\n")


def test_json(tiny_qwen2_path, capsys, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "off")
    assert main(["doctor", "--json", "--model", str(tiny_qwen2_path)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == 1
    (refused,) = [finding for finding in told["findings"] if finding["status"] == "refused"]
    assert (refused["area"], refused["reason"]) == ("settings", "policy_off")
    assert all(set(finding) == {"area", "status", "reason", "text"} for finding in told["findings"])


def test_a_setting_out_of_range_leaves_the_rest_to_be_checked(tiny_qwen2_path, capsys, monkeypatch):
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "0")
    assert main(["doctor", "--model", str(tiny_qwen2_path)]) == 1
    shown = capsys.readouterr().out
    assert "  failed   SEMBLEND_MIN_SPAN is '0'; allowed is 1..1048576" in shown
    assert "3 layers" in shown


@pytest.mark.parametrize(
    ("words", "told"), [(["--kv-dtype", "int3"], "invalid choice: 'int3'"), (["--model", ""], "the name is empty")]
)
def test_bad_usage_ends_with_two(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "refused"),
    [("semblend_trt.connector", [("model", "kv_scales")]), ("engine_wrapper.connector", [])],
)
def test_the_engines_options_decide_the_kv_dtype(tiny_qwen2_path, tmp_path, capsys, module, refused):
    file = tmp_path / "options.yaml"
    file.write_text(f"{{kv_cache_config: {{dtype: fp8}}, kv_connector_config: {{connector_module: {module}}}}}")
    assert main(["doctor", "--json", "--model", str(tiny_qwen2_path), "--engine-options", str(file)]) == bool(refused)
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["area"], each["reason"]) for each in found if each["status"] in ("failed", "refused")] == refused


def test_options_that_cannot_be_read_are_bad_usage(tmp_path, capsys):
    assert main(["doctor", "--engine-options", str(tmp_path / "nowhere.yaml")]) == 2
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err


def test_what_a_file_holds_is_shown_and_does_nothing(tmp_path, capsys):
    file = tmp_path / "options.yaml"
    file.write_text('{scheduler_config: {capacity_scheduler_policy: "x\\e[2J\\u202e"}}')
    assert main(["doctor", "--engine-options", str(file)]) == 1
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert r"no connector in with x\x1b[2J\u202e" in shown


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
    assert (first.status, first.is_problem) == (Status.OK, False)
    assert second == Finding("engine", Status.FAILED, "cannot be checked: OSError: libnothing.so: cannot open")
    assert second.is_problem


# -- software ---------------------------------------------------------------------------------------------------------

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
NEEDS_NATS = {"nats_url": "nats://127.0.0.1:4222"}


@pytest.mark.parametrize(
    ("numpy", "settings", "problems"),
    [
        ("1.0", {}, []),
        (
            "1.0",
            NEEDS_NATS,
            ["[nats] is not complete: no-such-package>=1 is missing; SEMBLEND_NATS_URL needs it"],
        ),
        ("1.0", NEEDS_NATS | {"enabled": False}, []),
        (
            "1.0",
            {"embedder": "static"},
            ["[semantic] is not complete: no-such-index>=1 is missing; SEMBLEND_EMBEDDER=static needs it"],
        ),
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
    assert [each.text for each in others] == [each.text for each in others if "is not complete" in each.text]
    found = [each.text for each in (base, *others) if each.status is Status.FAILED]
    assert [text[: len(told) + 12] for text, told in zip(found, problems, strict=True)] == [
        f"semblend-trt{told}" for told in problems
    ]


# -- machine ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("setting", "on_card"),
    [("host_bytes", False), ("device_bytes", True), ("snapshot_bytes", True), ("staging_bytes", True)],
)
def test_a_tier_beyond_the_memory_is_told(place, setting, on_card):
    fits, found = (
        [each for each in doctor.machine(load_settings(**{setting: size})) if "lower" in each.text]
        for size in (4 * GIB, 65 * GIB)
    )
    assert fits == []
    if place == "host" and setting == "staging_bytes":  # there is none without a card
        assert found == []
        return
    (told,) = found
    assert told.status is (Status.FAILED if place == "card" else Status.NOTE)
    assert f"SEMBLEND_{setting.upper()} ({65 * GIB})" in told.text
    assert f"has {8 * GIB if on_card and place == 'card' else 64 * GIB} bytes" in told.text


# -- settings ---------------------------------------------------------------------------------------------------------


def variables(**settings):
    return list(doctor.variables(load_settings(**settings), {}, has_trtllm=True))


def test_every_variable_is_read_or_told(monkeypatch):
    for name, value in (("TRTLLM_SEMBLEND_MIN_SPAN", "96"), ("SEMBLEND_MIN_SPAN", "128")):
        monkeypatch.setenv(name, value)
    for name, value in (("MAX_DONORS", "7"), ("MAX_DONOR", "7"), ("DONOR_DTYPE", "model")):
        monkeypatch.setenv(f"SEMBLEND_{name}", value)
    retired, unknown, ignored, given, short = variables()
    assert (retired.status, retired.text.split(":")[0]) == (Status.NOTE, "SEMBLEND_DONOR_DTYPE is ignored")
    assert (unknown.status, unknown.text) == (
        Status.FAILED,
        "SEMBLEND_MAX_DONOR is not read; did you mean SEMBLEND_MAX_DONORS?",
    )
    assert (ignored.status, ignored.text.split(" is ")[0]) == (Status.NOTE, "SEMBLEND_MIN_SPAN")
    assert (given.status, given.text.startswith("2 of ")) == (Status.OK, True)
    assert (short.status, "SEMBLEND_MAX_DONORS" in short.text) == (Status.NOTE, True)


@pytest.mark.parametrize(
    ("settings", "reason"), [({"enabled": False}, "disabled"), ({"policy": "off"}, "policy_off"), ({}, None)]
)
def test_what_is_switched_off_is_refused(settings, reason):
    assert [each.reason for each in variables(**settings) if each.is_problem] == [each for each in [reason] if each]
