"""Changes SGLang's scheduler: it begins a request again whose promised tokens could not be had, and takes no token of
the failed step.

SGLang's own way for a full cache is used: the request gives its slots back, waits, and is computed in full. It leaves
the step's batch before SGLang merges that into the running one, and waits again once the step's result is read.

Facts: SGLang 0.5.23, `srt/managers/schedule_batch.py` (`release_req`, `filter_batch`) and `scheduler.py`
(`event_loop_overlap`: a step is read after the next one has begun)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from engine_wrapper.patches import replace_method, watch_method

logger = logging.getLogger(__name__)


def find_scheduler() -> Any:
    """Return SGLang's scheduler, which makes its prefix cache. No supported way leads to it. Raises LookupError."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        owner = frame.f_locals.get("self")
        if all(hasattr(owner, name) for name in ("get_next_batch_to_run", "process_batch_result")):
            return owner
    raise LookupError("SGLang's scheduler is not among the callers")


class SchedulerHooks:
    """Retracts requests of one scheduler, by id. `note` gets all that it has carried out, or tried to."""

    def __init__(self, scheduler: Any, note: Callable[[Iterable[Any]], None]) -> None:
        self._scheduler = scheduler
        self._failed = set[str]()
        # Retracted requests that are still to leave their batch, and those that are still to wait again.
        self._left, self._begun = list[Any](), list[Any]()
        self._next, self._process = scheduler.get_next_batch_to_run, scheduler.process_batch_result
        # The scheduler ends with its prefix cache.
        replace_method(scheduler, "get_next_batch_to_run", self._get_next)
        replace_method(scheduler, "process_batch_result", self._read)
        watch_method(scheduler, "process_input_requests", lambda _, given=(), *__: note(given))

    def retract(self, rids: list[str]) -> None:
        """Begin these requests of the running step again."""
        self._failed.update(rids)

    def _get_next(self, running_batch: Any, last_batch: Any) -> Any:
        if self._failed and last_batch:
            self._release(last_batch)
        if self._left and last_batch:
            if self._scheduler.chunked_req in self._left:
                self._scheduler.chunked_req = None
            last_batch.filter_batch(reqs_to_exclude=list(self._left))
            self._left = []
        return self._next(running_batch=running_batch, last_batch=last_batch)

    def _read(self, batch: Any, result: Any) -> Any:
        if self._failed:
            self._release(batch)
        read = self._process(batch, result)
        for request in [each for each in self._begun if each in batch.reqs]:
            self._begun.remove(request)
            self._scheduler._add_request_to_queue(request, is_retracted=True)
        return read

    def _release(self, batch: Any) -> None:
        """Take back the slots of failed requests; SGLang reads no token of a request that is retracted."""
        for request in batch.reqs:
            if request.rid in self._failed and not request.is_retracted and not request.finished():
                logger.warning("request %s begins again, without reuse", request.rid)
                try:
                    batch.release_req(batch.reqs.index(request), 0)
                except Exception:
                    logger.exception("SGLang has not ended the retraction of request %s", request.rid)
                    if not (request.kv.holds_kv or request.is_retracted):
                        request.reset_for_retract()
                if not request.is_retracted:
                    self._abort(request)
                    continue
                self._left.append(request)
                self._begun.append(request)
        self._failed -= {each.rid for each in batch.reqs}

    def _abort(self, request: Any) -> None:
        """End a request that keeps its slots, with an error and nothing of it in the prefix cache."""
        request.skip_radix_cache_insert = True
        request.to_finish = FINISH_ABORT("SemBlend could not compute the prompt", err_type="InternalServerError")
        if self._scheduler.chunked_req is request:
            self._scheduler._pending_chunked_abort_req = request
