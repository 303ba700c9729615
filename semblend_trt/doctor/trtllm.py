"""The TensorRT-LLM that is installed and its connector contract, and the options that an engine gets."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from semblend_trt.doctor import Area
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import read_input
from semblend_trt.outcome import Scope, advice
from semblend_trt.transformers_version import embedded_engine_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from semblend_trt.doctor import Finding

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
_engine, _options = Area("engine"), Area("options")


def engine(llm_args: Any) -> Iterator[Finding]:
    """Compare TensorRT-LLM, where it is installed, with our contract, and look at the engine's options `llm_args`."""
    if find_spec("tensorrt_llm") is not None:
        yield from _installed()
    elif (refusal := embedded_engine_refusal()) is not None:
        yield _engine.failed(f"no engine serves here: TensorRT-LLM is not installed, and {refusal}")
    else:
        yield _engine.note("TensorRT-LLM is not installed; the embedded engine serves here")
    if llm_args is not None:
        yield from _options.collect(options(llm_args))


def read_options(path: str | Path) -> SimpleNamespace:
    """Return options as attributes, as an engine gives them. Raises ConfigurationError for a file without options."""
    try:
        options = _attributes(yaml.safe_load(read_input(path, MAX_BYTES)), count(1))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except RecursionError:
        problem = "are nested too deeply; give the YAML file of the engine"
    except OverflowError as error:
        problem = f"{error}; give the YAML file of the engine"
    except Exception as error:  # the parser may raise anything
        problem = f"are not YAML: {error}".replace("\n", " ")
    else:
        if isinstance(options, SimpleNamespace):
            return options
        problem = "are not names with values; give the YAML file of the engine"
    raise ConfigurationError(f"engine options {path} {problem}")


def options(llm_args: Any) -> Iterator[Finding]:
    """Yield options that we refuse, that TensorRT-LLM refuses, or that leave the connector out."""
    from semblend_trt.connector.eligibility import decoder_refusal, engine_refusal
    from semblend_trt.connector.engine_spec import WRAPPER_MODULE, from_llm_args

    config, cache = (getattr(llm_args, name, None) for name in ("kv_connector_config", "kv_cache_config"))
    module, ours = getattr(config, "connector_module", None), ("semblend_trt.connector", WRAPPER_MODULE)
    if module in ours:
        yield _options.ok(f"the connector is {module}")
    else:
        yield _options.failed(f"connector_module of kv_connector_config is {module!r}; ours are {' and '.join(ours)}")
    if (refusal := engine_refusal(from_llm_args(llm_args))) is not None:
        yield _options.refused(refusal, advice(refusal, Scope.ENGINE))
    elif module == WRAPPER_MODULE:
        has_v2 = getattr(cache, "use_kv_cache_manager_v2", None) is True
        asked = from_llm_args(SimpleNamespace(**(_DEFAULTS | vars(llm_args))))
        reason = decoder_refusal(asked) or ("cache_manager_v2" * has_v2)
        if reason:
            text = "no plan can be executed, and only what the engine can skip from the left is reused."
            yield _options.note(f"{text} {advice(reason)}", reason)
    if getattr(cache, "enable_block_reuse", True) is False:
        yield _options.failed("enable_block_reuse is off: the engine never asks a connector then; switch it on")
    policy = getattr(getattr(llm_args, "scheduler_config", None), "capacity_scheduler_policy", CAPACITY_POLICY)
    if policy != CAPACITY_POLICY:
        yield _options.failed(f"TensorRT-LLM lets no connector in with {policy}; use {CAPACITY_POLICY}")


def kv_dtype_of(llm_args: Any) -> str:
    """Return the dtype of the KV cache that the options ask for, "auto" where they leave it to the engine."""
    return str(getattr(getattr(llm_args, "kv_cache_config", None), "dtype", None) or "auto").lower()


def _installed() -> Iterator[Finding]:
    """The contract, and whether TensorRT-LLM can make our classes: they need its base classes' abstract methods."""
    from semblend_trt import connector
    from semblend_trt.connector import contract

    try:
        release = metadata.version("tensorrt-llm")
    except metadata.PackageNotFoundError:
        release = "of unknown version"
    module = sys.modules[contract.KvCacheConnectorScheduler.__module__]
    if module is contract:
        yield _engine.failed(
            f"TensorRT-LLM {release} has no KV cache connector that can be imported; 1.1 or later is needed"
        )
        return
    version = contract.match_of(module)
    yield _engine.ok(f"TensorRT-LLM {release} keeps the connector contract {version!r} ({module.__name__})")
    classes = (connector.SemBlendKvConnectorScheduler, connector.SemBlendKvConnectorWorker)
    missing = [f"{kind.__name__}.{name}" for kind in classes for name in sorted(kind.__abstractmethods__)]
    if lacking := ", ".join(missing):
        yield _engine.failed(f"TensorRT-LLM cannot make our connector, which lacks {lacking}; use a known version")


def _attributes(value: Any, seen: count[int]) -> Any:
    if next(seen) > MAX_VALUES:
        raise OverflowError(f"hold more than {MAX_VALUES} values")
    if isinstance(value, dict):
        return SimpleNamespace(**{str(name): _attributes(item, seen) for name, item in value.items()})
    return [_attributes(item, seen) for item in value] if isinstance(value, list) else value
