"""Time to first token of a checked plan in which nothing deviates, against a cold prefill, and where it goes.

`python -m benchmarks.embedded.verified` makes a random model and measures everything in one run. `--layers` is a dry
run with a narrow model, which needs no card.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from benchmarks.embedded.bench_model import (
    CHECKED_PARTS,
    GOAL_SIZE,
    NEW_TOKENS,
    WARM_UPS,
    Bench,
    CheckedStopwatch,
    hit,
    label,
    run_model,
    ttft_ms,
)
from engine_wrapper.embedded.llm_args import LlmArgs
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import SpanCheck
from validation.calibration.search import SAMPLE_EVERY

if TYPE_CHECKING:
    from engine_wrapper.embedded.llm import LLM
    from semblend_trt.plan import SemanticKvPlan
    from validation.results import Results

VERIFIED_OVER_COLD, SAMPLED_OVER_COLD, RAG_OVER_COLD = 0.13, 0.027, 0.08
# Documents of a retrieval prompt, and of the store that they come from, and tokens of each.
SHOWN, HELD, DOCUMENT = 8, 24, 1_024
CHECK_LAYER = 2
DONORS = 3
# Above every deviation, and finite as a threshold must be.
KEEP_ALL = 1e30


def run(bench: Bench, rows: Results, size: int, check_layer: int) -> None:
    """Measures all rows, the baseline first. Raises ConfigurationError for a layer that the model does not have."""
    layers = bench.runner.facts.num_layers
    if not 0 <= check_layer < layers:
        raise ConfigurationError(f"--check-layer {check_layer} is outside 0..{layers - 1}")
    check = SpanCheck(check_layer, KEEP_ALL)
    variables = bench.donors_in("DEVICE", DONORS)
    each = min(DOCUMENT, (size - NEW_TOKENS) // SHOWN)
    with bench.engine() as plain:
        cold = bench.cold(plain, size)
        cold_retrieval = bench.cold(plain, SHOWN * each + NEW_TOKENS)
    with bench.engine(variables) as llm:
        check_every_plan(llm, check)
        llm.executor.model_runner.warm_up()
        found = bench.hits(llm, size, CheckedStopwatch, CHECKED_PARTS)
    at_once = min(LlmArgs.model_fields["max_num_tokens"].default, size // 3)
    with bench.engine(variables, max_num_tokens=at_once) as llm:
        check_every_plan(llm, check)
        in_parts = bench.hits(llm, size)
    sampled_check = replace(check, sample_every=SAMPLE_EVERY, sample_threshold=KEEP_ALL)
    with bench.engine(variables) as llm:
        check_every_plan(llm, sampled_check)
        llm.executor.model_runner.warm_up()
        sampled = bench.hits(llm, size)
        retrieval = retrieval_ms(bench, llm, each)
    name = label(size)
    rows.add(f"verified_cold_ttft_{name}_ms", cold, "ms", "the engine without connector")
    kept = "random weights give other KV at other positions, so the threshold of 1e30 keeps all that deviates"
    baseline = f"{found.ttft:,.2f} ms over cold {cold:,.1f} ms; check layer {check_layer} of {layers}; {kept}"
    rows.add(f"verified_over_cold_{name}", found.ttft / cold, "x", baseline, VERIFIED_OVER_COLD)
    rows.add(f"verified_ttft_{name}_ms", found.ttft, "ms", f"cold {cold:,.1f} ms; {found.sentence()}")
    baseline = f"the same, but at most {at_once} tokens in a forward; cold in one forward {cold:,.1f} ms"
    rows.add(f"verified_ttft_{name}_in_parts_ms", in_parts.ttft, "ms", baseline)
    baseline = f"{sampled.ttft:,.2f} ms over cold {cold:,.1f} ms; one token in {SAMPLE_EVERY} is compared, all are kept"
    rows.add(f"verified_sampled_over_cold_{name}", sampled.ttft / cold, "x", baseline, SAMPLED_OVER_COLD)
    rows.add(f"verified_sampled_ttft_{name}_ms", sampled.ttft, "ms", f"cold {cold:,.1f} ms; {sampled.sentence()}")
    baseline = f"{retrieval:,.2f} ms over cold {cold_retrieval:,.1f} ms; {SHOWN} documents of {each} tokens out of "
    baseline += f"{HELD}, in random order; one token in {SAMPLE_EVERY} is compared, all are kept"
    rows.add(f"verified_over_cold_{label(SHOWN * each)}_rag", retrieval / cold_retrieval, "x", baseline, RAG_OVER_COLD)
    rows.add(f"verified_ttft_{name}_worst_ms", max(found.times), "ms", "slowest of the runs")
    rows.add(f"verified_ttft_{name}_first_ms", found.first, "ms", "the first prompt of this size")
    found.add_split(rows, f"verified_{name}")


def retrieval_ms(bench: Bench, llm: LLM, each: int) -> float:
    """Median time to the first token of prompts of SHOWN documents of `each` tokens out of HELD, in random order."""
    documents, chance, times = [bench.prompts.fresh(each) for _ in range(HELD)], random.Random(0), []
    for first in range(0, HELD, SHOWN):
        ttft_ms(llm, bench.prompts.shifted([*chain(*documents[first : first + SHOWN])]))
    for _ in range(WARM_UPS + bench.repeats):
        prompt = bench.prompts.shifted([*chain(*chance.sample(documents, SHOWN))])
        times.append(hit(llm, prompt, SHOWN * each)[0])
    return statistics.median(times[WARM_UPS:])


def check_every_plan(llm: LLM, check: SpanCheck) -> None:
    """Gives every plan a check without a reuse profile, as random weights cannot be calibrated."""
    runner = llm.executor.model_runner
    take = runner.plan_source
    assert take is not None

    def take_checked(request_id: int) -> SemanticKvPlan | None:
        plan = take(request_id)
        return plan and replace(plan, execution=replace(plan.execution, check=check))

    runner.plan_source = take_checked


_SETTINGS = {"size": (GOAL_SIZE, "tokens of the prompts"), "check_layer": (CHECK_LAYER, "layer of the comparison")}
main = partial(run_model, "verified", __doc__, run, "--layers 4 --size 768", _SETTINGS)


if __name__ == "__main__":
    main()
