"""Calls from the engine that must come back, whatever is wrong with what they were given."""

from __future__ import annotations

import logging
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound="Callable[..., Any]")


def never_raises(answer: Callable[[], Any]) -> Callable[[Method], Method]:
    """A method that answers `answer()` when it fails, and counts that under its name in the runtime's `faults`.

    An exception in a leader call would leave the other ranks waiting in the broadcast of its result.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *arguments: Any) -> Any:
            try:
                return method(self, *arguments)
            except Exception:
                logger.exception("%s failed; the engine is answered as if there were nothing to reuse", method.__name__)
                self._runtime.faults[method.__name__] += 1
                return answer()

        return call  # type: ignore[return-value]

    return decorate
