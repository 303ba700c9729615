"""The result rows of an end-to-end run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.results import Measured, Results, Row
from validation.arms import COLD, POSITION_FIX, VERIFIED
from validation.gates import MAX_LOGIT_DIFFERENCE, exact_match_drop, unrelated_fires
from validation.metrics import mean, median
from validation.quality.rows import HEADER_TRAP
from validation.workloads import HARMLESS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.exactness import Exactness
    from validation.samples import Sample

FILE_NAME = "end_to_end.json"
MIN_SPEEDUP = 1.05
MAX_EM_DROP = 0.02
TIMED_SIZES = ("2k", "4k")


def end_to_end_rows(
    samples: Sequence[Sample], exactness: Exactness | None, device: str, measured: Measured, engine: str = ""
) -> list[Row]:
    """Rows of the built-in workloads, of the arms position_fix and verified; what was not measured gets no row.

    Names begin with `engine`, such as `vllm_`, and then with the kind of device, `cpu` or `gpu`, except for the
    wrapper's exactness.
    """
    kind = engine + ("gpu" if device.startswith("cuda") else "cpu")
    results = Results(measured=measured, is_shown=False)
    for name, arm in ((f"{kind}_shifted", POSITION_FIX), (f"{kind}_verified", VERIFIED)):
        for size in TIMED_SIZES:
            _add_speedup(results, f"{name}_{size}_ttft_speedup", arm, size, samples)
    _add_exact_match(results, f"{kind}_harmless_em_drop", POSITION_FIX, HARMLESS, samples)
    _add_exact_match(results, f"{kind}_verified_em_drop", VERIFIED, (*HARMLESS, HEADER_TRAP), samples)
    trap = [s for s in samples if s.workload == HEADER_TRAP]
    cold, ours = _exact_match(trap, COLD), _exact_match(trap, POSITION_FIX)
    if cold is not None and ours is not None:
        # Reuse without a check has to fail on the trap, or the trap shows nothing.
        baseline = f"cold: {cold:.3f}; the trap has to bite"
        results.add(f"{kind}_trap_position_fix_em", ours, "exact match", baseline, cold / 2)
    if (fires := unrelated_fires(samples)) is not None:
        prompts = len({(s.case_id, s.repeat) for s in samples if s.expects == "none"})
        baseline = f"{prompts} unrelated prompts in each reusing arm"
        results.add(f"{kind}_unrelated_fires", fires, "requests", baseline, 0)
    if exactness is not None:
        goal = max(MAX_LOGIT_DIFFERENCE, exactness.noise)
        name = f"{engine}wrapper_exactness_max_logit_diff"
        results.add(name, exactness.difference, "logits", exactness.against, goal)
    return results.rows


def _add_speedup(results: Results, name: str, arm: str, size: str, samples: Sequence[Sample]) -> None:
    shifted = [s for s in samples if s.workload in HARMLESS and s.size == size and s.timed]
    ours = [s for s in shifted if s.arm == arm]
    speedup = median([s.speedup for s in ours if s.speedup is not None])
    cold = median([s.ttft_s for s in shifted if s.arm == COLD])
    prompt, computed = mean([s.prompt_tokens for s in ours]), mean([s.computed_tokens for s in ours])
    if speedup is not None and cold is not None and prompt is not None and computed is not None:
        baseline = f"cold: {cold * 1e3:,.0f} ms for {prompt:,.0f} tokens, of which {arm} computes {computed:,.0f}"
        results.add(name, speedup, "x", baseline, MIN_SPEEDUP, "higher")


def _add_exact_match(
    results: Results, name: str, arm: str, workloads: Sequence[str], samples: Sequence[Sample]
) -> None:
    chosen = [s for s in samples if s.workload in workloads]
    drop, cold = exact_match_drop(chosen, arm), _exact_match(chosen, COLD)
    if drop is not None and cold is not None:
        answers = sum(s.arm == COLD and s.exact_match is not None for s in chosen)
        results.add(name, drop, "exact match", f"cold: {cold:.3f} of {answers} answers", MAX_EM_DROP)


def _exact_match(samples: Sequence[Sample], arm: str) -> float | None:
    return mean([float(s.exact_match) for s in samples if s.arm == arm and s.exact_match is not None])
