"""Builds the engine of an arm over shared weights."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig
from validation.arms import variables_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine_wrapper.embedded.model_runner import ModelRunner
    from validation.arms import Arm

_VARIABLE_PREFIXES = ("SEMBLEND_", "TRTLLM_SEMBLEND_")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What all engines of a run have in common.

    `pool_tokens` holds the donors and prompts that are served together, `host_bytes` as many donors as possible: each
    is a chance for a wrong fire. `batch_size`: most requests that run at once.
    """

    model: str
    pool_tokens: int
    host_bytes: int
    min_span: int
    batch_size: int = 8


def open_engine(arm: Arm, settings: EngineSettings, runner: ModelRunner, audit_path: str | None) -> LLM:
    """Builds the arm's engine over `runner`'s weights with a pool of its own; the caller shuts it down."""
    connector = None
    if arm.variables is not None:
        connector = KvCacheConnectorConfig(
            connector_module="engine_wrapper.connector",
            connector_scheduler_class="SemBlendKvConnectorScheduler",
            connector_worker_class="SemBlendKvConnectorWorker",
        )
    with environment(_variables(arm, settings, audit_path)):
        return LLM(
            model=settings.model,
            runner=runner.share(),
            max_batch_size=settings.batch_size,
            kv_cache_config=KvCacheConfig(max_tokens=settings.pool_tokens),
            kv_connector_config=connector,
        )


def _variables(arm: Arm, settings: EngineSettings, audit_path: str | None) -> dict[str, str]:
    if arm.variables is None:
        return {}
    variables = {
        **variables_of(arm),
        "SEMBLEND_MIN_SPAN": str(settings.min_span),
        "SEMBLEND_HOST_BYTES": str(settings.host_bytes),
    }
    if audit_path is not None:
        variables["SEMBLEND_AUDIT_PATH"] = audit_path
    return variables


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets our variables to exactly `variables` for the duration; the caller's own must not leak into an arm."""
    saved = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLE_PREFIXES)}
    for name in saved:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(saved)
