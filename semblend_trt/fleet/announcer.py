"""What a library of donors tells the fleet, from the serving path: a few dictionary steps, never an exception."""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import threading
import time
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.publisher import EventCounters, EventPublisher, Held, HeldDonors
from semblend_trt.fleet.sketch import sketch_key
from semblend_trt.fleet.wire import Emitter

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.config import Settings
    from semblend_trt.namespace import CacheNamespace


_MOST = (1 << 53) - 1


def worker_id_of(setting: int | None, host_name: str | None = None) -> int:
    """The worker id: the setting, else the number behind the last hyphen of the host's name, else 0."""
    if setting is not None:
        return setting
    label = (socket.gethostname() if host_name is None else host_name).split(".")[0]
    found = re.search(r"-([0-9]{1,16})$", label)
    return min(int(found[1]), _MOST) if found else 0


def generation() -> int:
    """This process's generation: microseconds since 1970 when it was first asked for, so that a restart's is higher."""
    return _generation_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _generation_of(process: int) -> int:  # noqa: ARG001 - a forked child speaks for itself
    return time.time_ns() // 1000


logger = logging.getLogger(__name__)

_NAMED_AT_ONCE = 16
_UNTOLD = "the fleet is not told of a donor"
_PublisherKey = tuple[ConnectionOptions, Emitter, str, bool, float, float]


class DonorPublisher:
    """What is told of an engine's donors. This one tells nothing. No method waits or raises."""

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        """A donor of this namespace, bound to `salt`, may be held soon."""

    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        """The donor with these tokens (int32 [n], which nothing changes) is held in `tier`."""

    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        """The donor, kept by an earlier process, is held in `tier`; told once a request has named its namespace."""

    def embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        """The donor, told of before, has this vector (float32 [dim], which nothing changes). For any thread."""

    def moved(self, donor_id: str, tier: str) -> None:
        """The donor is held in `tier` now."""

    def gone(self, donor_id: str) -> None:
        """The donor is not held, or will not be."""

    def close(self) -> None:
        """None of the donors is held any more."""


class DonorAnnouncer(DonorPublisher):
    """Tells one publisher of one library's donors.

    All methods but `close` and `embedded` belong to the library's thread.
    """

    def __init__(self, publisher: EventPublisher, leave: Callable[[], None]) -> None:
        """`leave` is called once, by `close`, when nothing more is told."""
        self._publisher, self._changed, self._leave = publisher, publisher.changed, leave
        self._library = HeldDonors()
        self._intended: dict[str, tuple[CacheNamespace, bytes]] = {}
        # Donors of earlier processes, by namespace key, until a request says which namespace that is.
        self._unnamed: dict[str, dict[str, Held]] = {}
        self._is_closed = False
        publisher.add(self._library)

    # Each call guards itself: one that did it for all of them would be another step of every event.

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        try:
            named = (namespace, b"" if salt is None else sketch_key(namespace.key, salt))
            self._intended[donor_id] = named
            if self._unnamed:
                self._name(*named)
        except Exception:
            logger.exception(_UNTOLD)

    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        try:
            named = self._intended.pop(donor_id, None)
            if named is not None and not self._is_closed:
                self._library.donors[donor_id] = Held(named[0], named[1], tier, len(tokens), tokens)
                self._changed(self._library, donor_id)
        except Exception:
            logger.exception(_UNTOLD)

    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        try:
            unnamed = self._unnamed.setdefault(namespace_key, {})
            unnamed[donor_id] = Held(None, b"", tier, len(tokens), tokens)
        except Exception:
            logger.exception(_UNTOLD)

    def embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        try:
            if not self._publisher.embeddings:
                return
            for unnamed in list(self._unnamed.values()):
                if donor_id in unnamed:
                    unnamed[donor_id].embedding = vector
            held = self._library.donors.get(donor_id)
            if held is not None:
                held.embedding = vector
                self._changed(self._library, donor_id)
        except Exception:
            logger.exception(_UNTOLD)

    def moved(self, donor_id: str, tier: str) -> None:
        try:
            held = self._library.donors.get(donor_id)
            if held is not None:
                held.tier = tier
                self._changed(self._library, donor_id)
            if self._unnamed:
                for unnamed in self._unnamed.values():
                    if donor_id in unnamed:
                        unnamed[donor_id].tier = tier
        except Exception:
            logger.exception(_UNTOLD)

    def gone(self, donor_id: str) -> None:
        try:
            self._intended.pop(donor_id, None)
            if self._unnamed:
                for unnamed in self._unnamed.values():
                    unnamed.pop(donor_id, None)
            if self._library.donors.pop(donor_id, None) is not None:
                self._changed(self._library, donor_id)
        except Exception:
            logger.exception(_UNTOLD)

    def close(self) -> None:
        try:
            if not self._is_closed:
                self._is_closed = True
                self._intended.clear()
                self._unnamed.clear()
                self._publisher.remove(self._library)
                self._leave()
        except Exception:
            logger.exception(_UNTOLD)

    def _name(self, namespace: CacheNamespace, salted_key: bytes) -> None:
        """Tells of some donors that were found in this namespace; the others wait for the next request."""
        unnamed = self._unnamed.get(namespace.key)
        for _ in range(_NAMED_AT_ONCE):
            if not unnamed:
                self._unnamed.pop(namespace.key, None)
                return
            donor_id, held = unnamed.popitem()
            held.namespace, held.salted_key = namespace, salted_key
            self._library.donors[donor_id] = held
            self._changed(self._library, donor_id)


_lock = threading.Lock()
_publishers: dict[_PublisherKey, tuple[EventPublisher, int]] = {}


def announcer_for(settings: Settings) -> DonorPublisher:
    """Whom a library of an engine with these settings tells. All engines of a process share one publisher."""
    try:
        options = ConnectionOptions.of(settings)
        if options is None or not settings.enabled:
            return DonorPublisher()
        emitter = Emitter(worker_id_of(settings.worker_id), 0, generation())
        key = (
            options,
            emitter,
            settings.event_format.value,
            settings.event_embeddings,
            settings.heartbeat_seconds,
            settings.resync_seconds,
        )
        with _lock:
            publisher, users = _publishers.get(key) or (_publisher_for(settings, options, emitter), 0)
            _publishers[key] = (publisher, users + 1)
        return DonorAnnouncer(publisher, lambda: _leave(key))
    except ConfigurationError as error:
        logger.warning("the fleet is told of no donors: %s", error)
    except Exception:
        logger.exception("the fleet is told of no donors")
    return DonorPublisher()


def _publisher_for(settings: Settings, options: ConnectionOptions, emitter: Emitter) -> EventPublisher:
    return EventPublisher(
        options,
        emitter,
        EventCounters(settings.metrics),
        form=settings.event_format,
        embeddings=settings.event_embeddings,
        heartbeat_seconds=settings.heartbeat_seconds,
        resync_seconds=settings.resync_seconds,
    )


def _leave(key: _PublisherKey) -> None:
    with _lock:
        publisher, users = _publishers.pop(key)
        if users > 1:
            _publishers[key] = (publisher, users - 1)
            return
    publisher.close()
