"""Keeps approximate KV out of the reuse trees of TensorRT-LLM's own cache managers.

V1 is the C++ manager of `KVCacheManager`: it stores blocks under the request's tokens after every context step, at
release, and before an asynchronous save. V2, `KVCacheManagerV2`, commits blocks from `try_commit_blocks`. Neither can
leave out one request, so the guard replaces these methods on the one manager, for flagged requests only.

Facts: NVIDIA/TensorRT-LLM, `_torch/pyexecutor/resource_manager.py` (1.1 to main), `kv_cache_manager_v2.py` (1.3: beside
it; main: under `kv_cache/`), and `cpp/tensorrt_llm/nanobind/batch_manager/kvCacheManager.cpp`, whose `remove_sequence`
takes no None as the request."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from engine_wrapper.trtllm.hooks import BatchView, guard_publication, marks_dummies, names_in, shown_by

if TYPE_CHECKING:
    from engine_wrapper.patches import Undo
    from semblend_trt.runtime import ActivePlans

logger = logging.getLogger(__name__)

_V1_CALLS = {
    "update_resources": {"impl", "store_context_blocks", "context_requests"},
    "free_resources": {"impl", "remove_sequence", "py_request_id"},
    "store_blocks_for_reuse": {"impl", "store_blocks_for_reuse"},
    "unpin_blocks_by_id": {"impl", "unpin_blocks_by_id"},
}
# All that V1's release may use: any other name might publish.
_V1_RELEASE = _V1_CALLS["free_resources"] | {"_preprepared_dummy_request_ids", "discard"}
_V2_CALLS = {
    "update_context_resources": {"try_commit_blocks"},
    "try_commit_blocks": {"commit", "stop_committing", "kv_cache_map", "context_remaining_length"},
    "free_resources": {"kv_cache_map", "close"},
}
_V2_SILENT = ("update_context_resources", "update_resources", "free_resources")


def guard_refusal(manager: Any) -> str | None:
    """Return why `manager` cannot be guarded. Changes nothing.

    cache_manager_unknown: neither V1 nor V2, or a subclass; sliding_window: windows that differ by layer;
    publication_unknown: it publishes in another way than is known, as if V2 committed decode tokens; kv_lending: V2
    lends blocks to others; conversation_manager: V2 keeps conversations.

    Facts: pull request 18711 (commits of decode tokens)."""
    kind = type(manager).__name__
    if kind not in _GUARDS:
        return "cache_manager_unknown"
    if shown_by(manager, "is_vswa"):
        return "sliding_window"
    calls = _V1_CALLS if kind == "KVCacheManager" else _V2_CALLS
    if any(method in vars(manager) or not wanted <= names_in(manager, method) for method, wanted in calls.items()):
        return "publication_unknown"
    if kind == "KVCacheManager":
        is_known = names_in(manager, "free_resources") <= _V1_RELEASE and marks_dummies(manager)
        return None if is_known else "publication_unknown"
    if any("commit" in names_in(manager, method) for method in _V2_SILENT):
        return "publication_unknown"
    if shown_by(manager, "_sharing") is not None:
        return "kv_lending"
    return None if shown_by(manager, "conversation_manager") is None else "conversation_manager"


def guard_for(manager: Any, plans: ActivePlans) -> ManagerGuard:
    """Return the guard of a manager that `guard_refusal` accepts; it does nothing until it is installed."""
    return _GUARDS[type(manager).__name__](manager, plans)


class ManagerGuard:
    """A guard on one manager: replaces its methods of these `names`."""

    names: tuple[str, ...]

    def __init__(self, manager: Any, plans: ActivePlans) -> None:
        self._manager, self._plans = manager, plans
        self._stock = {name: getattr(manager, name) for name in self.names}
        self._undo: Undo = lambda: None

    def install(self) -> None:
        """Replace all methods. If one cannot be replaced, restore the others and raise."""
        self._undo = guard_publication(self._manager, self, self.names)

    def remove(self) -> None:
        """Leave the manager as it was found."""
        self._undo()

    def free_resources(self, request: Any, pin_on_release: bool = False) -> Any:
        freed = self._stock["free_resources"](request, pin_on_release)
        self._plans.released(request.py_request_id)
        return freed


class V1Guard(ManagerGuard):
    """Stores nothing of a flagged request, not even its exact part: V1 stores all of a request or nothing."""

    names = tuple(_V1_CALLS)

    def update_resources(self, scheduled_batch: Any, *arguments: Any, **options: Any) -> Any:
        requests = scheduled_batch.context_requests
        exact = [each for each in requests if not self._plans.withholds(each.py_request_id)]
        batch = scheduled_batch if len(exact) == len(requests) else BatchView(scheduled_batch, exact)
        return self._stock["update_resources"](batch, *arguments, **options)

    def free_resources(self, request: Any, pin_on_release: bool = False) -> Any:
        with ExitStack() as undo:
            if self._plans.withholds(request.py_request_id):
                # The C++ manager frees a dummy's blocks and stores none of them.
                undo.callback(setattr, request, "is_dummy_request", request.is_dummy_request)
                request.is_dummy_request = True
            return super().free_resources(request, pin_on_release)

    def store_blocks_for_reuse(self, request: Any, *arguments: Any, **options: Any) -> Any:
        if self._plans.withholds(request.py_request_id):
            return None
        return self._stock["store_blocks_for_reuse"](request, *arguments, **options)

    def unpin_blocks_by_id(self, kv_cache_block_id: Any) -> Any:
        # A flagged request has None here, and was never pinned.
        return None if kv_cache_block_id is None else self._stock["unpin_blocks_by_id"](kv_cache_block_id)


class V2Guard(ManagerGuard):
    """Lets a flagged request keep what it shares with the tree and commit nothing more, as if reuse were off."""

    names = ("try_commit_blocks", "free_resources")

    def try_commit_blocks(self, request: Any, *arguments: Any, **options: Any) -> Any:
        """Advance a flagged request's history without a commit; V2 commits no decode tokens anyway."""
        if not self._plans.withholds(request.py_request_id):
            return self._stock["try_commit_blocks"](request, *arguments, **options)
        if (cache := self._manager.kv_cache_map.get(request.py_request_id)) is None:
            return None
        if not cache.resize(None, request.context_current_position):
            logger.warning("request %d: its history could not be advanced", request.py_request_id)
        if request.context_remaining_length == 0:
            cache.stop_committing()
        return None


_GUARDS: dict[str, type[ManagerGuard]] = {"KVCacheManager": V1Guard, "KVCacheManagerV2": V2Guard}
