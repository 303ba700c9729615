"""Layers are grouped by what they attend to and rotate by; each is in one group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, MistralConfig, Qwen2Config
from transformers.masking_utils import sliding_window_overlay

from kernels.rope import LayerRotations, RopeRotation, still
from semblend_trt.connector.attention_layout import LayerGroup, layer_groups
from semblend_trt.connector.model_facts import ModelFacts
from semblend_trt.errors import UnsupportedModelError

FAST, SLOW = RopeRotation((1.0, 0.5), 4), RopeRotation((0.1, 0.05), 4)
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "max_position_embeddings": 4096}


def facts_of(groups, layers=3):
    return ModelFacts("qwen2", layers, 4, 2, 16, 4096, tuple(groups), {}, None, "")


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MistralConfig(**SIZES, sliding_window=None), [None] * 4),
        (MistralConfig(**SIZES, sliding_window=512), [512] * 4),
        (MistralConfig(**SIZES, sliding_window=4096), [None] * 4),
        (
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=512, max_window_layers=1),
            [None, 512, 512, 512],
        ),
        (Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=512), [None] * 4),
        (
            Gemma3TextConfig(num_hidden_layers=7, max_position_embeddings=4096, sliding_window=64),
            [64, 64, 64, 64, 64, None, 64],
        ),
    ],
)
def test_windows_are_those_of_the_configuration(config, windows):
    groups = layer_groups(config, [FAST] * config.num_hidden_layers)
    assert list(facts_of(groups, config.num_hidden_layers).windows) == windows
    assert all(group.attention == ("full" if group.window is None else "window") for group in groups)


def test_a_window_counts_the_token_itself():
    sees = sliding_window_overlay(5)
    seen = [bool(sees(0, 0, torch.tensor(9), torch.tensor(other))) for other in range(10)]
    assert sum(seen) == 5
    assert seen[9]


def test_a_chunk_is_as_long_as_the_models_and_one_of_all_positions_is_full_attention():
    types = ["chunked_attention", "full_attention", "sliding_attention"]
    config = SimpleNamespace(num_hidden_layers=3, max_position_embeddings=256, sliding_window=32, layer_types=types)
    config.attention_chunk_size = 64
    facts = facts_of(layer_groups(config, [FAST] * 3))
    assert (facts.chunks, facts.windows, facts.lowest_check_layer) == ((64, None, None), (None, None, 32), 2)
    assert facts_of([LayerGroup((0, 1, 2), "window", 32, FAST)]).lowest_check_layer == 3
    config.attention_chunk_size = 256
    assert [group.attention for group in layer_groups(config, [FAST] * 3)] == ["full", "window"]


def test_layers_that_attend_and_rotate_alike_are_one_group():
    types = ["sliding_attention", "full_attention", "full_attention"]
    config = SimpleNamespace(num_hidden_layers=3, max_position_embeddings=4096, sliding_window=64, layer_types=types)
    groups = layer_groups(config, [SLOW, FAST, still(4)])
    assert groups == (
        LayerGroup((0,), "window", 64, SLOW),
        LayerGroup((1,), "full", None, FAST),
        LayerGroup((2,), "full", None, still(4)),
    )
    rotation = facts_of(groups[::-1]).rotation
    assert isinstance(rotation, LayerRotations)
    assert [rotation.of_layer(layer) for layer in range(3)] == [SLOW, FAST, still(4)]
    assert facts_of(layer_groups(config, [FAST] * 3)).rotation is FAST


@pytest.mark.parametrize(
    ("types", "told"),
    [
        (["full_attention", "linear_attention"], r"layer types \['linear_attention'\] are not among full_attention"),
        (["full_attention"], "1 layer types are named for 2 layers"),
    ],
)
def test_layers_that_are_not_known_are_refused(types, told):
    config = SimpleNamespace(num_hidden_layers=2, max_position_embeddings=64, layer_types=types)
    with pytest.raises(UnsupportedModelError, match=told) as refused:
        layer_groups(config, [FAST] * 2)
    assert refused.value.reason == "attention_layout"


@pytest.mark.parametrize("held", [[(0, 1)], [(0, 1), (1, 2)], [(0, 1), (2, 3)], []])
def test_each_layer_must_be_in_one_group(held):
    with pytest.raises(UnsupportedModelError, match=r"hold layers \[.*\]; each of 0\.\.2 is needed once") as refused:
        facts_of(LayerGroup(layers, "full", None, FAST) for layers in held)
    assert refused.value.reason == "attention_layout"
