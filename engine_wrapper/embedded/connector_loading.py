"""Builds a connector from the names in KvCacheConnectorConfig, as TensorRT-LLM does."""

from __future__ import annotations

import importlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
from semblend_trt.connector.contract_versions import contract_version
from semblend_trt.errors import ConfigurationError
from semblend_trt.runtime import runtime_for

if TYPE_CHECKING:
    from engine_wrapper.embedded.llm_args import LlmArgs
    from semblend_trt.ranks import Ranks

logger = logging.getLogger(__name__)


def uses_v2(llm_args: LlmArgs) -> bool:
    """Whether the engine takes the V2 cache manager: a version whose connectors know V1 only makes it take that.

    Raises ConfigurationError for layer groups under V1, which has none, and for CUDA graphs with a version that refuses
    connectors then.
    """
    version = contract_version(llm_args.contract)
    has_connector = llm_args.kv_connector_config is not None
    if has_connector and not llm_args.layer_hooks and not version.allows_cuda_graphs:
        raise ConfigurationError(f"contract {version.name} allows no CUDA graphs beside a connector; set layer_hooks")
    wanted = llm_args.kv_cache_config.use_kv_cache_manager_v2
    if wanted and has_connector and not version.allows_v2:
        logger.warning(
            "contract %s knows the V1 cache manager only; with a connector the engine takes it", version.name
        )
        wanted = False
    if llm_args.layer_groups is not None and not wanted:
        raise ConfigurationError(
            f"layer_groups is {llm_args.layer_groups}, but under contract {version.name} this engine takes the V1 "
            "cache manager, which has one flat pool; set kv_cache_config.use_kv_cache_manager_v2 and contract main"
        )
    return wanted


def load_connector(llm_args: LlmArgs, ranks: Ranks) -> KvCacheConnectorManager | None:
    """Imports both classes and builds each with one positional argument, `llm_args`; None when none are named.

    Every rank has a worker, and rank 0 a scheduler; both are built at once, each in a thread of its own.
    Raises ConfigurationError when the module or a class is missing or an abstract method is not implemented; what a
    constructor itself raises is passed on.
    """
    config = llm_args.kv_connector_config
    if config is None:
        return None
    runtime_for(llm_args).ranks = ranks
    try:
        module = importlib.import_module(config.connector_module)
    except ImportError as error:
        raise ConfigurationError(
            f"connector_module {config.connector_module} cannot be imported: {error}; check the name and the path"
        ) from error
    worker_class = _class(module, config.connector_worker_class)
    scheduler_class = _class(module, config.connector_scheduler_class)
    groups = len(llm_args.layer_groups or ((),)) if uses_v2(llm_args) else 0
    version = contract_version(llm_args.contract)
    with ThreadPoolExecutor(max_workers=2) as threads:
        worker = threads.submit(worker_class, llm_args)
        scheduler = None if ranks.rank else threads.submit(scheduler_class, llm_args)
    built = None if scheduler is None else scheduler.result()
    return KvCacheConnectorManager(worker.result(), built, version, groups, ranks)


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
