"""The self-check takes a prompt that can prove something, and names what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_wrapper.batch import Batch
from engine_wrapper.self_check import LayoutError
from engine_wrapper.trtllm.batch import batch_of_call
from engine_wrapper.trtllm.decoder_hooks import DecoderHooks
from engine_wrapper.trtllm.planned_decoder import PlannedDecoder
from engine_wrapper.trtllm.self_check import MIN_TOKENS, SelfCheck
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.ranks import Ranks
from tests.engine_wrapper.trtllm.cache_stand_ins import LlmRequest
from tests.engine_wrapper.trtllm.executor_stand_ins import executor_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def check(tiny_qwen2_path: Path) -> SelfCheck:
    executor = executor_of(tiny_qwen2_path, None)
    manager = executor.kv_cache_manager
    rotation = model_facts(tiny_qwen2_path).rotation
    forward = executor.model_engine.model.model.forward
    return SelfCheck(PlannedDecoder(forward, manager.pool, manager.geometry, rotation, Ranks()))


@pytest.mark.parametrize(
    ("begins", "lengths", "contexts", "fits"),
    [
        ((0,), (MIN_TOKENS,), 1, True),
        ((0,), (MIN_TOKENS - 1,), 1, False),
        ((8,), (MIN_TOKENS,), 1, False),
        ((0, 70), (MIN_TOKENS, 1), 1, True),
        ((0,), (MIN_TOKENS,), 0, False),
    ],
)
def test_only_a_prompt_from_position_0_proves_anything(
    check: SelfCheck, begins: Any, lengths: Any, contexts: int, fits: bool
) -> None:
    batch = Batch(tuple(range(len(begins))), begins, lengths, contexts, torch.zeros(sum(lengths), dtype=torch.int))
    assert check.fits(batch) is fits


def test_positions_of_another_kind_are_named(check: SelfCheck) -> None:
    batch = Batch((1,), (0,), (64,), 1, torch.zeros(64, dtype=torch.int))
    options = {"position_ids": torch.arange(2, 66, dtype=torch.int)[None]}
    with pytest.raises(LayoutError, match="counts positions in another way"):
        check.run(batch, options, torch.zeros(64, 64), list(range(8)))


@pytest.mark.parametrize("what", ["hidden rows", "KV of layer 1"])
def test_what_differs_is_named(tiny_qwen2_path: Path, what: str) -> None:
    executor = executor_of(tiny_qwen2_path, None)
    manager = executor.kv_cache_manager
    decoder = executor.model_engine.model.model
    stock = decoder.forward
    errors: list[LayoutError] = []

    def watch(**options: Any) -> torch.Tensor:
        hidden = stock(**options)
        if what == "hidden rows":
            hidden = hidden * 1.5
        else:
            manager.pool[request.blocks[0], 1] *= 1.5
        hooks = DecoderHooks(decoder, stock)
        hooks.install()
        rotation = model_facts(tiny_qwen2_path).rotation
        check = SelfCheck(PlannedDecoder(stock, manager.pool, manager.geometry, rotation, Ranks()))
        with pytest.raises(LayoutError) as error:
            check.run(batch_of_call(options), options, hidden, request.blocks)
        errors.append(error.value)
        hooks.remove()
        return hidden

    request = LlmRequest(1, [*range(72)])
    manager.add_sequence(request)
    decoder.forward = watch
    executor.prefill(request)
    assert errors[0].reason == "self_check"
    assert what in str(errors[0])
