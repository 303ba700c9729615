"""Dry runs of the benchmarks inside vLLM: all is measured and written, and what is refused gives no figure."""

import json
import shutil

import pytest
from torch.cuda import is_available

from benchmarks.agents import play
from benchmarks.vllm import ttft
from benchmarks.vllm.arm import IN_TURNS, OF_BOUNDS, PARTS
from tests.benchmarks.test_agents import TEMPLATE, trajectory
from validation.models import shipped_model
from validation.results import read_rows

pytestmark = pytest.mark.last_step


def dry_run(monkeypatch, *arguments):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # rows of the second one have names of their own
    ttft.main(["--small", *map(str, arguments)])


def test_a_dry_run_measures_and_writes_every_row(tmp_path, monkeypatch):
    out = tmp_path / "out"
    parts = f"--parts={','.join((*PARTS, *OF_BOUNDS))}"
    dry_run(monkeypatch, "--out", out, "--arms", "stock,verified", "--json", tmp_path / "json", parts)
    rows = {row.name: row for row in read_rows(tmp_path / "json")["vllm"]}
    assert rows == {row.name: row for row in read_rows(out / "rows")["vllm"]}
    measured = ("verified_ttft_1536_over_cold", "rag_throughput_gain_verified", "rag_ttft_p95_ratio_verified")
    sampled = ("verified_ttft_1536_over_exact_hit", "verified_sampled_ttft_1536_ms")
    for name in (*measured, *sampled, "decode_slowdown_verified", "stock_hit_ttft_1536_ms", "stock_rag_requests_per_s"):
        assert rows[f"vllm_{name}"].value > 0
    assert "vllm_miss_overhead_512_verified" in rows
    assert rows["vllm_contaminated_hits_verified"].value == 0
    assert all(row.goal is None for row in rows.values())
    told = json.loads((out / "verified.json").read_text())
    in_turns = json.loads((out / "verified_in_turns.json").read_text())
    assert [*in_turns["parts"]] == [each for each in (*PARTS, *OF_BOUNDS) if each in IN_TURNS]
    assert [*told["parts"]] == [each for each in PARTS if each not in IN_TURNS]
    parts = in_turns["parts"] | told["parts"]
    assert all(part.get("problem") is None for part in parts.values())
    reused = [parts[name]["served"] for name in ("ttft", "decode", "rag", "arrivals", "contaminated")]
    assert all(each["reused_tokens"] > 0.9 * each["offered_tokens"] > 0 for each in reused)
    assert all(0 < each["largest_kept"] < (0.1 if is_available() else 0.01) for each in reused)  # a card has TF32
    assert told["engine"]["engine_key"].startswith("vllm-")
    bounded = ("volatile_1536_over_exact_hit", "15_1536_over_cold", "15_1536_over_cold_by_sample")
    assert {*(f"vllm_bounded_{name}" for name in bounded), "reuse_over_cold_ttft_small_1k"} <= rows.keys()
    assert [served["requests"] for served in parts["never_slower"]["served"]["1024"].values()] == [9] * 4


def test_a_refused_engine_gives_no_figure_and_says_why(tmp_path, monkeypatch, capfd):
    refused = "--engine-option=enable_prompt_embeds=true"
    with pytest.raises(SystemExit, match="1"):
        dry_run(monkeypatch, "--out", tmp_path, "--arms=position_fix", "--parts=miss", refused)
    assert "refusal prompt_embeds" in capfd.readouterr().err
    assert json.loads((tmp_path / "position_fix_in_turns.json").read_text())["parts"] == {}


def test_a_dry_run_of_agents_writes_a_row_of_each_variant(tmp_path, monkeypatch):
    model = shutil.copytree(shipped_model(), tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    histories = tmp_path / "histories.jsonl"
    histories.write_text("".join(json.dumps({"messages": trajectory(i)}) + "\n" for i in range(4)))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    given = {"histories": histories, "tokenizer": model, "model": model, "json": tmp_path, "arms": "unbounded"}
    given |= {"tokens": 1_800, "sessions": 1, "turns": 1, "device": "cpu"}
    assert play.main([part for name, value in given.items() for part in (f"--{name}", str(value))]) == 0
    rows = {each["name"]: each["value"] for each in json.loads((tmp_path / "agents_smollm2.json").read_text())}
    for variant in ("volatile", "dropped", "reread", "reordered", "shared"):
        assert rows[f"agents_{variant}_kl_unbounded"] >= 0
        assert rows[f"vllm_agents_smollm2_{variant}_ttft_p95_over_stock_unbounded"] > 0
