"""`python -m benchmarks.sglang.record FOLDER`, in the environment of `make sglang-env`, records SGLang's rows.

With two more arguments, the JSON that `python -m validation quality --engine sglang` wrote and that of the same run
with `--engine vllm`, it records how far answers are from cold ones in both, beside the rows that are there.
Exactness, hits and faults are those of the tests. Times are of SmolLM2 on this CPU, where SGLang has neither its
kernels nor its own torch: they compare two prefills in one process, and say nothing of a card."""

import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from benchmarks.bench_model import NEW_TOKENS, Prompts, use_profile
from benchmarks.sglang.ttft import CHECKS, REUSE, opened, times
from validation.cases import grouped
from validation.models import smollm2_folder
from validation.results import Results, Row, write_rows
from validation.sglang_engine import Ask

TESTS = "tests/engine_wrapper/sglang"
WHERE = "inside SGLang 0.5.23 on a CPU, beside torch 2.13 and stand-ins for its kernels"
DISTANCE = "sglang_kl_vs_cold_"
# Tokens of a prompt that is timed.
TOKENS = 1_024


class Properties:
    """What the tests have recorded, the kinds of faults that were survived, and the tests that failed."""

    def __init__(self) -> None:
        self.found: defaultdict[str, list[float]] = defaultdict(list)
        self.survived, self.failed = 0, list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call" and report.passed:
            self.survived += "test_no_fault_ends" in report.nodeid
            for name, value in report.user_properties:
                self.found[name].append(value)


def main(folder: Path) -> None:
    seen, rows = Properties(), Results([str(folder)])
    pytest.main(["-q", "-p", "no:cacheprovider", TESTS], [seen])
    how = f"largest difference of a token's log-probability from stock SGLang's, all layers computed; float32; {WHERE}"
    rows.add("sglang_exactness", max(seen.found["logprob_difference"]), "nats", how, 1e-4)
    hits = f"tokens that SGLang's prefix cache served of approximate KV, filled, evicted and asked again; {WHERE}"
    rows.add("sglang_contaminated_hits", sum(seen.found["contaminated_hits"]), "tokens", hits, 0)
    faults = f"before, inside and after forwards with a plan: neighbours unharmed, no wrong token; {WHERE}"
    rows.add("sglang_faults_survived", seen.survived, "kinds", faults, 54, "higher")
    rows.add("sglang_tests_failed", len(seen.failed), "tests", f"of this run; {WHERE}", 0)
    with tempfile.TemporaryDirectory() as kept:
        moved, cold = map(median, moved_and_cold(Path(kept)))
    shared = f"{TOKENS - NEW_TOKENS} tokens of a document that moved in a prompt of {TOKENS}"
    beside = f"stock SGLang's time to the first token of the same prompts; {shared}; SmolLM2-135M, float32; {WHERE}"
    rows.add("sglang_shifted_ttft_over_cold", moved / cold, "ratio", beside)
    rows.write(folder / rows.measured.machine["name"], "sglang")


def distances(folder: Path, report: Path, other: Path) -> None:
    """Replace the rows of a quality run by those of `report`: each family's mean KL under policy verified, beside that
    of `other`, the same run in vLLM. Exits with a message if plans offered nothing: that compares cold runs.

    A sample is drawn for each request, and may fall on the other side of a level. So the rows are of prompts of which
    both engines reused equally many tokens."""
    said, rows = json.loads(report.read_text()), Results([str(folder), report.name, other.name])
    floor, beside = said["rounding_floor"], {each["case_id"]: each for each in _verified(json.loads(other.read_text()))}
    both = ((own, beside[own["case_id"]]) for own in _verified(said))
    for family, pairs in grouped(both, lambda pair: pair[0]["workload"]).items():
        alike = [pair for pair in pairs if pair[0]["reused_tokens"] == pair[1]["reused_tokens"]]
        if not alike or not sum(own["offered_tokens"] for own, _ in pairs):
            raise SystemExit(f"no figure: no plan offered tokens in {family}; set a SEMBLEND_MAX_KL it has")
        ours, theirs = (fmean(pair[side]["answer_kl"] for pair in alike) for side in (0, 1))
        of_all = " and ".join(f"{fmean(pair[side]['answer_kl'] for pair in pairs):.2g}" for side in (0, 1))
        computed, offered = (sum(own[f"{name}_tokens"] for own, _ in pairs) for name in ("recomputed", "offered"))
        found = (
            f"mean KL over cold's own answer, {len(alike)} of {len(pairs)} prompts, of which vLLM reused the same "
            f"number of tokens; of all {of_all} in vLLM; {computed / offered:.2f} of the offered tokens computed; "
            f"goal: {theirs:.2g} of the same prompts in vLLM and twice the rounding floor of {floor:.2g}; "
            f"{said['model']}; {said['command']}; {WHERE}"
        )
        rows.add(f"{DISTANCE}{family}", ours, "nats", found, theirs + 2 * floor)
    path = folder / rows.measured.machine["name"] / "sglang.json"
    kept = [Row(**each) for each in json.loads(path.read_text()) if not each["name"].startswith(DISTANCE)]
    write_rows(path, kept + rows.rows)


def _verified(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in report["samples"] if each["arm"] == "verified"]


def moved_and_cold(folder: Path) -> tuple[list[float], list[float]]:
    """Return milliseconds to the first token of prompts with a moved document: with SemBlend, and of stock SGLang."""
    model, prompts, options = smollm2_folder(), Prompts(40_000), {"dtype": "float32"}
    document = prompts.document(TOKENS)
    with opened(model, TOKENS, is_stock=True, disable_radix_cache=True, **options) as stock:
        cold = times(stock, lambda: prompts.shifted(document))
    os.environ.update(REUSE, SEMBLEND_HOST_BYTES=str(1 << 30))
    with opened(model, TOKENS, is_stock=False, **options) as served:
        served.ask(Ask(prompts.donor(document), {"max_new_tokens": 1}))
        served.settle()
        use_profile(served.cache._scheduler, folder, policy="verified", check=CHECKS["checked"])
        return times(served, lambda: prompts.shifted(document), len(document)), cold


if __name__ == "__main__":
    folder, *reports = map(Path, sys.argv[1:])
    if reports:
        distances(folder, *reports)
    else:
        main(folder)
