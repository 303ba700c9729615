"""Agents' histories are played in vLLM on a CPU, and stock and reuse are compared."""

import json
import shutil

from benchmarks.agents import play
from tests.benchmarks.agents.test_histories import TEMPLATE, trajectory
from validation.models import shipped_model


def test_a_dry_run_writes_a_row_of_each_variant(tmp_path, monkeypatch):
    model = shutil.copytree(shipped_model(), tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    histories = tmp_path / "histories.jsonl"
    histories.write_text("".join(json.dumps({"messages": trajectory(i)}) + "\n" for i in range(4)))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    given = {"histories": histories, "tokenizer": model, "model": model, "json": tmp_path, "arms": "unbounded"}
    given |= {"tokens": 1_800, "sessions": 1, "turns": 2, "device": "cpu"}
    assert play.main([part for name, value in given.items() for part in (f"--{name}", str(value))]) == 0
    rows = {each["name"]: each["value"] for each in json.loads((tmp_path / "agents_smollm2.json").read_text())}
    for variant in ("volatile", "dropped", "reread", "reordered", "shared"):
        assert rows[f"agents_{variant}_kl_unbounded"] >= 0
        assert rows[f"vllm_agents_smollm2_{variant}_ttft_p95_over_stock_unbounded"] > 0
