"""The TensorRT-LLM that is installed and its connector contract, and the options that an engine gets."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from semblend_trt.doctor.finding import Area
from semblend_trt.doctor.software import installed
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import read_input
from semblend_trt.transformers_version import embedded_engine_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from semblend_trt.config import Settings
    from semblend_trt.doctor.finding import Finding

# Defaults of the options that decide whether plans can be executed: CUDA graphs are on.
_DEFAULTS: dict[str, Any] = {
    "torch_compile_config": None,
    "cuda_graph_config": {},
    "lora_config": None,
    "speculative_config": None,
    "attn_backend": "TRTLLM",
}
# The only capacity policy with which TensorRT-LLM lets a connector in.
CAPACITY_POLICY = "GUARANTEED_NO_EVICT"
MAX_BYTES = 1 << 20
# YAML aliases count each time: a small file can stand for more values than memory holds.
MAX_VALUES = 100_000
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_engine, _options = Area("engine"), Area("options")


def engine() -> Iterator[Finding]:
    """Imports TensorRT-LLM where it is installed, which may take a while, and compares it with our contract."""
    if find_spec("tensorrt_llm") is None:
        yield _embedded()
        return
    from semblend_trt.connector.contract import match_of

    release = installed("tensorrt-llm") or "of unknown version"
    module = _connector_module()
    if module is None:
        yield _engine.failed(f"TensorRT-LLM {release} has no KV cache connector; 1.1 or later is needed")
        return
    version = match_of(module).name
    yield _engine.ok(
        f"TensorRT-LLM {release} keeps the connector contract {version!r} ({module.__name__})",
        tensorrt_llm=release,
        module=module.__name__,
        contract=version,
    )
    yield _ours()


def read_options(path: str | Path) -> SimpleNamespace:
    """The options as attributes, as an engine hands them to a connector. Raises ConfigurationError for a file without
    options."""
    try:
        options = _attributes(yaml.safe_load(read_input(path, MAX_BYTES)), count(1))
    except OSError as error:
        raise ConfigurationError(f"engine options {path} cannot be read: {error.strerror or error}") from error
    except RecursionError:
        text = f"engine options {path} are nested too deeply; give the YAML file of the engine"
        raise ConfigurationError(text) from None
    except OverflowError as error:
        raise ConfigurationError(f"engine options {path} {error}; give the YAML file of the engine") from None
    except Exception as error:  # the parser may raise anything
        raise ConfigurationError(f"engine options {path} are not YAML: {error}".replace("\n", " ")) from error
    if not isinstance(options, SimpleNamespace):
        raise ConfigurationError(f"engine options {path} are not names with values; give the YAML file of the engine")
    return options


def options(llm_args: Any, settings: Settings | None) -> Iterator[Finding]:
    """Options that we refuse, that TensorRT-LLM refuses, or that leave the connector out."""
    from semblend_trt.connector.eligibility import engine_refusal
    from semblend_trt.connector.engine_spec import WRAPPER_MODULE, from_llm_args

    sizes = {name: getattr(llm_args, name, None) or 1 for name in _RANKS}
    wrong = [name for name, size in sizes.items() if not isinstance(size, int)]
    if wrong:
        yield _options.failed(f"{wrong[0]} is {sizes[wrong[0]]!r}; give a whole number from 1 on")
        return
    config = getattr(llm_args, "kv_connector_config", None)
    yield _connector(config)
    refusal = engine_refusal(from_llm_args(llm_args))
    if refusal is not None:
        yield _options.refused(
            refusal, f"the engine uses {refusal}, with which block contents cannot be trusted; switch it off"
        )
    elif getattr(config, "connector_module", None) == WRAPPER_MODULE:
        yield from _wrapper(llm_args)
    cache = getattr(llm_args, "kv_cache_config", None)
    if getattr(cache, "enable_block_reuse", True) is False:
        yield _options.failed("enable_block_reuse is off: the engine never asks a connector then; switch it on")
    policy = getattr(getattr(llm_args, "scheduler_config", None), "capacity_scheduler_policy", CAPACITY_POLICY)
    if policy != CAPACITY_POLICY:
        yield _options.failed(f"TensorRT-LLM lets no connector in with {policy}; use {CAPACITY_POLICY}")
    ranks = [name for name, size in sizes.items() if size > 1]
    if settings is not None and settings.disk_bytes and ranks:
        yield _options.note(f"the disk tier serves engines of one rank: with {', '.join(ranks)} it stays closed")


def kv_dtype_of(llm_args: Any) -> str:
    """The dtype of the KV cache that the options ask for, "auto" where they leave it to the engine."""
    return str(getattr(getattr(llm_args, "kv_cache_config", None), "dtype", None) or "auto").lower()


def _embedded() -> Finding:
    if (refusal := embedded_engine_refusal()) is not None:
        return _engine.failed(f"no engine serves here: TensorRT-LLM is not installed, and {refusal}")
    return _engine.note(
        "TensorRT-LLM is not installed; the embedded engine serves here, by the contract 'embedded'",
        contract="embedded",
    )


def _ours() -> Finding:
    """Whether TensorRT-LLM can make both classes: they need every abstract method of its base classes."""
    from semblend_trt import connector

    classes = (connector.SemBlendKvConnectorScheduler, connector.SemBlendKvConnectorWorker)
    missing = [f"{kind.__name__}.{name}" for kind in classes for name in sorted(kind.__abstractmethods__)]
    if missing:
        return _engine.failed(
            f"TensorRT-LLM cannot make our connector, which lacks {', '.join(missing)}; use a known version",
            missing=missing,
        )
    return _engine.ok("our connector has every method that it asks for")


def _connector_module() -> ModuleType | None:
    from semblend_trt.connector.contract import MODULE_PATHS

    for path in MODULE_PATHS:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            # A module of theirs that is missing is another version; one of another package is a broken installation.
            if not (error.name or "").startswith("tensorrt_llm"):
                raise
    return None


def _connector(config: Any) -> Finding:
    if config is None:
        return _options.failed("there is no kv_connector_config: the engine has no connector")
    from semblend_trt.connector.engine_spec import WRAPPER_MODULE

    name, ours = getattr(config, "connector_module", None), ("semblend_trt.connector", WRAPPER_MODULE)
    if name not in ours:
        return _options.failed(f"connector_module is {name!r}; ours are {' and '.join(ours)}")
    module = importlib.import_module(name)
    for role in ("connector_scheduler_class", "connector_worker_class"):
        if not hasattr(module, str(getattr(config, role, None))):
            return _options.failed(f"{role} is {getattr(config, role, None)!r}, which {name} does not have")
    return _options.ok(f"the connector is {name}")


def _wrapper(llm_args: Any) -> Iterator[Finding]:
    from semblend_trt.connector.eligibility import decoder_refusal
    from semblend_trt.connector.engine_spec import from_llm_args

    reason = decoder_refusal(from_llm_args(SimpleNamespace(**(_DEFAULTS | vars(llm_args)))))
    if getattr(getattr(llm_args, "kv_cache_config", None), "use_kv_cache_manager_v2", None) is True:
        reason = reason or "cache_manager_v2"
    if reason is not None:
        hint = " (on unless the file has `cuda_graph_config: null`)" if reason == "cuda_graphs" else ""
        yield _options.note(
            f"the engine uses {reason}{hint}, with which no plan can be executed: only what it can skip from the left "
            "is reused; switch it off to reuse more",
            reason,
        )


def _attributes(value: Any, seen: count[int]) -> Any:
    if next(seen) > MAX_VALUES:
        raise OverflowError(f"hold more than {MAX_VALUES} values")
    if isinstance(value, dict):
        return SimpleNamespace(**{str(name): _attributes(item, seen) for name, item in value.items()})
    return [_attributes(item, seen) for item in value] if isinstance(value, list) else value
