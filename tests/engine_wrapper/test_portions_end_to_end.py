"""No forward has more than `max_num_tokens` rows, whatever plans add to what was scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_wrapper.embedded import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from engine_wrapper.embedded import model_runner as runner_module
from tests.engine_wrapper.prompts import DOCUMENT, DONOR, SHIFTED, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine_wrapper.embedded import RequestOutput

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, return_generation_logits=True)
PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)
UNBOUNDED = 4096


BEHIND_A_HOLE = text(5, 150) + DOCUMENT + text(6, 20)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward so far."""
    counted: list[int] = []
    own = runner_module.schedule_of

    def counting(works: Any, num_layers: int) -> Any:
        counted.append(sum(len(work.positions) for work in works))
        return own(works, num_layers)

    monkeypatch.setattr(runner_module, "schedule_of", counting)
    return counted


@pytest.fixture
def served(tiny_qwen2_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[RequestOutput]]]:
    """served(policy, max_num_tokens, *prompts): what an engine that has served DONOR answers to the prompts at once."""
    engines: list[LLM] = []

    def serve(policy: str, max_num_tokens: int, *prompts: list[int], lose: bool = False) -> list[RequestOutput]:
        monkeypatch.setenv("SEMBLEND_POLICY", policy)
        monkeypatch.setenv("SEMBLEND_RECOMPUTE_BOUNDARY_LAYER", "2")
        monkeypatch.setenv("SEMBLEND_MIN_REUSE_RATIO", "0.1")
        llm = LLM(
            model=tiny_qwen2_path,
            dtype="float32",
            max_num_tokens=max_num_tokens,
            kv_connector_config=KvCacheConnectorConfig(
                connector_module="engine_wrapper.connector",
                connector_scheduler_class="SemBlendKvConnectorScheduler",
                connector_worker_class="SemBlendKvConnectorWorker",
            ),
            kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=4096),
        )
        engines.append(llm)
        llm.generate([DONOR], PREFILL)
        llm.settle()
        if lose:
            llm.connector_worker.store.clear()
        outputs = llm.generate(list(prompts), GREEDY)
        llm.settle()
        return outputs

    yield serve
    for llm in engines:
        llm.shutdown()


def assert_same(ours: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for own, other in zip(ours, expected, strict=True):
        assert (own.reused_tokens, own.outputs[0].token_ids) == (other.reused_tokens, other.outputs[0].token_ids)
        logits, other_logits = own.outputs[0].generation_logits, other.outputs[0].generation_logits
        assert torch.allclose(torch.stack(list(logits)), torch.stack(list(other_logits)), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("policy", "prompts", "max_num_tokens"),
    [
        ("position_fix", (BEHIND_A_HOLE,), 64),
        ("boundary", (SHIFTED,), 280),
        ("cacheblend", (SHIFTED,), 280),
        ("cacheblend", (SHIFTED, BEHIND_A_HOLE), 400),
        ("epic", (SHIFTED, BEHIND_A_HOLE), 64),
    ],
)
def test_plans_run_in_several_forwards_and_come_out_the_same(
    served: Callable[..., list[RequestOutput]],
    rows: list[int],
    policy: str,
    prompts: tuple[list[int], ...],
    max_num_tokens: int,
) -> None:
    expected = served(policy, UNBOUNDED, *prompts)
    assert max(rows) > max_num_tokens, "nothing has to be divided"
    rows.clear()
    ours = served(policy, max_num_tokens, *prompts)
    assert 0 < max(rows) <= max_num_tokens
    assert all(output.reused_tokens for output in ours)
    assert_same(ours, expected)


def test_a_lost_donor_is_computed_in_several_forwards(
    served: Callable[..., list[RequestOutput]], rows: list[int]
) -> None:
    expected = served("position_fix", UNBOUNDED, SHIFTED, lose=True)
    rows.clear()
    assert_same(served("position_fix", 64, SHIFTED, lose=True), expected)
    assert max(rows) <= 64


@pytest.mark.parametrize("policy", ["boundary", "cacheblend"])
def test_tokens_that_must_run_together_and_do_not_fit_are_not_reused(
    served: Callable[..., list[RequestOutput]], rows: list[int], policy: str
) -> None:
    (ours,) = served(policy, 64, SHIFTED)
    assert max(rows) <= 64
    assert (ours.reused_tokens, ours.reuse_reason) == (0, "max_num_tokens")


def test_as_much_is_reused_as_fits(served: Callable[..., list[RequestOutput]], rows: list[int]) -> None:
    (ours,) = served("boundary", 200, SHIFTED)
    assert max(rows) <= 200
    assert ours.reused_tokens == 200 - 1 - 73
