"""What only a model or its configuration shows to be in the way; the rest is in tests/engine_wrapper/test_attach.py."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from engine_wrapper.trtllm.execution_refusal import execution_refusal
from engine_wrapper.trtllm.executor_parts import ExecutorParts
from semblend_trt.connector.model_facts import model_facts
from tests.engine_wrapper.trtllm.executor_stand_ins import LlmArgs, executor_of

if TYPE_CHECKING:
    from pathlib import Path


def refusal(path: Path, *, fused: bool = True, rope: str = "default", **settings: Any) -> str | None:
    executor = executor_of(path, None, fused=fused)
    parts = ExecutorParts(executor, executor.kv_cache_manager, executor.model_engine)
    facts = model_facts(path)
    facts = replace(facts, rope_parameters=facts.rope_parameters | {"rope_type": rope})
    return execution_refusal(parts, LlmArgs(path, **settings), facts)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3"])
def test_known_rotations_are_done_here_where_the_engine_fuses_them(tiny_llama_path: Path, rope: str) -> None:
    assert refusal(tiny_llama_path, rope=rope) is None


def test_a_rotation_that_also_scales_is_left_to_the_engine(tiny_llama_path: Path) -> None:
    assert refusal(tiny_llama_path, rope="yarn") == "rope_fused"
    assert refusal(tiny_llama_path, rope="yarn", fused=False) is None


@pytest.mark.parametrize("name", ["context_parallel", "pipeline_parallel"])
def test_one_rank_must_hold_all_layers_and_tokens(tiny_llama_path: Path, name: str) -> None:
    assert refusal(tiny_llama_path, **{f"{name}_size": 2}) == name


def test_a_rank_must_hold_its_share_of_the_heads(tiny_llama_path: Path) -> None:
    assert refusal(tiny_llama_path, tensor_parallel_size=2) == "model_layout"


def test_a_manager_that_does_not_tell_its_blocks_is_refused(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = executor_of(tiny_llama_path, None)
    monkeypatch.setattr(executor.kv_cache_manager, "get_batch_cache_indices", None, raising=False)
    parts = ExecutorParts(executor, executor.kv_cache_manager, executor.model_engine)
    assert execution_refusal(parts, LlmArgs(tiny_llama_path), model_facts(tiny_llama_path)) == "cache_manager_unknown"
