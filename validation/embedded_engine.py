"""The embedded engine as the engine of an arm, over shared weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig
from validation.engines import connector_variables, environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine_wrapper.embedded.model_runner import ModelRunner
    from semblend_trt.connector.model_facts import ModelFacts
    from validation.arms import Arm
    from validation.engines import EngineSettings


def open_llm(
    model: Path,
    runner: ModelRunner,
    variables: Mapping[str, str] | None,
    module: str = "engine_wrapper.connector",
    **options: Any,
) -> LLM:
    """An embedded engine with `options`, and with our connector of `module` where `variables` set it, without
    SEMBLEND_."""
    with environment({f"SEMBLEND_{name}": value for name, value in (variables or {}).items()}):
        connector = None if variables is None else KvCacheConnectorConfig.ours(module)
        return LLM(model, runner=runner, kv_connector_config=connector, **options)


class EmbeddedEngines:
    """Embedded engines that share the weights of `runner`."""

    starts_slowly = False
    notes = ()

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    @property
    def tokenizer(self) -> Any:
        return self.runner.tokenizer

    @property
    def facts(self) -> ModelFacts:
        return self.runner.facts

    @property
    def token_bytes(self) -> int:
        facts = self.runner.facts
        return 2 * facts.num_layers * facts.kv_heads * facts.head_dim * self.runner.dtype.itemsize

    def open(self, arm: Arm, settings: EngineSettings, audit_path: Path) -> LLM:
        """The arm's engine, over the shared weights with a pool of its own."""
        connector = None if arm.variables is None else KvCacheConnectorConfig.ours()
        with environment(connector_variables(arm, settings, str(audit_path))):
            return LLM(
                model=settings.model,
                runner=self.runner.share(),
                max_batch_size=settings.batch_size,
                kv_cache_config=KvCacheConfig(max_tokens=settings.pool_tokens),
                kv_connector_config=connector,
            )
