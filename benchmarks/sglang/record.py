"""`python -m benchmarks.sglang.record FOLDER`, in the environment of `make sglang-env`, records SGLang's rows.

With two more arguments, the JSON that `python -m validation quality --engine sglang` wrote and that of the same run
with `--engine vllm`, it records how far answers are from cold ones in both, beside the rows that are there.
Exactness, hits and faults are those of the tests. Times are of SmolLM2 on this CPU, where SGLang has neither its
kernels nor its own torch: they compare two prefills in one process, and say nothing of a card."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.sglang.ttft import CHECKS, settle, use_check
from validation.models import smollm2_folder
from validation.results import Results, Row, write_rows
from validation.sglang_engine import Ask, LocalSglang

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = "tests/engine_wrapper/sglang"
WHERE = "inside SGLang 0.5.23 on a CPU, beside torch 2.13 and stand-ins for its kernels"
DISTANCE = "sglang_kl_vs_cold_"
# Tokens of the shared document, before it and after it; prompts that are timed.
DOCUMENT, BEFORE, AFTER, TIMES = 960, 32, 32, 5
_REUSE = {
    "SEMBLEND_HOST_BYTES": str(1 << 30),
    "SEMBLEND_MIN_SAVING": "0",
    "SEMBLEND_METRICS": "0",
}


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
    exact = (
        f"largest difference of a token's log-probability from stock SGLang's, all layers computed; float32; {WHERE}"
    )
    rows.add("sglang_exactness", max(seen.found["logprob_difference"]), "nats", exact, 1e-4)
    hits = f"tokens that SGLang's prefix cache served of approximate KV, filled, evicted and asked again; {WHERE}"
    rows.add("sglang_contaminated_hits", sum(seen.found["contaminated_hits"]), "tokens", hits, 0)
    faults = f"before, inside and after forwards with a plan: neighbours unharmed, no wrong token; {WHERE}"
    rows.add("sglang_faults_survived", seen.survived, "kinds", faults, 54, "higher")
    rows.add("sglang_tests_failed", len(seen.failed), "tests", f"of this run; {WHERE}", 0)
    cold, moved = (statistics.median(found) for found in times(folder))
    shared = f"{DOCUMENT} tokens of a document that moved in a prompt of {BEFORE + DOCUMENT + AFTER}"
    beside = f"stock SGLang's time to the first token of the same prompts; {shared}; SmolLM2-135M, float32; {WHERE}"
    rows.add("sglang_shifted_ttft_over_cold", moved / cold, "ratio", beside)
    rows.write(folder / rows.measured.machine["name"], "sglang")


def distances(folder: Path, report: Path, other: Path) -> None:
    """Replace the rows of a quality run by those of `report`: each family's mean KL under policy verified, beside
    that of `other`, the same run in vLLM. Exits with a message if plans offered nothing: that compares cold runs."""
    said, rows = json.loads(report.read_text()), Results([str(folder), report.name, other.name])
    floor, beside = said["rounding_floor"], {}
    for line in json.loads(other.read_text())["lines"]:
        beside[line["arm"], line["family"]] = line["answer_kl"]
    for line in said["lines"]:
        if line["arm"] == "verified":
            theirs = beside["verified", line["family"]]
            if not line["offered"]:
                raise SystemExit(f"no figure: no plan offered tokens in {line['family']}; set a SEMBLEND_MAX_KL it has")
            share = line["recomputed"] / line["offered"]
            found = (
                f"mean KL over cold's own answer, {line['samples']} prompts in {line['groups']} groups, {share:.2f} of "
                f"the offered tokens computed; goal: {theirs:.2g} of the same run in vLLM and twice the rounding floor "
                f"of {floor:.2g}; {said['model']}; {said['command']}; {WHERE}"
            )
            rows.add(f"{DISTANCE}{line['family']}", line["answer_kl"], "nats", found, theirs + 2 * floor)
    path = folder / rows.measured.machine["name"] / "sglang.json"
    kept = [Row(**each) for each in json.loads(path.read_text()) if not each["name"].startswith(DISTANCE)]
    write_rows(path, kept + rows.rows)


def times(folder: Path) -> tuple[list[float], list[float]]:
    """Return seconds to the first token of stock SGLang, then with SemBlend, of the same prompts."""
    draw = random.Random(55)
    document, *rest = (list(_tokens(draw, count)) for count in (DOCUMENT, *[BEFORE + AFTER] * (TIMES + 2)))
    prompts = [[*each[:BEFORE], *document, *each[BEFORE:]] for each in rest]
    model = str(smollm2_folder())
    options = {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 2}
    stock = LocalSglang(model, disable_radix_cache=True, **options)
    cold = [_seconds(stock, each) for each in prompts[1:]]
    stock.close()
    os.environ.update(_REUSE)
    served = LocalSglang(model, radix_cache_backend="semblend", **options)
    _seconds(served, prompts[0])
    settle(served)
    use_check(served, CHECKS["checked"], folder)
    moved = [_seconds(served, each) for each in prompts[1:]]
    assert not served.cache._runtime.faults
    served.close()
    (folder / "profile.json").unlink()
    return cold[1:], moved[1:]  # the first of each takes memory


def _seconds(served: LocalSglang, prompt: list[int]) -> float:
    began = time.perf_counter()
    served.ask(Ask(prompt, {"max_new_tokens": 1}))
    return time.perf_counter() - began


def _tokens(draw: random.Random, count: int) -> Iterator[int]:
    return (draw.randrange(10, 40_000) for _ in range(count))


if __name__ == "__main__":
    folder, *reports = map(Path, sys.argv[1:])
    if reports:
        distances(folder, *reports)
    else:
        main(folder)
