"""An OpenAI-compatible server, as commands ask it."""

from __future__ import annotations

import argparse
import json
import os
import time
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPErrorProcessor, Request, build_opener

from pydantic import AliasChoices, AliasPath, BaseModel, Field

from semblend_trt.errors import ConfigurationError, SemBlendError

KEY_VARIABLE = "OPENAI_API_KEY"
# A request may wait long while the server has other work.
_ANSWER_SECONDS = 3600.0
_MAX_ANSWER_BYTES = 64 << 20
_MAX_SHOWN = 300
# Statuses of a server that takes nothing now; the times that it is asked, and the seconds at most between them.
_BUSY, _ATTEMPTS, MAX_PAUSE = (429, 503), 6, 60.0


class _Answer(BaseModel):
    model: str | None = Field(default=None, validation_alias=AliasPath("data", 0, "id"))
    message: Any = Field(default=None, validation_alias=AliasChoices(AliasPath("error", "message"), "message"))


class _EveryStatus(HTTPErrorProcessor):
    """Hands on each answer: no status raises, and no redirect is followed."""

    def http_response(self, request: Request, response: Any) -> Any:  # noqa: ARG002
        return response

    https_response = http_response


class Server:
    """An OpenAI-compatible server at `url`, which may end in /v1."""

    def __init__(self, url: str) -> None:
        """Raises ArgumentTypeError for a text that is no address."""
        try:
            parts = urlsplit(url)
            is_address = bool(parts.hostname) and parts.port != 0 and parts.scheme in ("http", "https")
        except ValueError:
            is_address = False
        if not is_address or {*"@?#"} & {*url}:
            raise argparse.ArgumentTypeError("it is no address such as http://127.0.0.1:8001; give one without a user")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._key = ""
        self._opener = build_opener(_EveryStatus)

    def use_key(self, key: str | None) -> None:
        """Send this API key, or that of KEY_VARIABLE. Raises ConfigurationError for one that no header takes."""
        self._key = key or os.environ.get(KEY_VARIABLE, "")
        if not (self._key.isascii() and self._key.isprintable()):
            raise ConfigurationError(
                f"the API key has characters that no header takes; look at {KEY_VARIABLE}, --api-key"
            )

    def first_model(self) -> str:
        """Return the name of the first model. Raises SemBlendError without one."""
        status, content, _ = self._ask("/v1/models")
        if not (name := _read(content).model):
            raise SemBlendError(f"{self.url} names no model ({said(status, content)}); give it with --model")
        return name

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return an answer's status and bytes; ask a busy server again. Raises SemBlendError if it is out of reach."""
        for attempt in range(_ATTEMPTS):
            status, content, retry = self._ask(path, body)
            if status not in _BUSY:
                break
            time.sleep(pause(retry, 2**attempt))
        return status, content

    def _ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes, str]:
        """Return the answer's status, its bytes and its Retry-After."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            with self._opener.open(Request(self.url + path, body, headers), timeout=_ANSWER_SECONDS) as response:
                return response.status, response.read(_MAX_ANSWER_BYTES), response.headers.get("Retry-After", "")
        except (OSError, HTTPException, UnicodeError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            why = getattr(reason, "strerror", None) or str(reason)[:_MAX_SHOWN] or type(reason).__name__
            raise SemBlendError(f"{self.url} is out of reach ({why}); the next run goes on from here") from None


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=Server, required=True, help="the server, such as http://127.0.0.1:8001")
    parser.add_argument("--api-key", help=f"the server's API key (default: the variable {KEY_VARIABLE})")


def pause(retry_after: str, otherwise: float) -> float:
    """Return the seconds until a server is asked again, at most MAX_PAUSE: what its header says as a number."""
    text = retry_after.strip()
    return min(MAX_PAUSE, int(text[:9]) if text.isascii() and text.isdecimal() else otherwise)


def said(status: int, content: bytes) -> str:
    """Return what an answer says of itself, for a message."""
    message = _read(content).message
    return f"{status}: {message[:_MAX_SHOWN]}" if message and isinstance(message, str) else f"status {status}"


def _read(content: bytes) -> _Answer:
    try:
        return _Answer.model_validate(json.loads(content))
    except (ValueError, RecursionError):
        return _Answer()
