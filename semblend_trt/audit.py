"""AuditLog: what was looked up, planned, moved and kept, as JSON lines. Serving never fails by it.

Line: {"schema": 1, "time": seconds since 1970 in UTC, "rank": int, "event": str, ...fields}, keys sorted.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCHEMA = 1


class AuditLog:
    """Buffered events of one rank. Without a path nothing is kept.

    Lines reach the file when `buffer_bytes` are waiting, on `flush`, on `close`, and when the log or the process ends.
    Each time all of them go out in one append, so ranks that share a file on a local file system never mix within a
    line. `dropped` counts the events that could not be written.
    """

    def __init__(self, path: str | Path | None, rank: int = 0, buffer_bytes: int = 64 * 1024) -> None:
        self._rank = rank
        self._file = None if path is None else _AppendFile(Path(path), buffer_bytes)
        if self._file is not None:
            weakref.finalize(self, self._file.close)

    @property
    def dropped(self) -> int:
        """Events lost to a full disk, a missing permission, a closed log, or values that JSON cannot hold."""
        return 0 if self._file is None else self._file.dropped

    def event(self, name: str, /, **fields: Any) -> None:
        """Records an event. Fields may hold JSON values, numpy scalars and arrays, enums, paths and sets."""
        if self._file is None:
            return
        line = _line({**fields, "schema": SCHEMA, "time": round(time.time(), 6), "rank": self._rank, "event": name})
        self._file.add(line)

    def flush(self) -> None:
        """Hands everything recorded so far to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file; later events are dropped. May be called twice."""
        if self._file is not None:
            self._file.close()


class _AppendFile:
    """Lines waiting for one append to one file, which stays open from the first append to `close`."""

    def __init__(self, path: Path, buffer_bytes: int) -> None:
        self._path, self._buffer_bytes = path, buffer_bytes
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._descriptor: int | None = None
        self._torn = self._closed = self._warned = False
        self.dropped = 0

    def add(self, line: bytes | None) -> None:
        with self._lock:
            if line is None or self._closed:
                self.dropped += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            if self._waiting_bytes >= self._buffer_bytes:
                self._write()

    def flush(self) -> None:
        with self._lock:
            self._write()

    def close(self) -> None:
        with self._lock:
            self._write()
            self._closed = True
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                try:
                    os.close(descriptor)
                except OSError as error:
                    self._warn(error)

    def _write(self) -> None:
        if not self._lines:
            return
        lines, self._lines, self._waiting_bytes = self._lines, [], 0
        # A line torn by a full disk is ended first, so that only that line is lost to a reader.
        batch = (b"\n" if self._torn else b"") + b"".join(lines)
        written = 0
        try:
            while written < len(batch):
                written += os.write(self._opened(), batch[written:])
        except OSError as error:
            kept = batch[:written].count(b"\n") - (self._torn and written > 0)
            self.dropped += len(lines) - kept
            self._torn = not batch[:written].endswith(b"\n") if written else self._torn
            self._warn(error)
        else:
            self._torn = False

    def _opened(self) -> int:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._descriptor

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("audit events are being lost, %s cannot be written: %s", self._path, error)


def _line(fields: Mapping[str, Any]) -> bytes | None:
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=_plain)
        # Python writes NaN and infinities, which are not JSON; they become null.
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(json.loads(text, parse_constant=lambda _: None), sort_keys=True, separators=(",", ":"))
    except Exception:  # whatever a field's own conversion raises costs this line, not the request
        return None
    return text.encode("ascii") + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()  # type: ignore[attr-defined]
    raise TypeError(f"{type(value).__name__} has no JSON form")
