"""Announces an engine's donors to the fleet, on the serving path: a few dictionary steps, and never an exception."""

from __future__ import annotations

import functools
import os
import re
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

from semblend_trt.background import quiet_logger
from semblend_trt.donors.offload import DonorObserver
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.sketch import Held, sketch_key

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.config import Settings
    from semblend_trt.fleet.publisher import EventPublisher
    from semblend_trt.namespace import CacheNamespace

logger = quiet_logger(__name__)
_P = ParamSpec("_P")

_LARGEST_ID = (1 << 53) - 1
# Most donors of an earlier process that one request announces.
_FOUND_AT_ONCE = 16
_lock = threading.Lock()
# Each publisher and the number of its engines, by what it was made of.
_publishers: dict[tuple[Any, ...], tuple[EventPublisher, int]] = {}


def worker_id_of(setting: int | None) -> int:
    """Return the worker id: the setting, else the number after the last hyphen of the host's name, else 0."""
    if setting is not None:
        return setting
    found = re.search(r"-([0-9]{1,16})$", socket.gethostname().split(".")[0])
    return min(int(found[1]), _LARGEST_ID) if found else 0


@functools.lru_cache(maxsize=1)
def generation_of(process: int) -> int:  # noqa: ARG001 - a forked child has a generation of its own
    """Return a process's generation: microseconds since 1970 at the first call, so that a restart raises it."""
    return time.time_ns() // 1000


def _guarded(method: Callable[_P, None]) -> Callable[_P, None]:
    """Log what the method raises: events must never fail serving."""

    @functools.wraps(method)
    def call(*args: _P.args, **keywords: _P.kwargs) -> None:
        try:
            method(*args, **keywords)
        except Exception:
            logger.exception("a change of a donor is not announced")

    return call


class DonorAnnouncer(DonorObserver):
    """Announces one engine's donors through a publisher, which other engines of the process may share.

    A donor that an earlier process saved is announced after a request names its namespace. `close` calls `leave` once.
    All methods but `close` and `embedded` belong to the scheduler's thread."""

    def __init__(self, publisher: EventPublisher, leave: Callable[[], None]) -> None:
        self._publisher, self._leave = publisher, leave
        self._intended: dict[str, tuple[CacheNamespace, bytes]] = {}
        # Ids of donors of earlier processes, by namespace key. Without a namespace the publisher leaves them out.
        self._found: dict[str, list[str]] = {}
        self._own: set[str] = set()
        self._is_closed = False

    @property
    def worker(self) -> str:
        """Return the worker's id and rank, as gateways name it."""
        return f"{self._publisher.emitter.worker_id}.{self._publisher.emitter.dp_rank}"

    @_guarded
    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        salted_key = b"" if salt is None else sketch_key(namespace.key, salt)
        self._intended[donor_id] = namespace, salted_key
        found = self._found.get(namespace.key, [])
        for name in (found.pop() for _ in range(min(_FOUND_AT_ONCE, len(found)))):
            if (held := self._publisher.donors.get(name)) is not None:
                self._announce(name, replace(held, namespace=namespace, salted_key=salted_key))
        if not found:
            self._found.pop(namespace.key, None)

    @_guarded
    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        if (named := self._intended.pop(donor_id, None)) is not None and not self._is_closed:
            self._announce(donor_id, Held(*named, tier, len(tokens), tokens))

    @_guarded
    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        self._found.setdefault(namespace_key, []).append(donor_id)
        self._own.add(donor_id)
        self._publisher.donors[donor_id] = Held(None, b"", tier, len(tokens), tokens)

    @_guarded
    def embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        """Give a held donor its vector (float32 [dim], never changed). Any thread may call this."""
        if self._publisher.embeddings:
            self._change(donor_id, "embedding", vector)

    @_guarded
    def moved(self, donor_id: str, tier: str) -> None:
        self._change(donor_id, "tier", tier)

    @_guarded
    def gone(self, donor_id: str) -> None:
        self._intended.pop(donor_id, None)
        self._own.discard(donor_id)
        if self._publisher.donors.pop(donor_id, None) is not None:
            self._publisher.changed(donor_id)

    def is_broken(self, profile: str, namespace_key: str) -> bool:
        return (profile, namespace_key) in self._publisher.broken

    @_guarded
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._leave()
            # A publisher that has ended has announced already that all donors are gone.
            for donor_id in list(self._own):
                self.gone(donor_id)

    def _announce(self, donor_id: str, held: Held) -> None:
        self._own.add(donor_id)
        self._publisher.donors[donor_id] = held
        self._publisher.changed(donor_id)

    def _change(self, donor_id: str, field: str, value: Any) -> None:
        if (held := self._publisher.donors.get(donor_id)) is not None:
            setattr(held, field, value)
            self._publisher.changed(donor_id)


def announcer_for(settings: Settings) -> DonorAnnouncer | None:
    """Return what announces an engine's donors. Never raise: return None without a server, or after an error. Engines
    of a process with equal settings share one EventPublisher."""
    try:
        if (options := ConnectionOptions.of(settings)) is None or not settings.enabled:
            return None
        from semblend_trt.fleet.events import Emitter
        from semblend_trt.fleet.publisher import EventCounters, EventPublisher

        emitter = Emitter(worker_id_of(settings.worker_id), 0, generation_of(os.getpid()))
        chosen = settings.event_format, settings.event_embeddings, settings.heartbeat_seconds, settings.resync_seconds
        key = (options, emitter, *chosen)
        with _lock:
            publisher, users = _publishers.get(key, (None, 0))
            if publisher is None:
                publisher = EventPublisher(options, emitter, EventCounters(settings.metrics), *chosen)
            _publishers[key] = publisher, users + 1
        return DonorAnnouncer(publisher, lambda: _leave(key))
    except ImportError:
        logger.warning("no donors are announced to the fleet: events need msgspec; install semblend-trt[nats]")
    except Exception:
        logger.exception("no donors are announced to the fleet")
    return None


def _leave(key: tuple[Any, ...]) -> None:
    with _lock:
        publisher, users = _publishers.pop(key)
        if users > 1:
            _publishers[key] = publisher, users - 1
            return
    publisher.close()
