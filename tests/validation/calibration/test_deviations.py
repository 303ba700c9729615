"""Deviations of the shipped model: small where only the place changed, large where the header did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine_wrapper.embedded.model_runner import ModelRunner
from tests.conftest import save_tiny_model
from validation.calibration.deviations import DeviationCollector, PromptDeviations
from validation.cases import Tokeniser
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import FamilyRequest, write_cases

if TYPE_CHECKING:
    from pathlib import Path


def collected(shipped: EmbeddedEngines, family: str, tokens: int = 640) -> list[PromptDeviations]:
    cases = write_cases(shipped, FamilyRequest((family,), groups=2, questions=2, tokens=tokens))
    collector = DeviationCollector(shipped.runner.model, shipped.facts, min_span=64)
    return [found for found in collector.collect(cases, Tokeniser(shipped, 8).tokenise) if found is not None]


def test_every_layer_of_each_groups_first_prompt_is_compared(shipped: EmbeddedEngines) -> None:
    found = collected(shipped, "reordered")
    assert len(found) == 2
    for prompt in found:
        assert prompt.values.shape == (8, sum(prompt.lengths))
        assert prompt.exact_tokens + sum(prompt.lengths) <= prompt.promised < 640
        # The lowest layer sees the token alone: only the rotation's rounding is left.
        assert prompt.values[0].max() < 1e-4


def test_layers_with_a_window_are_compared_in_every_token(tmp_path: Path) -> None:
    """Each attention of Gemma rotates in its own way: with another's, the lowest layer would deviate."""
    path = save_tiny_model("gemma3_text", tmp_path, max_position_embeddings=2048)
    found = collected(EmbeddedEngines(ModelRunner(path, "float32", "cpu")), "reordered", 1024)
    assert found
    for prompt in found:
        assert prompt.values.shape == (3, sum(prompt.lengths))
        assert prompt.values[0].max() < 1e-4 < prompt.values[2].max()


def test_another_header_deviates_far_more_than_another_place(shipped: EmbeddedEngines) -> None:
    harmless, traps = (
        np.concatenate([prompt.values[2] for prompt in collected(shipped, family)])
        for family in ("reordered", "header_trap")
    )
    assert np.median(traps) > 5 * np.median(harmless)


def test_nothing_is_found_where_nothing_is_shared(shipped: EmbeddedEngines) -> None:
    assert collected(shipped, "unrelated") == []


def test_prompts_of_all_lengths_at_once_deviate_as_each_alone(shipped: EmbeddedEngines) -> None:
    cases = [
        case
        for family, tokens in (("reordered", 640), ("unrelated", 640), ("header_trap", 512), ("planted", 512))
        for case in write_cases(shipped, FamilyRequest((family,), groups=2, questions=1, tokens=tokens))
    ]
    collector = DeviationCollector(shipped.runner.model, shipped.facts, min_span=64)
    tokenise = Tokeniser(shipped, 8).tokenise
    together = collector.collect(cases, tokenise)
    alone = [found for case in cases for found in collector.collect([case], tokenise)]
    assert [found is None for found in together] == [found is None for found in alone]
    assert [found.family for found in together if found] == [found.family for found in alone if found]
    for one, other in zip(together, alone, strict=True):
        if one and other:
            assert (one.lengths, one.exact_tokens, one.promised) == (other.lengths, other.exact_tokens, other.promised)
            np.testing.assert_allclose(one.values, other.values, atol=1e-3)
