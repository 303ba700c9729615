"""Bounds hold on later prompts as often as they promise, and give nothing where the deviation says nothing."""

import numpy as np
import pytest

from validation.calibration.bound import (
    SHARES,
    Broken,
    Observation,
    bounds_of,
    broken_of,
    correlation,
    groups_needed,
    missing_groups,
    tables_of,
    what_if,
)

RISK = 0.1


def prompts(rng, groups, slope=1.0, families=("order", "edit"), level=-1.0):
    """KL rises with the deviation by `slope`, in logarithms, and falls with the computed share."""
    found = []
    for number, family in enumerate(families):
        for group in range(groups):
            deviation = np.exp(rng.normal(-3.5 + 0.5 * number, 0.8))
            noise = 0.7 * rng.standard_t(5) + level
            kl = tuple(float(np.exp(slope * np.log(deviation) + noise - 5.0 * share)) for share in SHARES)
            found.append(Observation(family, f"{family}-{group}", float(deviation), kl))
    return found


def bound(rng, groups=60, max_kl=0.01, risk=RISK, **changes):
    fit, test = (prompts(rng, groups, **changes) for _ in range(2))
    return bounds_of(fit, test, SHARES, [max_kl], risk)[0]


@pytest.mark.promise(
    "policies",
    "A bound's risk is broken no more often than its confidence allows, and where a deviation says nothing all is "
    "computed",
)
def test_the_promised_risk_is_broken_no_more_often_than_the_confidence_allows():
    rng = np.random.default_rng(0)
    broken, shares = 0, []
    for _ in range(60):
        found = bound(rng)
        later = what_if(prompts(rng, 600), SHARES, found.levels, found.max_kl)
        broken += any(each.misses > RISK * each.groups for each in later.values())
        shares += [each.share for each in later.values()]
    # Three are expected at most; eight would be seen in one of a hundred.
    assert broken <= 8
    # Yet most is reused: a bound that computes all would hold, too.
    assert np.mean(shares) < 0.6


@pytest.mark.promise("policies", "A bound's risk is broken no...")
@pytest.mark.parametrize(("slope", "level"), [(0.0, 1.0), (1.0, 9.0)], ids=["a useless score", "nothing holds"])
def test_where_no_table_holds_all_is_computed(slope, level):
    found = bound(np.random.default_rng(1), slope=slope, level=level)
    later = what_if(prompts(np.random.default_rng(2), 50), SHARES, found.levels, found.max_kl)
    assert {each.share for each in later.values()} == {1.0}
    assert {each.misses for each in later.values()} == {0}


def test_tables_are_nested_and_a_profile_can_hold_each():
    observed = prompts(np.random.default_rng(4), 80)
    tables, largest = tables_of(observed, SHARES), max(each.deviation for each in observed)
    at = np.geomspace(1e-4, 2 * largest, 50)
    shares = [[next((level.share for level in table if x <= level.deviation), 1.0) for x in at] for table in tables]
    assert len(tables) > 10
    assert (np.diff(shares, axis=0) <= 0).all()
    assert (np.diff(shares, axis=1) >= 0).all()
    # What deviates more than all that was seen is computed.
    assert {row[-1] for row in shares} == {1.0}


@pytest.mark.parametrize("deviation", [np.nan, np.inf, 1e9])
def test_an_unknown_deviation_computes_whole_and_an_unknown_kl_is_over_every_bound(deviation):
    rng = np.random.default_rng(5)
    found = bound(rng, max_kl=0.1)
    strange = Observation("order", "x", deviation, (np.nan,) * len(SHARES))
    assert what_if([strange], SHARES, found.levels, 0.1) == {"order": Broken(0, 1, 1.0)}
    small = Observation("order", "x", 1e-9, (np.nan,) * len(SHARES))
    assert what_if([small], SHARES, found.levels, 0.1)["order"].misses == 1
    fit = [*prompts(rng, 60), strange, small]
    assert all(np.isfinite(level.deviation) for table in tables_of(fit, SHARES) for level in table)


def test_the_worst_prompt_of_a_group_counts_for_it(make_sample):
    cases = [("g", 0.001), ("g", 0.2), ("h", 0.001), ("i", None)]
    samples = [make_sample(group=group, answer_kl=kl, sampled_tokens=9) for group, kl in cases]
    [found] = broken_of(samples, 0.01).values()
    assert (found.misses, found.groups) == (2, 3)
    # A prompt of which no check compared anything had nothing to move.
    assert broken_of([make_sample(answer_kl=1.0, sampled_tokens=0, checked_tokens=0)], 0.01) == {}


@pytest.mark.parametrize(
    ("misses", "groups", "lower", "upper"),
    [(0, 59, 0.0, 0.0495), (1, 93, 0.00055, 0.05), (5, 5, 0.5493, 1.0), (3, 20, 0.0422, 0.3437)],
)
def test_limits_are_those_of_clopper_and_pearson(misses, groups, lower, upper):
    found = Broken(misses, groups)
    assert (found.lower, found.upper) == pytest.approx((lower, upper), abs=6e-5)


def test_how_many_groups_are_missing():
    assert [groups_needed(risk) for risk in (0.05, 0.1, 0.4)] == [59, 29, 6]
    assert missing_groups({"order": 59, "log": 20}, 0.05) == {"log": 39}
    # Fewer show nothing, whatever they are like.
    assert Broken(0, 58).upper > 0.05 >= Broken(0, 59).upper


def test_the_correlation_is_of_logarithms():
    x = np.geomspace(1e-2, 1.0, 20)
    assert correlation(x, x**2) == pytest.approx(1.0)
    assert correlation(x, [0.1] * 20) == correlation([], []) == -1.0
