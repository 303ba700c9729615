"""A fleet serves each request where its first token comes first, and fetches what that makes faster."""

import json

import numpy as np
import pytest

from tests.validation.replay.conftest import line, trace_from, write_trace
from validation.cli import main
from validation.replay.fleet import MARGIN, Fleet, serve_fleet
from validation.replay.simulation import EXACT_PREFIX, SPAN, ReuseRule
from validation.replay.trace import trace_of

PREFIX, SPANS = ReuseRule(EXACT_PREFIX, as_prefixes=True), ReuseRule(SPAN, False, 64, 16)
FLEET = Fleet(2, 2, 1 << 20, 10_000.0, 1_000)
# Bandwidth in Gb/s from which fetching FLEET's tokens takes less time than their prefill.
PAYS = 8e-9 * FLEET.token_bytes * FLEET.tokens_per_s / MARGIN


def busy_holder():
    """The holder of a document gets a long prompt, the other worker a short one, and then the document is asked for."""
    asked = [(0.0, "document", 20_000), (9.0, "short", 10), (9.0, "long", 90_000), (9.0, "document", 20_000)]
    return trace_of(line(i, [name], [n], timestamp_ms=1e3 * at) for i, (at, name, n) in enumerate(asked))


@pytest.mark.parametrize(("gbits", "fetched"), [(0.0, 0), (0.9 * PAYS, 0), (1.1 * PAYS, 19_999)])
def test_a_fetch_pays_from_the_bandwidth_that_its_formula_says(gbits, fetched):
    found = serve_fleet(busy_holder(), PREFIX, FLEET, gbits)
    assert found.fetched.tolist() == [0, 0, 0, fetched]
    assert found.ttft[-1] == pytest.approx(8e-6 * fetched / gbits + 1e-4 if fetched else 2.0 + 1e-3)


@pytest.mark.parametrize("rule", [PREFIX, SPANS], ids=["prefixes", "spans"])
@pytest.mark.parametrize("seed", range(4))
def test_a_fleet_reuses_no_more_than_there_is_and_fetches_no_more_than_it_reuses(rule, seed):
    rng = np.random.default_rng(seed)
    tokens = {str(name): int(rng.integers(1, 3_000)) for name in range(9)}
    trace = trace_from([[*map(str, rng.permutation(9)[: rng.integers(1, 6)])] for _ in range(60)], tokens)
    fleet = Fleet(1, 4, 12_000, 1_000.0, 1_000)
    alone, found = serve_fleet(trace, rule, fleet), serve_fleet(trace, rule, fleet, 100.0)
    assert not alone.fetched.any()
    assert found.fetched.any()
    assert (found.fetched <= found.reused).all()
    assert (found.reused < found.tokens).all()
    # At this bandwidth a fetch takes next to no time, so that nothing is worse with it.
    assert found.ttft.sum() < alone.ttft.sum()


def test_the_command_writes_rows_for_every_bandwidth(tmp_path):
    lines = [line(i, ["a", f"{i % 3}"], [600, 300]) for i in range(40)]
    path = write_trace(tmp_path / "my trace.jsonl", lines)
    given = ["--trace", path, "--policy", "pull", "--gbits", "1", "100", "--output", str(tmp_path)]
    assert main(["replay", *given]) == 0
    rows = {each["name"]: each for each in json.loads((tmp_path / "replay_pull_my_trace.json").read_bytes())}
    kinds = ("gain_points", "ttft_p95_ratio")
    assert {*rows} == {f"replay_pull_{kind}_{gbits}g_my_trace" for kind in kinds for gbits in (1, 100)}
    assert all(row["baseline"].startswith("simulated") for row in rows.values())
