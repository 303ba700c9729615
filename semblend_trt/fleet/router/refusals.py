"""What a server of the OpenAI API says when it does not serve: a status and an error object of one sentence."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from aiohttp import web

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.typedefs import Handler, Middleware

logger = logging.getLogger(__name__)


class RequestRefusedError(SemBlendError):
    """A request that is not served. `status` is HTTP's, `reason` its short name in answers and counters."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def error_object(status: int, reason: str, message: str) -> dict[str, Any]:
    """The body of a refusal, in the form of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": reason}}


async def json_object(request: web.Request) -> dict[str, Any]:
    """The body of a request, a JSON object. Raises RequestRefusedError for any other, and for one that is too long."""
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        bound = request.client_max_size
        raise RequestRefusedError(413, "body_too_large", f"the body has more than {bound} bytes; send less") from None
    except (ValueError, RecursionError):
        raise RequestRefusedError(400, "bad_json", "the body is not JSON; send a JSON object") from None
    if not isinstance(body, dict):
        raise RequestRefusedError(400, "bad_json", f"the body is a JSON {type(body).__name__}; send a JSON object")
    return body


def refusing(count: Callable[[str], None] = lambda _: None) -> Middleware:
    """A middleware that answers refusals, aiohttp's among them, as error objects; `count` is told each reason.

    Whatever else a handler raises is logged and answered with status 500.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestRefusedError as refusal:
            status, reason, message = refusal.status, refusal.reason, str(refusal)
        except web.HTTPException as error:
            status, reason, message = error.status, "http_error", error.reason
        except Exception:
            logger.exception("a request to %s failed", request.path)
            status, reason, message = 500, "internal_error", "the request failed here; the log says why"
        count(reason)
        return web.json_response(error_object(status, reason, message), status=status)

    return answer
