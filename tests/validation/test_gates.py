"""Each gate reads the arm and the workloads that it says, and fails only on what it measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from semblend_trt.errors import ConfigurationError
from validation.audit_log import AuditCounts
from validation.exactness import Exactness
from validation.gates import COUNTED, Gate, GateBounds, exact_prefix_untouched, gates_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from validation.samples import Sample

    Maker = Callable[..., Sample]

BUSY = AuditCounts(100, 10, 8, 8, 16_000, 15_000, 8)


def gate(name: str, samples: Sequence[Sample], audit: AuditCounts = BUSY, exactness: Exactness | None = None) -> Gate:
    [found] = [g for g in gates_of(samples, audit, "position_fix", GateBounds(), exactness) if g.name == name]
    return found


@pytest.mark.parametrize(
    ("value", "bound", "better", "holds"),
    [
        (1.05, 1.05, "higher", True),
        (1.0499, 1.05, "higher", False),
        (0.02, 0.02, "lower", True),
        (0.0201, 0.02, "lower", False),
        (math.nan, 0.02, "lower", False),
        (None, 1.0, "higher", True),
    ],
)
def test_a_gate_includes_its_bound(value: float | None, bound: float, better: str, holds: bool) -> None:
    assert Gate("g", value, bound, better, "").holds is holds


def test_a_failed_gate_names_value_and_bound() -> None:
    sentence = Gate("speedup", 0.9, 1.05, "higher", "what it reads").sentence()
    assert sentence == "speedup is 0.9, at least 1.05 is required (what it reads)"


def test_speedup_is_the_median_of_timed_prompts_with_expected_reuse(make_sample: Maker) -> None:
    samples = [make_sample(case_id=str(i), speedup=value) for i, value in enumerate((1.0, 5.0, 2.0))]
    samples += [make_sample(case_id="question", timed=False, speedup=None)]
    samples += [make_sample(case_id="unrelated", expects="none", speedup=0.1)]
    samples += [make_sample(case_id=str(i), arm="boundary", speedup=0.1) for i in range(3)]
    assert gate("speedup", samples).value == 2.0


def test_closeness_is_a_mean_over_the_named_arm(make_sample: Maker) -> None:
    samples = [make_sample(rouge1_cold=0.2, token_f1_cold=0.0), make_sample(rouge1_cold=0.4, token_f1_cold=0.1)]
    assert gate("rouge1", samples).value == pytest.approx(0.3)
    assert not gate("rouge1", samples).holds
    assert not gate("token_f1", samples).holds


def test_exact_match_drop_is_cold_minus_the_arm(make_sample: Maker) -> None:
    samples = [make_sample(arm="cold", exact_match=True) for _ in range(50)]
    samples += [make_sample(exact_match=index > 0) for index in range(50)]
    samples += [make_sample(expects="none", exact_match=False), make_sample(exact_match=None)]
    assert gate("exact_match_drop", samples).value == pytest.approx(0.02)
    assert gate("exact_match_drop", [make_sample(arm="cold", exact_match=None)]).value is None


def test_one_fire_on_an_unrelated_prompt_in_any_reusing_arm_fails(make_sample: Maker) -> None:
    quiet = make_sample(expects="none", reused_tokens=0)
    fired = gate("unrelated_fires", [quiet, make_sample(expects="none", arm="boundary", reused_tokens=64)])
    assert gate("unrelated_fires", [quiet]).holds
    assert (fired.value, fired.holds) == (1, False)
    assert gate("unrelated_fires", [make_sample()]).value is None


@pytest.mark.parametrize(
    "change",
    [{"exact_prefix_tokens": 1984}, {"reused_tokens": 15}, {"answer": "43"}, {"first_token_kl": 0.1}],
)
def test_a_repeat_must_be_served_from_the_exact_prefix_alone(make_sample: Maker, change: dict[str, object]) -> None:
    served = {"expects": "exact_prefix", "reused_tokens": 0, "first_token_kl": 0.0}
    served |= {"exact_prefix_tokens": 1999, "expected_exact_tokens": 1999}
    kept = [make_sample(**served, arm="exact_prefix"), make_sample(**served)]
    assert gate("exact_prefix_untouched", kept).value == 1.0
    touched = make_sample(**(served | change), arm="boundary")
    assert gate("exact_prefix_untouched", [*kept, touched]).value == 0.5


def test_reuse_beside_an_exact_prefix_is_allowed(make_sample: Maker) -> None:
    prefix = {"exact_prefix_tokens": 64, "expected_exact_tokens": 64}
    exact = make_sample(arm="exact_prefix", **prefix)
    assert exact_prefix_untouched([exact]) is None
    assert exact_prefix_untouched([exact, make_sample(**prefix, reused_tokens=1800)]) == 1.0


@pytest.mark.parametrize("name", COUNTED)
def test_counts_come_from_the_audit_log(make_sample: Maker, name: str) -> None:
    assert gate(name, [make_sample()]).holds
    assert not gate(name, [make_sample()], AuditCounts()).holds


@pytest.mark.parametrize(
    ("difference", "noise", "holds"), [(1e-5, 0.0, True), (math.inf, 0.0, False), (0.1, 0.1, True), (0.2, 0.1, False)]
)
def test_exactness_may_differ_by_the_engines_own_noise(
    make_sample: Maker, difference: float, noise: float, holds: bool
) -> None:
    assert gate("wrapper_exactness", [make_sample()]).value is None
    assert gate("wrapper_exactness", [make_sample()], exactness=Exactness(difference, "stock", noise)).holds is holds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("min_speedup", value) for value in (-1.0, math.nan, math.inf)),
        *(("min_rouge1", 1.01), ("min_token_f1", -0.1), ("min_token_f1", math.nan), ("min_semantic_hits", -1)),
    ],
)
def test_a_bound_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match="--" + name.replace("_", "-")):
        GateBounds(**{name: value})
