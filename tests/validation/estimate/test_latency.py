"""The fitted latency model: known costs are found, bad data refused, extrapolation told."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.errors import ConfigurationError
from validation.estimate.latency import H200_PROFILE, LatencyModel, Observation, recorded_observations


def observations(costs, noise=0.0):
    random = np.random.default_rng(7)
    found = []
    for _ in range(80):
        c, r = int(random.integers(50, 8_000)), int(random.integers(0, 8_000))
        ttft = costs[0] + costs[1] * c + costs[2] * r + costs[3] * c * (r + c / 2)
        found.append(Observation(ttft * float(random.uniform(1 - noise, 1 + noise)), c, r))
    return found


@settings(max_examples=40)
@given(
    st.floats(1.0, 100.0),
    st.floats(0.005, 0.5),
    st.one_of(st.just(0.0), st.floats(1e-3, 1e-2)),
    st.one_of(st.just(0.0), st.floats(1e-6, 1e-5)),
)
def test_known_costs_are_found(intercept, computed, reused, pair):
    model = LatencyModel.fitted(observations((intercept, computed, reused, pair)), "a test")
    found = (model.intercept_ms, model.computed_ms, model.reused_ms, model.pair_ms)
    assert found == pytest.approx((intercept, computed, reused, pair), rel=1e-3, abs=1e-9)


def test_a_cost_below_nothing_is_left_out():
    model = LatencyModel.fitted(observations((20.0, 0.1, -0.001, 0.0), noise=0.2), "a test")
    assert model.reused_ms == 0.0
    assert model.computed_ms == pytest.approx(0.1, rel=0.1)


def test_predictions_beyond_what_was_observed_are_told():
    seen = [Observation(10.0 + n, n, 0) for n in range(100, 200)]
    model = LatencyModel.fitted(seen, "a test")
    computed, reused = np.array([99, 100, 150, 199, 200, 150]), np.array([0, 0, 0, 0, 0, 1])
    assert model.outside(computed, reused).tolist() == [True, False, False, False, True, True]
    assert model.predict(computed, reused) == pytest.approx([109, 110, 160, 209, 210, 160])


@pytest.mark.parametrize(
    "seen",
    [[], [Observation(10.0, 100, 0)] * 50, [Observation(10.0 + n, 100 * n, 0) for n in range(1, 5)]],
    ids=["none", "all alike", "too few"],
)
def test_too_little_to_fit_is_refused(seen):
    with pytest.raises(ConfigurationError, match=r"a test: .* a latency model needs at least 5 and 3"):
        LatencyModel.fitted(seen, "a test")


def test_the_times_that_ship_make_a_close_fit():
    seen = recorded_observations(H200_PROFILE)
    assert {each.computed for each in seen if not each.reused} == {4_096, 8_192, 16_384, 24_576, 32_768}
    reused = [each.computed + each.reused for each in seen if each.reused and not each.is_checked]
    assert sorted(reused) == [4_096, 8_192, 16_384, 24_576, 32_768]
    model = LatencyModel.fitted(seen, "rows")
    predicted = model.predict(*(np.array([getattr(each, name) for each in seen]) for name in ("computed", "reused")))
    for each, ttft in zip(seen, predicted, strict=True):
        assert each.is_checked or ttft == pytest.approx(each.ttft_ms, rel=0.25)


def test_what_a_check_adds_is_no_part_of_the_fit():
    seen = observations((20.0, 0.1, 0.01, 0.0))
    checked = [replace(each, ttft_ms=each.ttft_ms + 0.02 * each.reused, is_checked=True) for each in seen]
    plain, both = LatencyModel.fitted(seen, "a test"), LatencyModel.fitted([*checked, *seen], "a test")
    assert plain.check_ms is None
    assert both.check_ms == pytest.approx(0.02)
    assert replace(both, check_ms=None) == plain


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('[{"ttft_ms": 4}]', "does not hold observations: Field required"),
        ('[{"ttft_ms": 0, "computed": 4, "reused": 0}]', "cannot have been observed"),
        ('[{"ttft_ms": 1, "computed": 0, "reused": 9}]', "cannot have been observed"),
        ('"ttft_ms"', "does not hold observations"),
        (None, "does not hold observations: No such file"),
    ],
)
def test_a_file_without_observations_is_refused(content, sentence, tmp_path):
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=sentence):
        recorded_observations(path)
