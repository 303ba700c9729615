"""What `semblend-trt doctor --engine sglang` finds: which SGLang is there, and what keeps its options from reuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_wrapper.sglang.engine_spec import from_server_args, sglang_version
from engine_wrapper.sglang.refusals import VERSION, engine_refusal_of
from semblend_trt.doctor import Area
from semblend_trt.reasons import Scope, advice

if TYPE_CHECKING:
    from collections.abc import Generator

    from semblend_trt.connector.engine_spec import EngineSpec
    from semblend_trt.doctor import Finding

_engine, _options = Area("engine"), Area("options")


def sglang(model: str | None, options: Any) -> Generator[Finding, None, EngineSpec | None]:
    """Yield findings; return the engine's description, None if SGLang makes none.

    `model` is a path or hub id; `options` what a YAML file of SGLang's arguments holds, or None. No engine starts."""
    if (version := sglang_version()) is None:
        yield _engine.failed("sglang cannot be imported here; `pip install 'semblend-trt[sglang]'` installs it")
        return None
    if version != VERSION:
        yield _engine.refused("sglang_version", f"SGLang {version} is installed. {advice('sglang_version')}")
        return None
    yield _engine.ok(f"SGLang {version} is installed")
    given = {name.replace("-", "_"): value for name, value in vars(options or object).items() if name[0] != "_"}
    if (name := given.pop("model_path", None) or model) is None:
        yield _engine.note("without --model nothing can be said of an engine's options")
        return None
    try:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        load_plugins()
        arguments = ServerArgs(model_path=str(name), **given)
        configuration = ModelConfig.from_server_args(arguments)
    except Exception as error:  # SGLang and Transformers each raise their own
        yield _options.failed(f"SGLang refuses these options: {' '.join(str(error).split())[:400]}")
        return None
    if (refusal := engine_refusal_of(arguments)) is not None:
        yield _options.refused(refusal, advice(refusal, Scope.SGLANG))
    else:
        yield _options.ok("nothing in these options is refused; start SGLang with --radix-cache-backend semblend")
    return from_server_args(arguments, configuration, lambda: None)
