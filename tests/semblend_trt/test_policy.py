"""Names of the policies, which of them look for donors, their terms, and what is refused of them."""

import pytest

from semblend_trt.config import Settings, terms_of
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import ReuseTerms, SpanCheck
from semblend_trt.policy import ReusePolicy, parse_policy


@pytest.mark.parametrize("text", ["", "on", "exact,off", "x" * 1000])
def test_unknown_policies_name_the_known_ones(text):
    with pytest.raises(ConfigurationError, match="off, exact, verified, boundary, position_fix, epic, cacheblend") as e:
        parse_policy(text)
    assert len(str(e.value)) < 200


@pytest.mark.promise("policies", "`boundary`, `position_fix`, `epic` and `cacheblend` do what they are said to do")
@pytest.mark.parametrize(
    ("policy", "terms"),
    [
        (ReusePolicy.OFF, None),
        (ReusePolicy.EXACT, None),
        (ReusePolicy.VERIFIED, None),
        (ReusePolicy.POSITION_FIX, ReuseTerms()),
        (ReusePolicy.BOUNDARY, ReuseTerms(boundary=3)),
        (ReusePolicy.EPIC, ReuseTerms(head_tokens=24)),
        (ReusePolicy.CACHEBLEND, ReuseTerms(check=SpanCheck(layer=1, largest_share=0.3))),
    ],
)
def test_the_terms_of_a_policy(policy, terms):
    settings = Settings(recompute_boundary_layer=3, epic_tokens=24, cacheblend_share=0.3)
    assert terms_of(policy, settings, 24) == terms


@pytest.mark.parametrize("boundary", [0, 25])
def test_boundary_outside_the_model_is_refused(boundary):
    with pytest.raises(ConfigurationError, match=rf"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is {boundary}, outside 1\.\.24"):
        terms_of(ReusePolicy.BOUNDARY, Settings(recompute_boundary_layer=boundary), 24)


def test_cacheblend_needs_the_layer_it_chooses_by():
    assert terms_of(ReusePolicy.CACHEBLEND, Settings(), 2) is not None
    with pytest.raises(ConfigurationError, match="layer 1, and this model has 1 layer"):
        terms_of(ReusePolicy.CACHEBLEND, Settings(), 1)
    with pytest.raises(ConfigurationError, match="model's layers below 2 see no further than a window"):
        terms_of(ReusePolicy.CACHEBLEND, Settings(), 24, lowest_check_layer=2)


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        (ReuseTerms(), None),
        (ReuseTerms(boundary=2), "boundary_needs_wrapper"),
        (ReuseTerms(head_tokens=1), "head_needs_wrapper"),
        (ReuseTerms(boundary=2, check=SpanCheck(1, threshold=0.1)), "check_needs_wrapper"),
    ],
)
def test_what_a_stock_engine_cannot_keep(terms, reason):
    assert terms.wrapper_reason == reason


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (ReuseTerms(), 100),
        (ReuseTerms(boundary=5), 100),
        (ReuseTerms(head_tokens=16), 84),
        (ReuseTerms(check=SpanCheck(1, largest_share=0.15)), 85),
        (ReuseTerms(check=SpanCheck(1, threshold=0.0)), 100),
    ],
)
def test_reuse_that_can_be_counted_on(terms, expected):
    assert terms.expected_reuse(100) == expected
