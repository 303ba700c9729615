"""TraceLog: writes a trace line for each request on a thread of its own, which serving never waits for."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any

from semblend_trt.background import Background
from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.router.prompts import PromptError
from semblend_trt.fleet.router.trace_blocks import BlockMaker
from semblend_trt.fleet.telemetry import TraceLine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import JsonValue

    from semblend_trt.fleet.router.config import TelemetryConfig
    from semblend_trt.fleet.router.counters import RouterCounters
    from semblend_trt.fleet.router.forwarding import Observed
    from semblend_trt.fleet.router.prompts import PromptReader
    from semblend_trt.fleet.router.tenants import Caller
    from semblend_trt.fleet.router.trace_blocks import Hasher

logger = logging.getLogger(__name__)

# Bodies that wait to be written, in bytes; lines beyond are dropped and counted.
MAX_WAITING_BYTES = 64 << 20
CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class ServedRequest:
    """What is known of a request when it has ended."""

    request_id: str
    timestamp_ms: int
    model: str
    caller: Caller
    body: Mapping[str, Any]
    body_bytes: int
    observed: Observed
    metadata: dict[str, JsonValue]


class TraceLog:
    """Belongs to one event loop, but for its thread. `prompts` belongs to the thread alone."""

    def __init__(
        self, config: TelemetryConfig, hasher: Hasher, prompts: PromptReader, counters: RouterCounters
    ) -> None:
        """Raises ConfigurationError when the file cannot be opened."""
        self._hasher, self._counters = hasher, counters
        self._maker = BlockMaker(prompts, hasher, config.block_tokens, config.text == "kept")
        try:
            # Rotation renames a symlink's target and not the link; what is no regular file stays as it is.
            target = os.path.realpath(config.path)
            self._file = _TraceFile(target, maxBytes=config.max_bytes, backupCount=config.files, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"telemetry.path {config.path} cannot be written: {error.strerror}") from None
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._thread = Background("semblend-trace")

    def note(self, served: ServedRequest) -> None:
        """Has a line written, some time. Never waits."""
        with self._lock:
            is_full = self._waiting_bytes + served.body_bytes > MAX_WAITING_BYTES
            if not is_full:
                self._waiting_bytes += served.body_bytes
        if is_full:
            self._counters.trace_lines.labels("dropped").inc()
        else:
            self._thread.submit(lambda: self._write(served))

    def close(self) -> None:
        """Writes what waits, if that takes a moment only."""
        self._thread.close(CLOSE_SECONDS)
        self._file.close()

    def _write(self, served: ServedRequest) -> None:
        result = "failed"
        try:
            line = self._line(served).to_json()
            self._file.emit(logging.makeLogRecord({"msg": line}))
            result = "written"
        except OSError as error:
            logger.warning("a trace line cannot be written: %s", error)
        finally:
            with self._lock:
                self._waiting_bytes -= served.body_bytes
            self._counters.trace_lines.labels(result).inc()

    def _line(self, served: ServedRequest) -> TraceLine:
        caller, observed = served.caller, served.observed
        usage = usage_in(observed.tail)
        details = usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        cached, computed = _tokens(details.get("cached_tokens")), _tokens(details.get("computed_tokens"))
        prompt_tokens = _tokens(usage.get("prompt_tokens"))
        if computed is None and prompt_tokens is not None and cached is not None:
            computed = max(0, prompt_tokens - cached)
        metadata: dict[str, JsonValue] = {
            **served.metadata,
            "status": observed.status,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": _tokens(usage.get("completion_tokens")),
            "reused_tokens": _tokens(details.get("reused_tokens")),
        }
        try:
            blocks = self._maker.blocks(served.body, caller.tenant)
        except PromptError:
            blocks = []
        return TraceLine(
            request_id=served.request_id,
            timestamp_ms=served.timestamp_ms,
            session_id=None if caller.session is None else self._hasher.of_text(caller.tenant, caller.session),
            tenant_id=None if caller.tenant is None else self._hasher.of_text(None, caller.tenant),
            model_name=served.model,
            blocks=blocks,
            observed_ttft_ms=_milliseconds(observed.first_byte_seconds),
            observed_total_latency_ms=_milliseconds(observed.seconds),
            observed_prefix_hit_tokens=cached,
            observed_prefill_tokens=computed,
            metadata={name: value for name, value in metadata.items() if value is not None},
        )


class _TraceFile(RotatingFileHandler):
    """Raises what the file raises, where a handler of logs would write it to standard error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - the base class names it
        raise


def usage_in(tail: bytes) -> dict[str, Any]:
    """The usage that an answer, or the end of a stream, states; empty where it states none."""
    lines = [line.removeprefix(b"data:") for line in tail.splitlines() if b'"usage"' in line]
    for text in (tail, *reversed(lines)):
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            continue
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if isinstance(usage, dict):
            return usage
    return {}


def _tokens(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 28 else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
