"""`python -m validation --engine vllm`: a profile is confirmed there, and every arm is measured in vLLM itself."""

import json

import pytest

from semblend_trt.reuse_profile import ReuseProfile
from validation.cli import main
from validation.models import profile_of

SHORT = ["--groups", "8", "--tokens", "512", "--max-tokens", "8"]
FIRST = "Stock list of Depot Oslo.\n" + "\n".join(f"item number {i}: {i * 37 % 91}" for i in range(20))
SECOND = "Stock list of Barn Riga.\n" + "\n".join(f"thing number {i}: {i * 53 % 97}" for i in range(20))
CASES = [
    {"id": "swap", "donors": [f"Read. {FIRST}{SECOND} Why?"], "prompt": f"Study this: {SECOND}{FIRST} How many?"},
    {"id": "known", "donors": [f"A {FIRST} Why?"], "prompt": f"Another {FIRST} How?", "reference": "17"},
]
ARMS = ("cold", "cold_again", "exact_prefix", "position_fix", "cacheblend_15")


def test_a_profile_is_confirmed_in_vllm_and_lists_it(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    shipped, path = profile_of(None, None), tmp_path / "profile.json"
    profile = ReuseProfile.read(shipped)
    # As it was before a vLLM was listed: the shipped one lists that of the CPU.
    profile.model_copy(update={"engines": profile.engines[:1]}).write(path)
    options = ["--profile", str(path), "--families", "reordered,header_trap"]
    assert main(["confirm", "--engine", "vllm", *options, *SHORT]) == 0
    ours, vllm = ReuseProfile.read(path).engines
    assert (ours, vllm[:5]) == (profile.engines[0], "vllm-")


def test_a_run_measures_every_case_in_every_arm(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    prompts, output = tmp_path / "cases.jsonl", tmp_path / "report.json"
    prompts.write_text("".join(json.dumps(case) + "\n" for case in CASES))
    options = ["--engine", "vllm", "--dtype", "float32", "--policy", "position_fix"]
    options += ["--prompts", str(prompts), "--arms", ",".join(ARMS)]
    options += ["--output", str(output), "--audit-path", str(tmp_path / "audit.jsonl"), "--max-tokens", "4"]
    options += ["--record", str(tmp_path / "rows"), "--machine", "m"]
    # Neither speed nor answers are judged at this size.
    assert main([*options, "--min-speedup", "0", "--min-rouge1", "0", "--min-token-f1", "0"]) in (0, 1)
    report = json.loads(output.read_text())
    gates = {gate["name"]: gate for gate in report["gates"]}
    assert gates["wrapper_exactness"]["value"] <= 1e-4
    assert "vllm without the wrapper" in gates["wrapper_exactness"]["reads"]
    assert all(gates[name]["holds"] for name in ("donor_registrations", "materializations", "rope_corrections"))
    assert report["settings"]["dtype"] == "float32"
    samples = {(sample["case_id"], sample["arm"]): sample for sample in report["samples"]}
    assert len(samples) == len(CASES) * len(ARMS)
    for (_, arm), sample in samples.items():
        assert sample["ttft_s"] > 0
        assert (sample["reused_tokens"] > 0) == (arm not in ARMS[:3])
        if arm in ARMS[:3]:
            assert (sample["computed_tokens"], sample["outcome"]) == (sample["prompt_tokens"], None)
        else:
            assert sample["computed_tokens"] < sample["prompt_tokens"]
            assert sample["outcome"] == "backend_materialized_reuse"
        if arm == "cold_again":
            assert sample["first_token_kl"] == pytest.approx(0, abs=1e-6)
            assert sample["perplexity_ratio"] == pytest.approx(1)
    assert any("one after the other" in note for note in report["notes"])
    [row] = json.loads((tmp_path / "rows" / "m" / "vllm_end_to_end.json").read_text())
    assert (row["name"], row["holds"]) == ("vllm_wrapper_exactness_max_logit_diff", True)
