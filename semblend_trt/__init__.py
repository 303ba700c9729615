"""Finds donors whose KV holds a prompt's text, plans the reuse and moves the KV into the request's blocks."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
__all__ = ["SemBlendKvConnectorScheduler", "SemBlendKvConnectorWorker", "__version__"]

# From a checkout beside another distribution that is also imported as `kernels`, Python finds only theirs.
_KERNELS = str(Path(__file__).parents[1] / "kernels")
if (_spec := find_spec("kernels")) and _KERNELS not in (_spec.submodule_search_locations or ()):
    import_module("kernels").__path__.append(_KERNELS)


def __getattr__(name: str) -> Any:
    # The connector pulls in torch and transformers; `import semblend_trt` alone stays light.
    if name in __all__:
        return getattr(import_module("semblend_trt.connector"), name)
    raise AttributeError(f"module 'semblend_trt' has no attribute {name!r}")
