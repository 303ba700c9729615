"""SemBlend inside vLLM: `"kv_connector": "SemBlendConnector", "kv_connector_module_path": "engine_wrapper.vllm"`."""

from __future__ import annotations

from typing import Any

__all__ = ["SemBlendConnector"]


def __getattr__(name: str) -> Any:
    """Return the connector, on demand: the doctor comes here too, even where there is no vLLM."""
    if name != "SemBlendConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine_wrapper.vllm.connector import SemBlendConnector

    return SemBlendConnector
