"""Each gate reads the arm and the workloads that it says, and fails only on what it measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from semblend_trt.errors import ConfigurationError
from validation import gates
from validation.audit_log import AuditCounts
from validation.exactness import Exactness
from validation.gates import Gate, GateBounds, gates_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from validation.samples import Sample

    Maker = Callable[..., Sample]

BUSY = AuditCounts(100, 10, 8, 8, 16_000, 15_000, 8)


def gate(name: str, samples: Sequence[Sample], audit: AuditCounts = BUSY, exactness: Exactness | None = None) -> Gate:
    [found] = [g for g in gates_of(samples, audit, "position_fix", GateBounds(), exactness) if g.name == name]
    return found


def test_a_gate_includes_its_bound() -> None:
    assert Gate("g", 1.05, 1.05, "higher", "").holds
    assert not Gate("g", 1.0499, 1.05, "higher", "").holds
    assert Gate("g", 0.02, 0.02, "lower", "").holds
    assert not Gate("g", 0.0201, 0.02, "lower", "").holds
    assert not Gate("g", math.nan, 0.02, "lower", "").holds
    assert Gate("g", None, 1.0, "higher", "").holds


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
    assert gate("unrelated_fires", [quiet]).holds
    fired = make_sample(expects="none", arm="boundary", reused_tokens=64)
    assert gate("unrelated_fires", [quiet, fired]).value == 1
    assert not gate("unrelated_fires", [quiet, fired]).holds
    assert gate("unrelated_fires", [make_sample()]).value is None


@pytest.mark.parametrize(
    "change",
    [{"exact_prefix_tokens": 1984}, {"reused_tokens": 15}, {"answer": "43"}, {"first_token_kl": 0.1}],
)
def test_a_repeat_must_be_served_from_the_exact_prefix_alone(make_sample: Maker, change: dict[str, object]) -> None:
    served = {
        "expects": "exact_prefix",
        "exact_prefix_tokens": 1999,
        "expected_exact_tokens": 1999,
        "reused_tokens": 0,
        "first_token_kl": 0.0,
    }
    exact = make_sample(**served, arm="exact_prefix")
    kept = make_sample(**served)
    assert gate("exact_prefix_untouched", [exact, kept]).value == 1.0
    touched = make_sample(**(served | change), arm="boundary")
    assert gate("exact_prefix_untouched", [exact, kept, touched]).value == 0.5


def test_reuse_beside_an_exact_prefix_is_allowed(make_sample: Maker) -> None:
    exact = make_sample(arm="exact_prefix", exact_prefix_tokens=64, expected_exact_tokens=64)
    assert gates.exact_prefix_untouched([exact]) is None
    ours = make_sample(exact_prefix_tokens=64, expected_exact_tokens=64, reused_tokens=1800)
    assert gates.exact_prefix_untouched([exact, ours]) == 1.0


def test_counts_come_from_the_audit_log(make_sample: Maker) -> None:
    names = (
        "donor_registrations",
        "semantic_hits",
        "materializations",
        "incremental_matched_tokens",
        "rope_corrections",
    )
    assert all(gate(name, [make_sample()]).holds for name in names)
    assert not any(gate(name, [make_sample()], AuditCounts()).holds for name in names)


def test_exactness_is_read_only_where_it_was_measured(make_sample: Maker) -> None:
    assert gate("wrapper_exactness", [make_sample()]).value is None
    assert not gate("wrapper_exactness", [make_sample()], exactness=Exactness(math.inf, "stock")).holds
    assert gate("wrapper_exactness", [make_sample()], exactness=Exactness(1e-5, "stock")).holds
    # An engine's own noise is no fault of ours, and no more than that is allowed.
    assert gate("wrapper_exactness", [make_sample()], exactness=Exactness(0.1, "stock", noise=0.1)).holds
    assert not gate("wrapper_exactness", [make_sample()], exactness=Exactness(0.2, "stock", noise=0.1)).holds


@pytest.mark.parametrize(
    ("bound", "option"),
    [
        ({"min_speedup": -1.0}, "--min-speedup"),
        ({"min_speedup": math.nan}, "--min-speedup"),
        ({"min_speedup": math.inf}, "--min-speedup"),
        ({"min_rouge1": 1.01}, "--min-rouge1"),
        ({"min_token_f1": -0.1}, "--min-token-f1"),
        ({"min_token_f1": math.nan}, "--min-token-f1"),
        ({"min_semantic_hits": -1}, "--min-semantic-hits"),
    ],
)
def test_a_bound_out_of_range_is_refused(bound: dict[str, float], option: str) -> None:
    with pytest.raises(ConfigurationError, match=option):
        GateBounds(**bound)
