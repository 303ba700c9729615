"""Builds a connector from the names in KvCacheConnectorConfig, as TensorRT-LLM does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from engine_wrapper.embedded.llm_args import LlmArgs


def load_connector(llm_args: LlmArgs) -> KvCacheConnectorManager | None:
    """Imports both classes and builds each with one positional argument, `llm_args`; None when none are named.

    Raises ConfigurationError when the module or a class is missing or an abstract method is not implemented; what a
    constructor itself raises is passed on.
    """
    config = llm_args.kv_connector_config
    if config is None:
        return None
    try:
        module = importlib.import_module(config.connector_module)
    except ImportError as error:
        raise ConfigurationError(
            f"connector_module {config.connector_module} cannot be imported: {error}; check the name and the path"
        ) from error
    worker_class = _class(module, config.connector_worker_class)
    scheduler_class = _class(module, config.connector_scheduler_class)
    return KvCacheConnectorManager(worker_class(llm_args), scheduler_class(llm_args))


def _class(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigurationError(f"connector_module {module.__name__} has no class {name}; check the name")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigurationError(
            f"connector class {module.__name__}.{name} lacks {', '.join(missing)}; the contract requires it"
        )
    return found
