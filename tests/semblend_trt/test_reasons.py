"""One table names every reason, with what to do about it."""

import pytest

from semblend_trt.reasons import FAULTS, OTHER_REASON, REASONS, TABLE, Scope, advice, counted_as, filled


@pytest.mark.parametrize("reason", TABLE, ids=lambda reason: f"{reason.scope.value}-{reason.name}")
def test_each_reason_is_a_label_with_whole_sentences(reason):
    assert reason.name.isidentifier()
    assert reason.name == reason.name.lower()
    assert counted_as(reason.name) == reason.name
    assert reason.advice[0].isupper() or reason.advice.startswith("vLLM")
    assert reason.advice.endswith(".")
    assert not set(reason.advice) & set("|\n")
    assert reason.advice == advice(reason.name, reason.scope)


def test_a_name_is_a_reason_or_a_fault():
    assert not REASONS & FAULTS
    assert counted_as("what_nobody_named") == OTHER_REASON


def test_advice_comes_from_the_first_scope_that_has_the_reason():
    assert "--attention-backend" in advice("attention_backend", Scope.VLLM)
    assert "attn_backend" in advice("attention_backend", Scope.ATTACHMENT, Scope.DECODER)
    assert advice("no_donor_match", Scope.ENGINE) == advice("no_donor_match")
    assert advice("what_nobody_named") == ""


def test_a_page_gets_the_table_of_each_scope_that_it_names():
    page = "before\n<!-- reasons: plan -->old<!-- end -->\nbehind\n"
    made = filled(page)
    assert made.startswith("before\n")
    assert made.endswith("behind\n")
    assert "old" not in made
    assert [each.name for each in TABLE if each.scope is Scope.PLAN and f"`{each.name}` |" not in made] == []
    assert filled(made) == made
