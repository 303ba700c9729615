"""Notices the calls by which anything but a step runs in vLLM's worker: they may write the model's weights.

`reload_weights`, `update_weights`, `wake_up`, `apply_model` and a user's own functions all go this way.
Facts: vLLM, `v1/executor/uniproc_executor.py`, `UniProcExecutor.collective_rpc` (0.25.1 to 0.32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_wrapper.vllm.refusals import callers
from engine_wrapper.watched_call import WatchedCall

if TYPE_CHECKING:
    from semblend_trt.connector.weights import Weights

_NAME = "collective_rpc"
# What vLLM itself calls at its start and around its steps; none of it writes weights.
_HARMLESS = frozenset(
    {
        "check_health",
        "compile_or_warm_up_model",
        "execute_dummy_batch",
        "execute_model",
        "get_kv_connector_handshake_metadata",
        "get_supported_tasks",
        "initialize_from_config",
        "list_loras",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "shutdown",
        "take_draft_token_ids",
    }
)


def watch_worker_calls(weights: Weights) -> WatchedCall:
    """Have `weights` suspected after every call of the executor that may write them.

    Takes the executor that is registering its caches. Raises LookupError if it is of another kind.
    """
    owner = next((each for each in callers() if hasattr(each, _NAME) and hasattr(each, "driver_worker")), None)
    if owner is None:
        raise LookupError("vLLM's executor is of a kind that is not known")

    def after(_: Any, method: Any = None, *__: Any) -> None:
        if not isinstance(method, str) or method not in _HARMLESS:
            weights.suspect()

    return WatchedCall(owner, _NAME, after)
