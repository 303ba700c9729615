"""`python -m benchmarks.sglang.record FOLDER`, in the environment of `make sglang-env`, records SGLang's time to the
first token. With two more arguments, the JSON that `python -m validation quality --engine sglang` wrote and that of the
same run with `--engine vllm`, it records how far answers are from cold ones in both.

Other rows of the file stay. Times are of SmolLM2 on this CPU, where SGLang has neither its kernels nor its own torch:
they compare two prefills in one process, and say nothing of a card."""

import json
import os
import random
import statistics
import sys
from pathlib import Path

from benchmarks.program import seconds
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from validation.models import smollm2_folder
from validation.results import Results, rows_of, write_rows
from validation.sglang_engine import Ask, LocalSglang

WHERE = "inside SGLang 0.5.23 on a CPU, beside torch 2.13 and stand-ins for its kernels"
DISTANCE = "sglang_kl_vs_cold_"
# Tokens of the shared document, before it and after it; prompts that are timed.
DOCUMENT, BEFORE, AFTER, TIMES = 960, 32, 32, 5
_REUSE = {
    "SEMBLEND_HOST_BYTES": str(1 << 30),
    "SEMBLEND_MIN_SAVING": "0",
    "SEMBLEND_METRICS": "0",
    "SEMBLEND_PROFILE_TRIAL": "1",
}


def add_times(rows: Results, folder: Path) -> None:
    """Add the row of times."""
    cold, moved = (statistics.median(found) for found in times(folder))
    shared = f"{DOCUMENT} tokens of a document that moved in a prompt of {BEFORE + DOCUMENT + AFTER}"
    beside = f"stock SGLang's time to the first token of the same prompts; {shared}; SmolLM2-135M, float32; {WHERE}"
    rows.add("sglang_shifted_ttft_over_cold", moved / cold, "ratio", beside)


def add_distances(rows: Results, report: Path, other: Path) -> None:
    """Add each family's mean KL under policy verified in `report`, beside that of `other`, the same run in vLLM. Exits
    with a message if plans offered nothing: that compares cold runs."""
    said = json.loads(report.read_text())
    floor, lines = said["rounding_floor"], json.loads(other.read_text())["lines"]
    beside = {(line["arm"], line["family"]): line["answer_kl"] for line in lines}
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


def times(folder: Path) -> tuple[list[float], list[float]]:
    """Return seconds to the first token of stock SGLang, then with SemBlend, of the same prompts."""
    draw = random.Random(55)
    lengths = DOCUMENT, *[BEFORE + AFTER] * (TIMES + 2)
    document, *rest = ([draw.randrange(10, 40_000) for _ in range(length)] for length in lengths)
    prompts = [[*each[:BEFORE], *document, *each[BEFORE:]] for each in rest]
    model = str(smollm2_folder())
    options = {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 2}
    stock = LocalSglang(model, disable_radix_cache=True, **options)
    asked = [Ask(each, {"max_new_tokens": 1}) for each in prompts]
    cold = [seconds(stock.ask, each) for each in asked[1:]]
    stock.close()
    profile = folder / "profile.json"
    os.environ.update(_REUSE, SEMBLEND_PROFILE=str(profile))
    served = LocalSglang(model, radix_cache_backend="semblend", **options)
    namespace, geometry = served.cache._scheduler.namespace, served.cache._runtime.pool.geometry
    check = ProfileCheck(layer=2, threshold=1.0)
    ReuseProfile.made_for(namespace, geometry, policy="verified", check=check).write(profile)
    served.close()
    served = LocalSglang(model, radix_cache_backend="semblend", **options)
    served.ask(asked[0])
    served.cache._worker._worker.saver.drain()
    moved = [seconds(served.ask, each) for each in asked[1:]]
    assert not served.cache._runtime.faults
    served.close()
    profile.unlink()
    return cold[1:], moved[1:]  # the first of each takes memory


def main(folder: Path, *reports: Path) -> None:
    """Record the times, or the distances of two `reports`, in the place of earlier ones."""
    rows = Results([str(folder), *(each.name for each in reports)])
    if reports:
        add_distances(rows, *reports)
    else:
        add_times(rows, folder)
    path = folder / rows.measured.machine["name"] / "sglang.json"
    own = DISTANCE if reports else "sglang_shifted_ttft_over_cold"
    earlier = rows_of(path) if path.exists() else []
    write_rows(path, [each for each in earlier if not each.name.startswith(own)] + rows.rows)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
