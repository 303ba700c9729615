"""The rows of the benchmark inside vLLM, made of what its arms have written."""

import json
from dataclasses import asdict

import pytest

from benchmarks.bench_model import FP8, MLA, PLAIN
from benchmarks.vllm import ttft
from benchmarks.vllm.arm import ARMS, POSITION_FIX, STOCK, VERIFIED, problem_of
from validation.estimate.figures import recorded_observations
from validation.results import read_rows

TOLD = {"requests": 4, "outcomes": {"backend_materialized_reuse": 4}, "reasons": {}, "faults": {}, "refusal": None}
TOLD |= {"mode": "wrapper", "exact_prefix_tokens": 0, "offered_tokens": 1_000, "reused_tokens": 1_000}
EXACT = {"largest_hit_tokens": 32, "exact_limit_tokens": 32, "smallest_exact_hit_tokens": 900}
RAG = {"requests": 4, "prompt_tokens": 8_000, "cached_tokens": 800, "ttft_ms": [10.0, 20.0, 30.0], "served": TOLD}


def written(folder, arms, runner="vllm.v1.worker.gpu_model_runner", kv=PLAIN, end=""):
    for name, parts in arms.items():
        measured = {"machine": {"name": "card"}, "versions": {}, "date": "2026-01-01", "command": f"measure {name}"}
        told = {"arm": name, "engine": {"runner": runner, "kv": kv}, "parts": parts, **measured}
        (folder / f"{name}{end}.json").write_text(json.dumps(told))


STOCK_PARTS = {
    "ttft": {"tokens": 24_576, "cold_ms": [700.0] * 3, "exact_hit_ms": [20.0] * 3},
    "miss": {"tokens": 8_192, "ms": [[200.0] * 3, [300.0] * 3, [200.0] * 3]},
    "decode": {"tokens": 24_576, "alone_ms": [10.0] * 3, "ms": [100.0] * 3},
    "rag": {**RAG, "requests_per_s": 4.0},
    "arrivals": {**RAG, "per_second": 3.2, "ttft_ms": [100.0, 200.0, 300.0]},
}
OUR_PARTS = {
    "ttft": {"tokens": 24_576, "shifted_ms": [15.0] * 3, "served": TOLD},
    "miss": {"tokens": 8_192, "ms": [[201.0] * 3, [301.5] * 3, [900.0] * 3], "served": TOLD},
    "decode": {"tokens": 24_576, "alone_ms": [10.0] * 3, "ms": [50.0] * 3, "served": TOLD},
    "rag": {**RAG, "requests_per_s": 18.0},
    "arrivals": {**RAG, "per_second": 3.2},
    "contaminated": {"prompts": 4, "hits": 0, **EXACT},
}


def test_rows_compare_with_stock_and_have_the_goals(tmp_path):
    written(tmp_path, {STOCK: STOCK_PARTS, POSITION_FIX: OUR_PARTS, VERIFIED: OUR_PARTS})
    ttft.main(["--out", str(tmp_path), "--arms", "none", "--json", str(tmp_path / "json" / "card")])
    rows = {row.name: row for row in read_rows(tmp_path / "json")["card/vllm"]}
    for name, value, goal in (
        ("shifted_ttft_24k_over_exact_hit", 15 / 20, ttft.VLLM_OVER_EXACT_HIT[True]),
        ("shifted_ttft_24k_over_cold", 15 / 700, ttft.VLLM_OVER_COLD[POSITION_FIX]),
        ("verified_ttft_24k_over_cold", 15 / 700, ttft.VLLM_OVER_COLD[VERIFIED]),
        ("miss_overhead_8k", 0.5, ttft.VLLM_MISS_OVERHEAD_PERCENT[POSITION_FIX]),
        ("decode_slowdown_position_fix", 0.5, ttft.VLLM_DECODE_SLOWDOWN),
        ("rag_throughput_gain_position_fix", 4.5, 4.0),
        ("rag_throughput_gain_verified", 4.5, 3.0),
        ("rag_ttft_p95_ratio_verified", 29 / 290, ttft.VLLM_RAG_P95_RATIO),
        ("contaminated_hits_verified", 0.0, 0.0),
    ):
        row = rows[f"vllm_{name}"]
        assert row.value == pytest.approx(value), name
        assert (row.goal, row.holds) == (goal, True), name
    assert "1,000 of 1,000 offered tokens reused" in rows["vllm_rag_throughput_gain_verified"].baseline
    assert rows["vllm_miss_overhead_8k"].command == " ; ".join(f"measure {name}" for name in ARMS)


def test_bounded_rows_have_a_file_of_their_own_and_the_worst_run_counts(tmp_path):
    declined = TOLD | {"outcomes": {"backend_declined_reuse": 4}, "reasons": {"does_not_pay": 4}}
    served, names = TOLD | {"sampled": {"sampled_tokens": 60}}, ("volatile_ms", "chosen_ms", "chosen_by_sample_ms")
    ours = {name: [140.0] * 3 for name in names} | {"tokens": 24_576, "layers": 28}
    slower = {"model": "smollm2", "ms": {"512": {"64": [10.1] * 3, "480": [4.0] * 3}}}
    slower["served"] = {"512": {"64": declined, "480": TOLD}}
    bounded = {STOCK: STOCK_PARTS["ttft"], VERIFIED: ours | {"served_of": dict.fromkeys(names, served)}}
    written(tmp_path, {name: {"bounded": found} for name, found in bounded.items()})
    smollm2 = {STOCK: {"ms": {"512": {"cold": [10.0] * 3}}}, VERIFIED: slower}
    written(tmp_path, {name: {"smollm2": found} for name, found in smollm2.items()}, end="_smollm2")
    ttft.main(["--out", str(tmp_path), "--arms", "none"])
    rows = read_rows(tmp_path / "rows")["vllm_bounded"]
    assert [(row.name, row.value, row.goal) for row in rows] == [
        ("vllm_bounded_volatile_24k_over_exact_hit", pytest.approx(7), 1.2),
        ("vllm_bounded_15_24k_over_cold", pytest.approx(0.2), 0.27),
        ("vllm_bounded_15_24k_over_cold_by_sample", pytest.approx(0.2), 0.17),
        ("reuse_over_cold_ttft_smollm2_512", pytest.approx(1.01), 1.02),
    ]
    assert "of 8 requests 4 reused, declined {'does_not_pay': 4}" in rows[-1].baseline


def test_what_was_not_served_from_donors_gives_no_row(tmp_path, capsys):
    spoiled = {**OUR_PARTS, "ttft": {**OUR_PARTS["ttft"], "problem": "0 of 24448 tokens in donors were reused"}}
    written(tmp_path, {STOCK: STOCK_PARTS, POSITION_FIX: spoiled})
    with pytest.raises(SystemExit):
        ttft.main(["--out", str(tmp_path), "--arms", "none"])
    names = {row.name for row in read_rows(tmp_path / "rows")["vllm"]}
    assert "vllm_miss_overhead_8k" in names
    assert not [name for name in names if "shifted" in name or "verified" in name]
    assert "position_fix ttft: 0 of 24448 tokens in donors were reused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"exact_prefix_tokens": 500, "reused_tokens": 450}, None),
        ({"reused_tokens": 899}, "899 of 1000 tokens"),
        ({"faults": {"planned_forward": 1}}, "planned_forward"),
        ({"refusal": "plan_not_executed"}, "plan_not_executed"),
        ({"mode": "stock"}, "mode stock"),
        ({"outcomes": {"backend_declined_reuse": 1}, "reasons": {"load_failed": 1}}, "load_failed"),
    ],
)
def test_a_measurement_is_judged_by_how_it_was_served(change, said):
    problem = problem_of({**TOLD, **change}, 1_000)
    assert (problem is None) if said is None else (problem is not None and said in problem)


@pytest.mark.parametrize(
    ("kv", "runner", "end"), [(FP8, "vllm.v1.worker.gpu_model_runner", ""), (MLA, ttft.SECOND_RUNNER, "_v2_runner")]
)
def test_rows_of_another_kv_cache_and_runner_are_named_so_and_have_goals_of_their_own(tmp_path, kv, runner, end):
    written(tmp_path, {STOCK: STOCK_PARTS, POSITION_FIX: OUR_PARTS}, runner, kv)
    ttft.main(["--out", str(tmp_path), "--arms", "none", "--json", str(tmp_path / "json")])
    [(file, rows)] = read_rows(tmp_path / "json").items()
    assert file == f"vllm_{kv}{end}"
    assert [(row.name, row.value, row.goal) for row in rows] == [
        (f"vllm_{kv}_shifted_over_cold_24k{end}", 15 / 700, ttft.VLLM_KV_OVER_COLD[kv]),
        (f"vllm_{kv}_shifted_over_exact_hit_24k{end}", 15 / 20, None),
        (f"vllm_{kv}_miss_overhead_8k{end}", pytest.approx(0.5), ttft.VLLM_MISS_OVERHEAD_PERCENT.get(kv)),
    ]


def test_observations_are_a_file_that_the_estimate_reads(tmp_path):
    cold = [{"ttft_ms": float(size), "computed": size, "reused": 0, "is_checked": False} for size in (512, 1_024)]
    checked = [{"ttft_ms": 9.5, "computed": 128, "reused": 384, "is_checked": True}]
    parts = {STOCK: cold, VERIFIED: checked}
    written(tmp_path, {name: {"observations": {"observations": seen}} for name, seen in parts.items()})
    ttft.main(["--out", str(tmp_path), "--arms", "none"])
    found = recorded_observations(tmp_path / "observations.json")
    assert [asdict(each) for each in found] == [*cold, *checked]


def test_unknown_names_are_refused(tmp_path, capsys):
    for option in ("--arms", "--parts"):
        with pytest.raises(SystemExit):
            ttft.main(["--out", str(tmp_path), option, "stok"])
        assert f"{option} has stok; possible are" in capsys.readouterr().err
