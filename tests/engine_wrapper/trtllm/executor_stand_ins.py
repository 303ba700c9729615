"""Stand-ins for TensorRT-LLM's executor, with the names of NVIDIA/TensorRT-LLM; each names its file there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from kernels.layout import KvGeometry
from tests.engine_wrapper.trtllm.cache_stand_ins import BLOCK, KVCacheManager, LlmRequest
from tests.engine_wrapper.trtllm.decoder_stand_ins import AttentionMetadata, CausalModel

if TYPE_CHECKING:
    from pathlib import Path


class LlmArgs:
    """`llmapi/llm_args.py`, TorchLlmArgs (1.2 @3277953), as set for an engine that runs eagerly."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.model, self.tokenizer, self.dtype, self.attn_backend = str(model), None, "float32", "TRTLLM"
        self.kv_cache_config = SimpleNamespace(dtype="auto", host_cache_size=None, max_attention_window=None)
        self.tensor_parallel_size = self.pipeline_parallel_size = self.context_parallel_size = 1
        self.torch_compile_config = self.cuda_graph_config = self.lora_config = self.speculative_config = None
        self.sparse_attention_config, self.enable_lora, self.enable_attention_dp = None, False, False
        vars(self).update(changes)


class PyTorchModelEngine:
    """`_torch/pyexecutor/model_engine.py`, PyTorchModelEngine (1.2 @3277953); with `is_main` as on main, where
    `engine/runners/decoder/runner.py` holds the graph runners (@0ea8c1de)."""

    def __init__(self, model: CausalModel, *, is_main: bool = False) -> None:
        self.model, self._torch_compile_enabled = model, False
        graphs = SimpleNamespace(enabled=False)
        if is_main:
            self.decoder_runner = SimpleNamespace(
                cuda_graph_runner=graphs, breakable_cuda_graph_runner=None, _torch_compile_backend=None
            )
        else:
            self.cuda_graph_runner = graphs


class PyExecutor:
    """`_torch/pyexecutor/py_executor.py`, PyExecutor (1.2 @3277953): an executor of one request after the other."""

    def __init__(self, manager: Any, model_engine: Any, worker: Any, scheduler: Any = None) -> None:
        self.kv_cache_manager, self.model_engine = manager, model_engine
        self.kv_cache_transceiver = self.drafter = None
        self.kv_connector_manager = SimpleNamespace(worker=worker, scheduler=scheduler)

    def _maybe_init_kv_connector_manager(self) -> None:
        kv_tensor = self.kv_cache_manager.get_unique_primary_pool()
        self.kv_connector_manager.worker.register_kv_caches(kv_tensor)

    @torch.inference_mode()
    def forward(self, sequences: list[tuple[int, int, int]], tokens: list[int], num_contexts: int) -> torch.Tensor:
        """`sequences` as in AttentionMetadata; returns the logits of each sequence's last token."""
        metadata = AttentionMetadata(self.kv_cache_manager, sequences, num_contexts)
        positions = [range(cached, cached + length) for _, cached, length in sequences]
        return self.model_engine.model.forward(
            attn_metadata=metadata,
            input_ids=torch.tensor(tokens, dtype=torch.int),
            position_ids=torch.tensor([[each for part in positions for each in part]], dtype=torch.int),
            inputs_embeds=None,
        )

    def prefill(self, request: LlmRequest) -> torch.Tensor:
        """One context step, from where the request stands to its end; publishes as the executor does."""
        begin = request.context_current_position
        logits = self.forward([(request.py_request_id, begin, len(request.tokens) - begin)], request.tokens[begin:], 1)
        request.context_current_position = len(request.tokens)
        self.kv_cache_manager.update_resources(SimpleNamespace(context_requests=[request], generation_requests=[]))
        return logits[0]


def executor_of(
    path: Path, worker: Any, scheduler: Any = None, *, fused: bool = True, style: str = "1.2", blocks: int = 96,
    source: Any = None,
) -> PyExecutor:  # fmt: skip
    """An executor over the tiny model of a folder, or over one rank's part of it (`source`). Unwritten KV is NaN."""
    if source is None:
        source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = source.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    geometry = KvGeometry(config.num_hidden_layers, config.num_key_value_heads, head_dim, BLOCK)
    pool = torch.full((blocks, geometry.num_layers, 2, geometry.row_elements), float("nan"))
    engine = PyTorchModelEngine(CausalModel(source, fused=fused, style=style), is_main=style == "main")
    return PyExecutor(KVCacheManager(pool, geometry), engine, worker, scheduler)
