"""Every family has its row, and a rotation that is not the model's shows in it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.evidence import families
from semblend_trt.connector.model_facts import model_facts
from tests.benchmarks.dry_runs import dry_rows
from tests.conftest import FAMILIES
from validation.report import MAX_LOGIT_DIFFERENCE

if TYPE_CHECKING:
    from pathlib import Path

    from semblend_trt.connector.model_facts import ModelFacts


def test_rows_are_named_after_the_families(tmp_path: Path) -> None:
    rows = dry_rows(families, tmp_path, "--most", "2")
    assert list(rows) == [f"exactness_{family}" for family in FAMILIES[:2]]
    assert max(row.value for row in rows.values()) <= MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(family: str) -> None:
    assert families.largest_difference(family) <= MAX_LOGIT_DIFFERENCE


def test_a_window_reaches_as_far_into_a_moved_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one computed token fewer in front, a token of the run is kept that the window does not show alone."""
    assert families._moved("gpt_oss") == (2, (f"epic_{families.WINDOW - 1}",), {})
    monkeypatch.setattr(families, "_moved", lambda _: (2, (f"epic_{families.WINDOW - 2}",), {}))
    assert families.largest_difference("gpt_oss") > 100 * MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize(
    ("family", "layer"), [("glm4_moe", 0), ("gemma3_text", 0), ("gemma3_text", 1), ("llama4_text", 0)]
)
def test_a_wrong_rotation_of_one_layer_shows_behind_a_moved_run(
    monkeypatch: pytest.MonkeyPatch, family: str, layer: int
) -> None:
    def slower(*arguments: object) -> ModelFacts:
        facts = model_facts(*arguments)  # type: ignore[arg-type]
        groups = list(facts.groups)
        index = next(index for index, group in enumerate(groups) if layer in group.layers)
        own = groups[index].rotation
        wrong = replace(own, inverse_frequencies=tuple(each * 0.99 for each in own.inverse_frequencies))
        groups[index] = replace(groups[index], rotation=wrong)
        return replace(facts, groups=tuple(groups))

    monkeypatch.setattr("semblend_trt.connector.eligibility.model_facts", slower)
    assert families.largest_difference(family) > 100 * MAX_LOGIT_DIFFERENCE
