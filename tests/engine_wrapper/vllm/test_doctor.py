"""`semblend-trt doctor --engine vllm` says beforehand what an engine would be refused for."""

import json

import pytest
import vllm

from engine_wrapper.vllm.doctor import TRANSFER as OURS
from semblend_trt.reasons import Scope, advice
from semblend_trt.reuse_profile import ReuseProfile
from tests.builders.vllm import findings_of
from validation.models import profile_of, shipped_model

AREAS = ("engine", "options")
VERSION = ".".join(vllm.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def looked_at(options, tmp_path, capsys, areas=AREAS):
    findings = findings_of("vllm", options, tmp_path, capsys)
    return [(each["status"], each["reason"], each["text"]) for each in findings if each["area"] in areas]


def test_options_that_are_fine(tmp_path, capsys):
    for options in (None, {"dtype": "float32", "kv-transfer-config": json.dumps(OURS)}):
        version, own = looked_at(options, tmp_path, capsys)
        assert version[0] == own[0] == "ok"
        assert own[2] == "nothing in these options is refused"


def test_a_cache_in_fp8_halves_what_a_token_takes(profile, tmp_path, capsys):
    held = ReuseProfile.read(profile)
    digest = "fp8_e4m3+0123456789abcdef"
    for scales, is_known in ((digest, True), (f"{digest}+bfloat16 keys", False), ("auto", False)):
        named = {**held.namespace, "kv_dtype": "float8_e4m3fn", "cache_dtype": scales}
        held.model_copy(update={"namespace": named}).write(tmp_path / "profile.json")
        ours = {**OURS, "kv_connector_extra_config": {"profile": str(tmp_path / "profile.json")}}
        options = {"dtype": "float32", "kv_cache_dtype": "fp8", "kv-transfer-config": json.dumps(ours)}
        found = looked_at(options, tmp_path, capsys, ("options", "model", "profile"))
        assert any("in float8_e4m3fn" in text for _, _, text in found)
        # Which scales they are is known once the model is loaded.
        assert ("profile_mismatch" in [reason for _, reason, _ in found]) == (not is_known)


def test_adapters_speculation_and_ranks_are_taken_and_named(tmp_path, capsys):
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    options = {"tensor-parallel-size": 2, "enable-lora": True, "speculative-config": drafts}
    shown = {(status, text) for status, _, text in looked_at(options, tmp_path, capsys)}
    assert ("ok", "nothing in these options is refused") in shown
    notes = " ".join(text for status, text in shown if status == "note")
    assert "2 ranks" in notes
    assert "adapter" in notes


DRAFTER = {"method": "draft_model", "model": str(shipped_model()), "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("options", "reason", "sentence"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype", ""),
        ({"pipeline-parallel-size": 2}, "pipeline_parallel", ""),
        ({"speculative-config": DRAFTER}, "speculative_decoding", ""),
        ({"kv_transfer_config": {**OURS, "kv_load_failure_policy": "fail"}}, "load_failure_policy", ""),
        ({"kv_transfer_config": {**OURS, "kv_role": "kv_producer"}}, "kv_role", ""),
        ({"kv_transfer_config": {**OURS, "kv_connector_extra_config": {"min_span": 0}}}, "settings_invalid", ""),
        ({"kv_transfer_config": {**OURS, "kv_connector": "NixlConnector"}}, None, "the connector is 'NixlConnector'"),
        ({"kv_transfer_config": 7}, None, "kv_transfer_config holds no names with values"),
        ({"max_model_len": -5}, None, "vLLM refuses these options"),
    ],
)
def test_a_refusal_is_told_with_what_to_change(options, reason, sentence, tmp_path, capsys):
    """And what vLLM would not start with."""
    status, named, text = looked_at(options, tmp_path, capsys)[-1]
    assert (status, named) == ("failed" if reason is None else "refused", reason)
    assert sentence in text if reason is None else text == advice(reason, Scope.VLLM)


@pytest.mark.parametrize(
    ("engine", "dtype", "status", "sentence"),
    [
        (f"vllm-{VERSION}/ANY/0.1.2.3", "float32", "ok", "it can hold for"),
        ("vllm-0.1/ANY/0.1.2.3", "float32", "refused", f"runs vllm-{VERSION}, which `python -m validation confirm`"),
        (f"vllm-{VERSION}/ANY/0.1.2.3", "bfloat16", "refused", "made for KV dtype float32; this engine runs bfloat16"),
    ],
    ids=["listed", "another engine", "another dtype"],
)
def test_the_profile_that_the_options_name_is_compared_with_the_engine(
    engine, dtype, status, sentence, tmp_path, capsys
):
    shipped, path = profile_of(None, None), tmp_path / "profile.json"
    held = ReuseProfile.read(shipped)
    held.model_copy(update={"engines": [held.engines[0], engine]}).write(path)
    extra = {"profile": str(path), "host_bytes": 1 << 28}
    options = {"dtype": dtype, "kv_transfer_config": {**OURS, "kv_connector_extra_config": extra}}
    options["model"] = str(shipped_model())
    given, *_, compared = looked_at(options, tmp_path, capsys, ("settings", "model", "profile"))
    assert "profile_path of the engine's options, host_bytes of the engine's options" in given[2]
    assert (compared[0], compared[1]) == (status, "profile_mismatch" if status == "refused" else None)
    assert sentence in compared[2]


@pytest.mark.parametrize(
    ("version", "status", "reason", "sentence"),
    [
        ("0.27.1", "refused", "vllm_version", "vLLM 0.27 is installed. Install vLLM 0.28 or newer"),
        ("0.99.0", "note", None, "vLLM 0.99 is installed, which was not tested"),
        ("dev", "refused", "vllm_version", "vLLM without a number is installed. Install vLLM 0.28 or newer"),
    ],
)
def test_a_version_is_told_by_what_is_known_of_it(version, status, reason, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    told, *others = looked_at(None, tmp_path, capsys)
    assert told[:2] == (status, reason)
    assert told[2].startswith(sentence)
    assert [each[0] for each in others] == (["ok"] if status == "note" else [])
