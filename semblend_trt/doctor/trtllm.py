"""The TensorRT-LLM that is installed and its connector contract, and the options that an engine gets."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from semblend_trt import connector
from semblend_trt.connector import contract
from semblend_trt.connector.eligibility import decoder_refusal, engine_refusal, spec_of
from semblend_trt.connector.engine_spec import WRAPPER_MODULE
from semblend_trt.doctor import Area
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import read_input
from semblend_trt.model_tokenizer import embedded_engine_refusal
from semblend_trt.reasons import Scope, advice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from semblend_trt.doctor import Finding

# Defaults of the options that decide whether plans can be executed.
_DEFAULTS = {"attn_backend": "TRTLLM", **dict.fromkeys(("torch_compile_config", "lora_config", "speculative_config"))}
# The only capacity policy with which V1 lets a connector in; V2 has one policy, whatever it is asked for.
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
    config, cache = (getattr(llm_args, name, None) for name in ("kv_connector_config", "kv_cache_config"))
    known = SimpleNamespace(**(_DEFAULTS | vars(llm_args)))
    module, ours = getattr(config, "connector_module", None), ("semblend_trt.connector", WRAPPER_MODULE)
    if module in ours:
        yield _options.ok(f"the connector is {module}")
    else:
        yield _options.failed(f"connector_module of kv_connector_config is {module!r}; ours are {' and '.join(ours)}")
    if (refusal := engine_refusal(spec_of(llm_args))) is not None:
        yield _options.refused(refusal, advice(refusal, Scope.ENGINE))
    elif module == WRAPPER_MODULE and (reason := decoder_refusal(spec_of(known))) is not None:
        text = "no plan can be executed, and only what the engine can skip from the left is reused."
        yield _options.note(f"{text} {advice(reason)}", reason)
    if getattr(cache, "enable_block_reuse", True) is False:
        yield _options.failed("enable_block_reuse is off: the engine never asks a connector then; switch it on")
    # What keeps an engine with a connector from its start, by the cache manager that it may get.
    asked, size = (getattr(cache, name, None) for name in ("use_kv_cache_manager_v2", "host_cache_size"))
    policy = getattr(getattr(llm_args, "scheduler_config", None), "capacity_scheduler_policy", CAPACITY_POLICY)
    if asked not in (None, True, False, "auto"):
        yield _options.failed(f"use_kv_cache_manager_v2 is {asked!r}; it is true, false or auto")
    elif not contract.takes_v2(asked):
        if policy != CAPACITY_POLICY:
            yield _options.failed(f"V1 lets no connector in with {policy}; use {CAPACITY_POLICY}")
    elif size is None or size != 0 or isinstance(size, bool):
        yield _options.failed(
            f"host_cache_size is {size}: the V2 cache manager takes host memory by itself, and TensorRT-LLM then "
            "starts with no connector; write host_cache_size: 0 under kv_cache_config"
        )


def _installed() -> Iterator[Finding]:
    """Yield the contract, and whether TensorRT-LLM can make our classes: they need its bases' abstract methods."""
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
