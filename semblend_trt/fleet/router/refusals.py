"""What a server of the OpenAI API says when it does not serve: a status and an error object of one sentence."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from aiohttp import web

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.typedefs import Handler, Middleware

logger = logging.getLogger(__name__)


class RequestRefusedError(SemBlendError):
    """A request that is not served. `status` is HTTP's, `reason` its short name in answers and counters.

    `retry_seconds`: when it is worth to come again, where that is known.
    """

    def __init__(self, status: int, reason: str, message: str, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_seconds = retry_seconds


def error_object(status: int, reason: str, message: str) -> dict[str, Any]:
    """The body of a refusal, in the form of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": reason}}


def refusing(count: Callable[[str], None] = lambda _: None) -> Middleware:
    """A middleware that answers refusals, aiohttp's among them, as error objects; `count` is told each reason.

    Whatever else a handler raises is logged and answered with status 500.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers: dict[str, str] = {}
        try:
            return await handler(request)
        except RequestRefusedError as refusal:
            status, reason, message = refusal.status, refusal.reason, str(refusal)
            if refusal.retry_seconds is not None:
                headers["Retry-After"] = str(refusal.retry_seconds)
        except web.HTTPException as error:
            status, reason, message = error.status, "http_error", error.reason
        except Exception:
            logger.exception("a request to %s failed", request.path)
            status, reason, message = 500, "internal_error", "the request failed here; the log says why"
        count(reason)
        return web.json_response(error_object(status, reason, message), status=status, headers=headers)

    return answer
