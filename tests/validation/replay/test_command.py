"""The command: its files, what it refuses, and how wide its intervals are."""

import json

import pytest

from tests.validation.replay.test_trace import line
from validation.cli import main
from validation.replay.command import FILE_NAMES


def run(arguments, output):
    assert main(["replay", *arguments, "--output", str(output)]) == 0
    return json.loads((output / "replay_results.json").read_text())


@pytest.mark.promise(
    "commands", "`python -m validation replay` says which eviction policy suits a trace, beside the optimum"
)
def test_a_trace_leaves_all_files_with_the_same_figures(tmp_path, capsys):
    seen = [line(n, ["header", f"document {n % 7}", f"own {n}"], [500, 900, 40]) for n in range(40)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([*(each.model_dump_json(exclude_none=True) for each in seen), "no line"]))
    asked = ["--policies", "static_semantic", "--capacity-tokens", "2000", "5000", "2000"]
    document = run(["--trace", str(path), *asked], tmp_path / "out")
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == sorted(FILE_NAMES)
    lines = document["lines"]
    expected = [
        (rule, policy, capacity)
        for rule in ("exact_prefix", "span")
        for capacity in (2000, 5000)
        for policy in ("lru", "static_semantic", "optimum")
    ]
    assert [(each["rule"], each["policy"], each["capacity_tokens"]) for each in lines] == expected
    for each in lines:
        assert 0 <= each["hit_share"] <= document["unlimited_share"][each["rule"]] + 1e-9
        assert (each["hit_share_over_lru"] is None) == (each["policy"] == "lru")
    assert (tmp_path / "out" / "replay_summary.md").read_text().count("| static_semantic |") == 4
    shown = capsys.readouterr().out
    assert [each.rpartition("/")[2] for each in shown.splitlines()[-2:]] == [*FILE_NAMES]
    assert "Passed over: 1 not JSON (first in line 41)." in shown


def test_a_published_trace_shows_prefixes_alone(tmp_path, capsys):
    lines = [
        {"timestamp": 4_000 * n, "input_length": 5_000, "hash_ids": [0, *range(9 * d + 1, 9 * d + 10)]}
        for n, d in enumerate([0, 1, 2, 3] * 10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = run(["--trace", str(path), "--policies", "lru", "--capacity-tokens", "30000"], tmp_path / "out")
    assert [rule["name"] for rule in found["rules"]] == ["exact_prefix"]
    shown = capsys.readouterr().out
    assert "Blocks of a prefix that an earlier request had: 363, 90.8% of all blocks." in shown
    assert "what reuse of moved text would add is not" in shown
