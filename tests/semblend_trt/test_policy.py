"""Names of the policies, which of them look for donors, their terms, and what is refused of them."""

import pytest

from semblend_trt.config import Settings, terms_of
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import ReuseTerms, SpanCheck
from semblend_trt.policy import ReusePolicy


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


@pytest.mark.parametrize(
    ("policy", "boundary", "layers", "lowest", "told"),
    [
        (ReusePolicy.BOUNDARY, 0, 24, 1, r"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is 0, outside 1\.\.24"),
        (ReusePolicy.BOUNDARY, 25, 24, 1, r"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is 25, outside 1\.\.24"),
        (ReusePolicy.CACHEBLEND, 0, 1, 1, "layer 1, and this model has 1 layer"),
        (ReusePolicy.CACHEBLEND, 0, 24, 2, "model's layers below 2 see no further than a window"),
    ],
)
def test_terms_that_the_model_has_no_layer_for_are_refused(policy, boundary, layers, lowest, told):
    with pytest.raises(ConfigurationError, match=told):
        terms_of(policy, Settings(recompute_boundary_layer=boundary), layers, lowest)


@pytest.mark.parametrize(
    ("terms", "reason", "expected"),
    [
        (ReuseTerms(), None, 100),
        (ReuseTerms(boundary=2), "boundary_needs_wrapper", 100),
        (ReuseTerms(head_tokens=16), "head_needs_wrapper", 84),
        (ReuseTerms(check=SpanCheck(1, largest_share=0.15)), "check_needs_wrapper", 85),
        (ReuseTerms(boundary=2, check=SpanCheck(1, threshold=0.0)), "check_needs_wrapper", 100),
    ],
)
def test_what_a_stock_engine_cannot_keep_and_the_reuse_that_can_be_counted_on(terms, reason, expected):
    assert (terms.wrapper_reason, terms.expected_reuse(100)) == (reason, expected)
