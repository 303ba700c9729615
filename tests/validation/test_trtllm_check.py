"""The check finds what goes wrong in an engine, driven by the embedded engine under TensorRT-LLM's names."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from engine_wrapper.embedded import llm as embedded
from validation import trtllm_check

if TYPE_CHECKING:
    from pathlib import Path

    from validation.trtllm_check import Served, Workload


class LLM(embedded.LLM):
    """`tensorrt_llm/llmapi/llm.py`, LLM (1.2), with the arguments that the check gives."""

    def __init__(self, model: str, *, cuda_graph_config: None, **options: Any) -> None:
        super().__init__(model, **options)

    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> Any:
        outputs = super().generate(prompts, sampling_params, **options)
        self.settle()
        return outputs


class KvCacheConfig:
    """`tensorrt_llm/llmapi/llm_args.py`, KvCacheConfig (main): a pydantic model that leaves V1 where it is not told."""

    model_fields = ("enable_block_reuse", "free_gpu_memory_fraction", "use_kv_cache_manager_v2")

    def __new__(cls, *, free_gpu_memory_fraction: float, use_kv_cache_manager_v2: Any = "auto", **fields: Any) -> Any:
        assert use_kv_cache_manager_v2 is False
        assert 0 < free_gpu_memory_fraction < 1
        return embedded.KvCacheConfig(tokens_per_block=16, **fields)


@pytest.fixture
def served(tiny_qwen2_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Workload, dict[str, Served]]:
    package, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi.llm_args")
    package.LLM, package.SamplingParams = LLM, embedded.SamplingParams  # type: ignore[attr-defined]
    api.KvCacheConfig, api.KvCacheConnectorConfig = KvCacheConfig, embedded.KvCacheConnectorConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi.llm_args", api)
    seen: list[tuple[Workload, dict[str, Served]]] = []
    judge = trtllm_check.judge

    def watch(asked: Workload, served: dict[str, Served]) -> Any:
        seen.append((asked, served))
        return judge(asked, served)

    monkeypatch.setattr(trtllm_check, "judge", watch)
    status = trtllm_check.main(["--model", str(tiny_qwen2_path), "--groups", "2", "--rows", "6"])
    monkeypatch.setattr(trtllm_check, "judge", judge)
    return status, *seen[0]


def failing(asked: Workload, served: dict[str, Served]) -> list[str]:
    return [finding.name for finding in trtllm_check.judge(asked, served) if not finding.holds]


def test_every_check_holds_on_an_engine_that_keeps_the_contract_and_fails_on_one_that_does_not(
    served: tuple[int, Workload, dict[str, Served]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, asked, found = served
    assert failing(asked, found) == []
    assert status == 0
    exact, reused, stock = found["exact"], found["reused"], found["stock"]
    assert failing(asked, found | {"exact": replace(exact, tokens=((1,),) * len(exact.tokens))}) == ["exactness"]
    assert failing(asked, found | {"exact": replace(exact, tokens=((),) * len(exact.tokens))}) == ["smoke", "exactness"]
    assert failing(asked, found | {"reused": replace(reused, events=())}) == ["smoke", "execution"]
    grown = [
        event | {"exact_prefix_tokens": 500 if index == len(asked.prompts) - 1 else event["exact_prefix_tokens"]}
        for index, event in enumerate(reused.settled())
    ]
    others = [event for event in reused.events if event["event"] != "request_settled"]
    assert failing(asked, found | {"reused": replace(reused, events=(*others, *grown))}) == ["publication"]
    right = ["", "", *(trial.answer for trial in asked.targets), "", ""]
    assert failing(asked, found | {"stock": replace(stock, texts=tuple(right))}) == ["validation"]


def test_where_tensorrt_llm_is_missing_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    assert trtllm_check.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tensorrt_llm cannot be imported here")
    assert said.err.count("\n") == 1


def test_a_model_that_cannot_be_read_is_one_sentence_before_any_engine_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    assert trtllm_check.main(["--model", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(tmp_path) in said.err
    assert "by its full path" in said.err
