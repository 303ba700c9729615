"""The command: its files, which latency model it takes, what it refuses, and how wide its intervals are."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from validation.cli import main
from validation.replay.command import FILE_NAMES, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from semblend_trt.fleet.telemetry import TraceLine


def run(arguments: list[str], output: Path, rows: Path | None = None) -> dict[str, object]:
    profile = [] if rows is None else ["--latency-profile", str(rows)]
    assert main(["replay", *arguments, *profile, "--output", str(output)]) == 0
    return json.loads((output / "replay_results.json").read_text())


def test_a_workload_leaves_all_files_and_its_trace_gives_the_same_figures(
    tmp_path: Path, recorded_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--policies", "adaptive_semantic", "--capacity-tokens", "4000", "9000", "4000"]
    workload = ["--workload", "low_memory_rag_stress", "--requests", "80", "--write-trace", str(tmp_path / "t.jsonl")]
    document = run([*workload, *asked], tmp_path / "out", recorded_rows)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILE_NAMES)
    lines = document["lines"]
    expected = [
        (rule, policy, capacity)
        for rule in ("exact_prefix", "span")
        for capacity in (4000, 9000)
        for policy in ("lru", "adaptive_semantic", "optimum")
    ]
    assert [(line["rule"], line["policy"], line["capacity_tokens"]) for line in lines] == expected
    for line in lines:
        assert 0 <= line["hit_share"] <= document["unlimited_share"][line["rule"]] + 1e-9
        assert 0 < line["ttft_p50_ms"] <= line["ttft_p95_ms"] <= line["ttft_p99_ms"]
        assert (line["ttft_over_lru_ms"] is None) == (line["policy"] == "lru")
    with (tmp_path / "out" / "replay_metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["hit_share"]) for row in table] == [line["hit_share"] for line in lines]
    assert [float(row["predicted_ttft_p95_ms"]) for row in table] == [line["ttft_p95_ms"] for line in lines]
    page = (tmp_path / "out" / "replay_summary.md").read_text()
    assert "(replay_plot.png)" in page
    assert "predicted by the model" in page
    assert page.count("| adaptive_semantic |") == 4
    assert (tmp_path / "out" / "replay_plot.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in shown[-5:]] == [*FILE_NAMES, "t.jsonl"]
    again = run(["--trace", str(tmp_path / "t.jsonl"), *asked], tmp_path / "again", recorded_rows)
    assert again["lines"] == lines


def test_without_times_of_its_own_a_replay_takes_those_of_an_h200(
    tmp_path: Path, recorded_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # an installed package has no folder of result rows
    asked = ["--workload", "rag_shared_corpus", "--requests", "20", "--policies", "lru"]
    shipped, rows = (run(asked, tmp_path / "out", each)["model"] for each in (None, recorded_rows))
    assert shipped["source"] == "an H200"
    assert shipped["computed_ms"] == pytest.approx(rows["computed_ms"], rel=1e-3)


def test_a_trace_with_enough_observations_makes_its_own_latency_model(
    line: Callable[..., TraceLine], tmp_path: Path, recorded_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [
        line(n, ["a", f"own {n}"], [1_000, 10 * n], observed_ttft_ms=5 + n, observed_prefill_tokens=1_000 + 10 * n)
        for n in range(1, 41)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(each.to_json() + "\n" for each in seen) + "no line\n")
    asked = ["--trace", str(path), "--policies", "lru"]
    own = run(asked, tmp_path / "own", None)["model"]
    assert (own["source"], own["observations"], own["computed_range"]) == ("the trace itself", 40, [1_010, 1_400])
    shown = capsys.readouterr().out
    assert "fitted to 40 observations of the trace itself" in shown
    assert "Passed over: 1 not JSON (first in line 41)." in shown
    rows = run(asked, tmp_path / "rows", recorded_rows)["model"]
    assert rows["source"] == str(recorded_rows)


def test_a_published_trace_shows_prefixes_and_the_routers_balance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {
            "timestamp": 4_000 * n,
            "input_length": 5_000,
            "output_length": 9,
            "hash_ids": [0, *range(9 * d + 1, 9 * d + 10)],
        }
        for n, d in enumerate([0, 1, 2, 3] * 10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    asked = ["--trace", str(path), "--policies", "lru", "--capacity-tokens", "30000", "--replicas", "2"]
    found = run(asked, tmp_path / "out")
    assert [rule["name"] for rule in found["rules"]] == ["exact_prefix"]
    routed = {line["policy"]: line for line in found["routed"]}
    assert set(routed) == {"round_robin", "least_loaded", "exact_prefix", "span_overlap"}
    assert {line["capacity_tokens"] for line in routed.values()} == {15_000}
    for line in routed.values():
        assert 1.0 <= line["imbalance"] <= 2.0
        assert 0.0 < line["hit_share"] <= found["unlimited_share"]["exact_prefix"]
    assert routed["exact_prefix"]["imbalance"] == pytest.approx(2.0)
    shown = capsys.readouterr().out
    assert "Blocks of a prefix that an earlier request had: 363, 90.8% of all blocks." in shown
    assert "what reuse of moved text would add is not" in shown
    page = (tmp_path / "out" / "replay_summary.md").read_text()
    assert "## router over 2 replicas" in page
    assert "| span_overlap | 15,000 |" in page


def test_times_and_lengths_alone_say_nothing_of_reuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "2023-11-16 18:15:46.6805900,374,44\r\n" * 6)
    found = run(["--trace", str(path), "--replicas", "3"], tmp_path / "out")
    assert (found["lines"], found["unlimited_share"]) == ([], {})
    assert [line["imbalance"] for line in found["routed"]] == pytest.approx([1.0, 1.0, 1.0, 1.0])
    assert not (tmp_path / "out" / "replay_plot.png").exists()
    shown = capsys.readouterr().out
    assert "not known" in shown
    assert "replay_plot.png" not in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "One of the arguments --trace --workload is required"),
        (["--workload", "lucky"], "--workload names 'lucky'; there are repeated_system"),
        (["--workload", "rag_shared_corpus", "--trace", "t"], "not allowed with argument"),
        (["--trace", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["--trace", "t", "--write-trace", "u"], "--write-trace saves a built-in trace"),
        (["--workload", "rag_shared_corpus", "--policies", "mru"], "--policies names 'mru'; there are fifo, lru, lfu"),
        (["--workload", "rag_shared_corpus", "--policies", "optimum"], "--policies names 'optimum'"),
        (["--workload", "rag_shared_corpus", "--capacity-tokens", "0"], "--capacity-tokens holds 0"),
        (["--workload", "rag_shared_corpus", "--capacity-tokens", "many"], "invalid int value: 'many'"),
        (["--workload", "rag_shared_corpus", "--requests", "0"], "--requests is 0; it must be at least 1"),
        (["--workload", "rag_shared_corpus", "--requests", "100001"], "it must be at most 100000"),
        (["--trace", "t", "--requests", "0"], "--requests is 0; it must be at least 1"),
        (["--workload", "rag_shared_corpus", "--replicas", "0"], "--replicas is 0; it must be at least 1"),
        (["--workload", "rag_shared_corpus", "--replicas", "65"], "--replicas is 65; it must be at most 64"),
        (["--workload", "rag_shared_corpus", "--min-match-length", "0"], "--min-match-length is 0"),
        (["--workload", "rag_shared_corpus", "--recompute-tokens", "-1"], "--recompute-tokens is -1"),
        (["--workload", "rag_shared_corpus", "--latency-profile", "missing.json"], "missing.json does not hold"),
    ],
)
def test_bad_usage_is_one_sentence_and_leaves_nothing(
    arguments: list[str], sentence: str, check_refused: Callable[[list[str], str], None]
) -> None:
    check_refused(["replay", *arguments], sentence)


def test_an_empty_trace_is_refused(
    tmp_path_factory: pytest.TempPathFactory, check_refused: Callable[[list[str], str], None]
) -> None:
    path = tmp_path_factory.mktemp("empty") / "trace.jsonl"
    path.write_text("")
    check_refused(["replay", "--trace", str(path)], "the trace holds no request with tokens")


def test_equal_differences_leave_no_doubt() -> None:
    interval = ratio_interval([2.0] * 50, [4.0] * 50)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))
    assert interval.is_a_difference


def test_what_follows_from_itself_says_less_than_independent_requests() -> None:
    random = np.random.default_rng(3)
    steps = random.normal(size=40)
    slow, shuffled = np.repeat(steps, 40), random.permutation(np.repeat(steps, 40))
    wide, narrow = (ratio_interval(values, np.ones(1_600)) for values in (slow, shuffled))
    assert wide.estimate == pytest.approx(narrow.estimate)
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        interval = ratio_interval(random.normal(1.0, 3.0, size=900), np.ones(900))
        held += interval.low <= 1.0 <= interval.high
    assert 175 <= held <= 199


def test_a_few_requests_have_none() -> None:
    assert ratio_interval([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) is None
