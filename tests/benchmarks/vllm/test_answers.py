"""Rows of a quality run inside vLLM, under their own names."""

from argparse import Namespace

import pytest

from benchmarks.vllm.answers import not_offered, renamed
from validation.results import Measured, row


@pytest.mark.parametrize(
    ("kv_dtype", "kept"),
    [
        ("auto", ("vllm_em_vs_cold", "vllm_position_fix_em")),
        ("fp8", ("verified_em_vs_cold_fp8", "position_fix_em_fp8")),
    ],
)
def test_rows_have_the_model_in_their_names_and_bounds_are_left_out(kv_dtype, kept):
    measured = Measured("validation quality", {"name": "card"}, {}, "2026-01-01")
    names = ("verified_em_vs_cold_header_trap", "verified_em_bound_header_trap", "position_fix_em_header_trap")
    rows = [row(name, 0, "x", goal=0, better="higher", baseline="", measured=measured) for name in names]
    found = renamed(rows, "small", Namespace(kv_dtype=kv_dtype, command="the command"))
    assert [each.name for each in found] == [f"{name}_header_trap_small" for name in kept]
    assert {each.command for each in found} == {"the command"}


def test_a_family_in_which_nothing_was_offered_is_found():
    told = (("reordered", "cold", 0), ("reordered", "verified", 900), ("header_trap", "verified", 0))
    lines = [{"family": family, "arm": arm, "offered": offered} for family, arm, offered in told]
    assert not_offered({"lines": lines}) == ["header_trap"]
