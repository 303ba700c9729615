"""The TensorRT-LLM that is installed, and which version of the connector contract it keeps."""

from __future__ import annotations

import importlib
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from semblend_trt.doctor.finding import Chapter
from semblend_trt.transformers_version import embedded_engine_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from semblend_trt.doctor.finding import Finding

_chapter = Chapter("engine")


def engine() -> Iterator[Finding]:
    """Imports TensorRT-LLM where it is installed, which may take a while, and compares it with our contract."""
    if find_spec("tensorrt_llm") is None:
        yield _embedded()
        return
    from semblend_trt.connector.contract import match_of

    release = _release()
    module = _connector_module()
    if module is None:
        yield _chapter.failed(f"TensorRT-LLM {release} has no KV cache connector; 1.1 or later is needed")
        return
    match = match_of(module)
    details = {"tensorrt_llm": release, "module": module.__name__, "contract": match.version.name}
    told = f"TensorRT-LLM {release} keeps the connector contract {match.version.name!r} ({module.__name__})"
    if match.differences:
        told += f", but for {'; '.join(match.differences)}"
        yield _chapter.note(told, differences=match.differences, **details)
    else:
        yield _chapter.ok(told, **details)
    yield _ours()


def _embedded() -> Finding:
    from semblend_trt.connector.contract import EMBEDDED

    if (refusal := embedded_engine_refusal()) is not None:
        return _chapter.failed(f"no engine serves here: TensorRT-LLM is not installed, and {refusal}")
    return _chapter.note(
        f"TensorRT-LLM is not installed; the embedded engine serves here, by the contract {EMBEDDED.name!r}",
        contract=EMBEDDED.name,
    )


def _ours() -> Finding:
    """TensorRT-LLM makes both classes, which needs every method that its base classes ask for."""
    from semblend_trt import connector

    classes = (connector.SemBlendKvConnectorScheduler, connector.SemBlendKvConnectorWorker)
    missing = [f"{kind.__name__}.{name}" for kind in classes for name in sorted(kind.__abstractmethods__)]
    if missing:
        return _chapter.failed(
            f"TensorRT-LLM cannot make our connector, which lacks {', '.join(missing)}; use a known version",
            missing=missing,
        )
    return _chapter.ok("our connector has every method that it asks for")


def _release() -> str:
    try:
        return metadata.version("tensorrt-llm")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _connector_module() -> ModuleType | None:
    from semblend_trt.connector.contract import NEW_MODULE, OLD_MODULE

    for path in (NEW_MODULE, OLD_MODULE):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            # A module of theirs that is missing is another version; one of somebody else's is a broken installation.
            if not (error.name or "").startswith("tensorrt_llm"):
                raise
    return None
