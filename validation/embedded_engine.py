"""The embedded engine over shared weights as the engine of an arm."""

from pathlib import Path
from typing import Any

import torch

from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig, LlmArgs
from engine_wrapper.embedded.model_runner import ModelRunner
from validation.arms import Arm
from validation.engines import Engines, EngineSettings, connector_variables, environment, token_bytes


class _ArmLLM(LLM):
    def settle(self) -> None:
        super().settle()
        if self.connector_scheduler is not None:
            self.connector_scheduler._audit.flush()


class EmbeddedEngines(Engines):
    """Embedded engines that share the weights of `runner`; `kv_dtype` is the dtype of their `KvCacheConfig`."""

    starts_slowly = False

    def __init__(self, runner: ModelRunner, kv_dtype: str = "auto") -> None:
        self.runner = runner
        self.kv_dtype: Any = kv_dtype
        # On a card there must be room for the weights in float32 too, and as much for KV.
        needed = 8 * sum(each.numel() for each in runner.model.parameters()) if runner.device.type == "cuda" else 0
        self.has_other_dtype = kv_dtype == "auto" and (not needed or torch.cuda.mem_get_info(runner.device)[0] > needed)
        self._other: ModelRunner | None = None
        self.tokenizer = runner.tokenizer
        self.facts = runner.facts
        self.token_bytes = token_bytes(runner.facts, runner.dtype)

    def open(self, arm: Arm, settings: EngineSettings, audit_path: Path) -> LLM:
        """Return the arm's engine, over the shared weights with its own pool."""
        # With 256 rows a request, a batch's prompts take few forwards, which a card runs quickly.
        rows = max(LlmArgs.model_fields["max_num_tokens"].default, 256 * settings.batch_size)
        runner = self.runner
        if arm.is_other_dtype:
            other = "bfloat16" if runner.dtype == torch.float32 else "float32"
            runner = self._other = self._other or ModelRunner(settings.model, other, runner.device)
        with environment(connector_variables(arm, settings, str(audit_path))):
            return _ArmLLM(
                model=settings.model,
                runner=runner.share(),
                max_batch_size=settings.batch_size,
                kv_cache_config=KvCacheConfig(max_tokens=settings.pool_tokens, dtype=self.kv_dtype),
                kv_connector_config=None if arm.variables is None else KvCacheConnectorConfig.ours(),
                max_num_tokens=rows if arm.chunk_tokens is None else max(arm.chunk_tokens, settings.batch_size),
            )
