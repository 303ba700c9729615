"""What `semblend-trt doctor --engine vllm` finds: which vLLM is installed, and what keeps its options from reuse."""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine_wrapper.vllm.engine_spec import ABSENT, from_vllm_config, value_at, vllm_version
from engine_wrapper.vllm.refusals import OLDEST, engine_refusal_of
from semblend_trt.doctor import Area
from semblend_trt.reasons import Scope, advice

if TYPE_CHECKING:
    from collections.abc import Generator

    from semblend_trt.connector.engine_spec import EngineSpec
    from semblend_trt.doctor import Finding

_TESTED = {(0, 28), (0, 32), (0, 33)}
# Arguments of KVTransferConfig but for the connector's settings.
TRANSFER = {
    "kv_connector": "SemBlendConnector",
    "kv_connector_module_path": "engine_wrapper.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_engine, _options = Area("engine"), Area("options")


def vllm(model: str | None, options: Any) -> Generator[Finding, None, EngineSpec | None]:
    """Yield findings; return the engine's arguments, None if vLLM makes none.

    `model` is a path or hub id; `options` what the YAML file of `vllm serve --config` holds, or None. vLLM makes its
    own configuration of both, which may take some seconds; no engine is started."""
    version = vllm_version()
    if version is None and "vllm" not in sys.modules:
        yield _engine.failed("vllm cannot be imported here; `pip install 'semblend-trt[vllm]'` installs it")
        return None
    told = f"vLLM {'without a number' if version is None else '.'.join(map(str, version))} is installed"
    if version is None or version < OLDEST:
        yield _engine.refused("vllm_version", f"{told}. {advice('vllm_version')}")
        return None
    if version in _TESTED:
        yield _engine.ok(told)
    else:
        yield _engine.note(f"{told}, which was not tested; it reuses KV once its first prompt has come out the same")
    given = {} if options is None else _plain(options)
    name = given.pop("model", None) or model
    if name is None:
        yield _engine.note("without --model nothing can be said of an engine's options")
        return None
    return (yield from _of_configuration(str(name), given))


def _of_configuration(model: str, given: dict[str, Any]) -> Generator[Finding, None, EngineSpec | None]:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = given.get("kv_transfer_config", TRANSFER)
    with contextlib.suppress(ValueError, TypeError):
        transfer = json.loads(transfer)  # as on a command line
    if not isinstance(transfer, dict):
        yield _options.failed("kv_transfer_config holds no names with values; give it as docs/vllm.md does")
        return None
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    if (name, module) != (TRANSFER["kv_connector"], TRANSFER["kv_connector_module_path"]):
        problem = f"the connector is {name!r} of {module!r}; ours is SemBlendConnector of engine_wrapper.vllm"
        yield _options.failed(problem)
        return None
    arguments = {each: value for each, value in given.items() if each in EngineArgs.__dataclass_fields__}
    arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    try:
        configuration = EngineArgs(model=model, **arguments).create_engine_config()
    except Exception as error:  # vLLM and pydantic each raise their own
        yield _options.failed(f"vLLM refuses these options: {' '.join(str(error).split())[:400]}")
        return None
    read = from_vllm_config(configuration)
    refusal = read.refusal or engine_refusal_of(configuration, None)
    if refusal is not None:
        yield _options.refused(refusal, advice(refusal, Scope.VLLM))
    else:
        yield _options.ok("nothing in these options is refused")
    if read.ranks > 1:
        yield _options.note(
            f"donors and reuse profiles belong to {read.ranks} ranks; sizes of tiers are those of one rank"
        )
    if value_at(configuration, "lora_config") not in (ABSENT, None):
        yield _options.note("a reuse profile holds for one adapter, or for the base model, that it was calibrated with")
    return read


def _plain(options: Any) -> dict[str, Any]:
    """Nested attributes as dictionaries, with Python's names."""
    return {
        name.replace("-", "_"): _plain(value) if isinstance(value, SimpleNamespace) else value
        for name, value in vars(options).items()
    }
