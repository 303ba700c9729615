"""Finds donors whose KV holds a prompt's text, plans the reuse and moves the KV into the request's blocks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semblend_trt.connector import SemBlendKvConnectorScheduler, SemBlendKvConnectorWorker

__version__ = "0.1.0"
__all__ = ["SemBlendKvConnectorScheduler", "SemBlendKvConnectorWorker", "__version__"]


def __getattr__(name: str) -> Any:
    # The connector pulls in torch and transformers; `import semblend_trt` alone stays light.
    if name in ("SemBlendKvConnectorScheduler", "SemBlendKvConnectorWorker"):
        from semblend_trt import connector

        return getattr(connector, name)
    raise AttributeError(f"module 'semblend_trt' has no attribute {name!r}")
