"""What a library of donors tells the fleet, from the serving path: a few dictionary steps, never an exception."""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, ParamSpec, Protocol

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.counters import EventCounters
from semblend_trt.fleet.identity import generation, worker_id_of
from semblend_trt.fleet.outbox import Held, HeldDonors
from semblend_trt.fleet.publisher import EventPublisher
from semblend_trt.fleet.sketch import sketch_key
from semblend_trt.fleet.wire import Emitter

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.config import Settings
    from semblend_trt.namespace import CacheNamespace

logger = logging.getLogger(__name__)

_NAMED_AT_ONCE = 16
_Arguments = ParamSpec("_Arguments")
_PublisherKey = tuple[ConnectionOptions, Emitter, str, bool, float, float]


class DonorNews(Protocol):
    """Whom a library tells of its donors. No method waits or raises."""

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        """A donor of this namespace, bound to `salt`, may be held soon."""

    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        """The donor with these tokens (int32 [n], which nobody changes) is held in `tier`."""

    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        """The donor, kept by an earlier process, is held in `tier`; told once a request has named its namespace."""

    def embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        """The donor, told of before, has this vector (float32 [dim], which nobody changes); any thread may say so."""

    def moved(self, donor_id: str, tier: str) -> None:
        """The donor is held in `tier` now."""

    def gone(self, donor_id: str) -> None:
        """The donor is not held, or will not be."""

    def close(self) -> None:
        """None of the donors is held any more."""


class Silence:
    """Tells nobody."""

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None: ...

    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None: ...

    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None: ...

    def embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None: ...

    def moved(self, donor_id: str, tier: str) -> None: ...

    def gone(self, donor_id: str) -> None: ...

    def close(self) -> None: ...


def _never_raises(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    @functools.wraps(method)
    def guarded(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("the fleet is not told of a donor")

    return guarded


class DonorAnnouncer:
    """Tells one publisher of one library's donors.

    All methods but `close` and `embedded` belong to the library's thread.
    """

    def __init__(self, publisher: EventPublisher, leave: Callable[[], None]) -> None:
        """`leave` is called once, by `close`, when nothing more is told."""
        self._publisher, self._leave = publisher, leave
        self._library = HeldDonors()
        self._intended: dict[str, tuple[CacheNamespace, bytes]] = {}
        # Donors of earlier processes, by namespace key, until somebody says which namespace that is.
        self._unnamed: dict[str, dict[str, Held]] = {}
        self._is_closed = False
        publisher.add(self._library)

    @_never_raises
    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        named = (namespace, b"" if salt is None else sketch_key(namespace.key, salt))
        self._intended[donor_id] = named
        if self._unnamed:
            self._name(*named)

    @_never_raises
    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        intended = self._intended.pop(donor_id, None)
        if intended is not None and not self._is_closed:
            self._library.donors[donor_id] = Held(*intended, tier, len(tokens), tokens)
            self._publisher.changed(self._library, donor_id)

    @_never_raises
    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        unnamed = self._unnamed.setdefault(namespace_key, {})
        unnamed[donor_id] = Held(None, b"", tier, len(tokens), tokens)

    @_never_raises
    def embedded(self, donor_id: str, vector: npt.NDArray[np.float32]) -> None:
        if not self._publisher.embeddings:
            return
        for unnamed in list(self._unnamed.values()):
            if donor_id in unnamed:
                unnamed[donor_id].embedding = vector
        held = self._library.donors.get(donor_id)
        if held is not None:
            held.embedding = vector
            self._publisher.changed(self._library, donor_id)

    @_never_raises
    def moved(self, donor_id: str, tier: str) -> None:
        held = self._library.donors.get(donor_id)
        if held is not None:
            held.tier = tier
            self._publisher.changed(self._library, donor_id)
        for unnamed in self._unnamed.values():
            if donor_id in unnamed:
                unnamed[donor_id].tier = tier

    @_never_raises
    def gone(self, donor_id: str) -> None:
        self._intended.pop(donor_id, None)
        for unnamed in self._unnamed.values():
            unnamed.pop(donor_id, None)
        if self._library.donors.pop(donor_id, None) is not None:
            self._publisher.changed(self._library, donor_id)

    @_never_raises
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._intended.clear()
            self._unnamed.clear()
            self._publisher.remove(self._library)
            self._leave()

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
            self._publisher.changed(self._library, donor_id)


_lock = threading.Lock()
_publishers: dict[_PublisherKey, tuple[EventPublisher, int]] = {}


def announcer_for(settings: Settings) -> DonorNews:
    """Whom a library of an engine with these settings tells. All engines of a process share one publisher."""
    try:
        options = ConnectionOptions.of(settings)
        if options is None or not settings.enabled:
            return Silence()
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
    return Silence()


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
