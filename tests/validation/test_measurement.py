"""Prefixes that are expected to be exact, and answers along cold's own."""

from dataclasses import replace

import pytest

from validation.arms import COLD, COLD_AGAIN, EXACT_PREFIX, POSITION_FIX, ArmChoices, arms_of
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import BatchServer, Measurement, ServingSettings
from validation.models import shipped_model

[MOVED] = arms_of([POSITION_FIX], ArmChoices(8, boundary=1))


@pytest.mark.parametrize("unit", [1, 32])
def test_an_exact_prefix_is_expected_in_whole_units_of_the_engine(shipped, unit):
    """Of a token that all prompts begin with an engine that keeps whole blocks reuses nothing."""
    engines = EmbeddedEngines(shipped.runner)
    engines.prefix_unit = unit
    cases = write_cases(engines, FamilyRequest(("reordered",), groups=1, questions=2, tokens=512))
    arms = arms_of([COLD, EXACT_PREFIX, POSITION_FIX], ArmChoices(8, boundary=1))
    samples, _ = Measurement(engines, cases, ServingSettings(str(shipped_model()), max_tokens=4), arms).run()
    expected = [sample.expected_exact_tokens for sample in samples if sample.arm == POSITION_FIX]
    assert any(expected) == (unit == 1)


def test_arms_are_forced_along_colds_own_answer(shipped):
    cases = write_cases(shipped, FamilyRequest(("header_trap", "prose"), groups=1, questions=1, tokens=640))
    server = BatchServer(shipped, cases, ServingSettings(str(shipped_model()), max_tokens=6))
    arms = arms_of([COLD, COLD_AGAIN, POSITION_FIX], ArmChoices(8, boundary=1))
    cold, again, moved = ({sample.case_id: sample for sample in server.samples(arm)} for arm in arms)
    for name, sample in moved.items():
        assert cold[name].answer_kl < 1e-6
        assert again[name].answer_kl < 1e-6
        assert sample.answer_kl >= 0.0
        assert sample.loss is not None
        assert sample.answer_tokens == cold[name].answer_tokens
        # An answer is another one exactly if one of its likeliest tokens is.
        assert (sample.answer != cold[name].answer) <= (sample.token_agreement < 1.0)
    trap = [name for name in moved if "trap" in name]
    assert max(moved[name].answer_kl for name in trap) > 0.1


def test_a_group_of_an_isolated_arm_finds_its_own_donors_only(shipped):
    [own] = write_cases(shipped, FamilyRequest(("reordered",), groups=1, questions=1, tokens=512))
    cases = [own, replace(own, id="bare", group="bare", donors=())]
    server = BatchServer(shipped, cases, ServingSettings(str(shipped_model()), max_tokens=2))
    for isolated in (False, True):
        first, bare = server.samples(replace(MOVED, isolated=isolated))
        assert (first.reused_tokens > 100, bare.reused_tokens > 100) == (True, not isolated)
