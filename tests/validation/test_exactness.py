"""The wrapper computes what the plain model computes, and the comparison sees it when it does not."""

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch

from engine_wrapper import token_schedule
from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.errors import ConfigurationError, SemBlendError
from tests.random_models import FAMILIES, MIXTURES
from validation.embedded_engine import EmbeddedEngines
from validation.exactness import plain_difference, stock_difference
from validation.report import MAX_LOGIT_DIFFERENCE


def random_tokens(count):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@patch.multiple("validation.exactness", MAX_TOKENS=256, _ANSWER_TOKENS=4)
def within_an_engine(path, tokens, min_span=32, kv_dtype="auto"):
    engines = EmbeddedEngines(ModelRunner(path, "float32", "cpu"), kv_dtype)
    return stock_difference(engines, str(path), "ours", tokens, min_span)


@pytest.mark.promise("engines", "Without reuse the wrapper's forward equals the plain Hugging Face forward")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(tiny_model_paths, family):
    runner = ModelRunner(tiny_model_paths[family], "float32", "cpu")
    assert plain_difference(runner, random_tokens(333)).difference <= MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [*product(("qwen2", "deepseek_v3"), ("auto", "fp8")), *((each, "auto") for each in MIXTURES)],
)
def test_the_wrapper_is_exact_within_an_engine(tiny_model_paths, family, kv_dtype):
    """In fp8 the engine itself rounds some numbers otherwise in other chunks, which is noise."""
    found = within_an_engine(tiny_model_paths[family], random_tokens(150), kv_dtype=kv_dtype)
    assert found.against == "ours without the wrapper"
    assert max(found.difference, found.noise if kv_dtype == "auto" else 0.0) <= MAX_LOGIT_DIFFERENCE


def test_a_boundary_one_layer_too_low_is_seen(tiny_qwen2_path, monkeypatch):
    original = token_schedule._work_of

    def work_of(part, *options):
        """Promised rows are dropped a layer too early."""
        work = original(part, *options)
        if part.plan is None:
            return work
        promised = np.arange(len(work.positions)) < len(work.positions) - len(part.token_ids)
        return replace(work, drops_at=work.drops_at - promised)

    monkeypatch.setattr(token_schedule, "_work_of", work_of)
    runner = ModelRunner(tiny_qwen2_path, "float32", "cpu")
    assert plain_difference(runner, random_tokens(200)).difference > 100 * MAX_LOGIT_DIFFERENCE
    assert within_an_engine(tiny_qwen2_path, random_tokens(150)).difference > 10 * MAX_LOGIT_DIFFERENCE


def test_what_shows_nothing_is_refused(tiny_qwen2_path):
    with pytest.raises(ConfigurationError, match="at least 4"):
        plain_difference(ModelRunner(tiny_qwen2_path, "float32", "cpu"), [1, 2, 3])
    with pytest.raises(SemBlendError, match=r"executes no plan \(no_donor_match\)"):
        within_an_engine(tiny_qwen2_path, list(range(200)), min_span=200)
