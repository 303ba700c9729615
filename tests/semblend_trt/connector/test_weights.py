"""Writes to a model's weights are noticed, whatever way they come."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from semblend_trt.connector.weights import Weights, weights_digest
from semblend_trt.namespace import is_unknown

PLACE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, dtype=dtype), nn.Linear(5, 3, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("table", torch.arange(7, dtype=torch.uint8), persistent=False)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def model(request):
    torch.manual_seed(3)
    blocks = nn.Sequential(*(Block(torch.float32) for _ in range(3)))
    for each in blocks.parameters():
        each.data = each.data.to(request.param)
        each.requires_grad_(False)
    return blocks.to(PLACE)


def replace_parameter(model):
    model[1].first.weight = nn.Parameter(model[1].first.weight.float().mul(2).to(model[1].first.weight.dtype), False)


def replace_data(model):
    model[1].second.weight.data = model[2].second.weight.data.clone()


def replace_module(model):
    model[1].first = nn.Linear(6, 5)


def in_inference_mode(model):
    with torch.inference_mode():
        model[0].first.bias = nn.Parameter(torch.full((5,), 3.0), False)


SHOWN: list[Callable[[nn.Module], object]] = [
    lambda model: model[0].first.weight.copy_(model[1].first.weight),
    lambda model: model[2].first.bias.zero_(),
    lambda model: model[0].scale.fill_(2),
    lambda model: model[0].table.add_(1),
    lambda model: model.load_state_dict({name: each + each for name, each in model.float().state_dict().items()}),
    replace_parameter,
    replace_data,
    replace_module,
    in_inference_mode,
]


@pytest.mark.parametrize("write", SHOWN)
def test_a_write_is_noticed_once(model, write):
    weights = Weights(model)
    assert not weights.have_changed()
    with torch.no_grad():
        write(model)
    assert weights.have_changed()
    assert weights.prefix_is_stale
    assert not weights.are_first
    assert not weights.have_changed()


def test_a_write_that_torch_does_not_count_is_noticed_at_the_next_suspicion(model):
    weights = Weights(model)
    model[1].first.weight.data.view(torch.uint8)[2, 3] ^= 1
    weights.suspect()
    assert weights.have_changed()
    model[1].first.weight.data.view(torch.uint8)[2, 3] ^= 1
    weights.suspect()
    assert weights.have_changed()
    assert weights.are_first


def test_the_same_contents_are_no_change(model):
    weights = Weights(model)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(each.clone())
    weights.suspect()
    assert not weights.have_changed()


def test_every_octet_and_every_place_counts():
    model = nn.Module()
    model.register_buffer("words", torch.arange(0, 11, dtype=torch.uint8, device=PLACE))
    found = {weights_digest(model)}
    for place in range(11):
        model.words[place] += 1
        found.add(weights_digest(model))
        model.words[place] -= 1
    model.words = model.words.flip(0)
    found.add(weights_digest(model))
    model.words = model.words[:-1]
    found.add(weights_digest(model))
    assert len(found) == 14
    model.words = torch.arange(0, 12, dtype=torch.uint8, device=PLACE)[1:]  # at an address that no word begins at
    odd = weights_digest(model)
    model.words = model.words.clone()
    assert weights_digest(model) == odd


def test_a_prefix_cache_that_is_reset_after_the_write_is_not_stale(model):
    weights = Weights(model)
    for is_reset in (True, False, True):
        weights.suspect()
        model[0].scale.data.add_(1)
        if is_reset:
            weights.prefix_cache_reset()
        weights.suspect()  # no step has run since
        assert weights.have_changed()
        assert weights.prefix_is_stale is not is_reset
    weights.prefix_is_stale = True
    weights.suspect()
    assert not weights.have_changed()
    assert weights.prefix_is_stale
    weights.prefix_cache_reset()
    assert not weights.prefix_is_stale


def test_what_cannot_be_read_counts_as_changed(model, monkeypatch):
    weights = Weights(model)
    monkeypatch.setattr(model, "named_parameters", lambda: [("gone", None)])
    weights.suspect()
    assert weights.have_changed()
    assert is_unknown(weights._digest)
    monkeypatch.undo()
    weights.suspect()
    assert weights.have_changed()
    assert weights.are_first


def test_replaced_weights_are_not_kept_alive(model):
    weights = Weights(model)
    gone = weakref.ref(model[1].first.weight)
    model[1].first.weight = nn.Parameter(torch.zeros(5, 6), False)
    gc.collect()
    assert gone() is None
    gone = weakref.ref(model[2].second.weight)
    model[2].second = nn.Linear(5, 3)
    gc.collect()
    assert gone() is None
    assert weights.have_changed()
