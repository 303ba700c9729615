"""Outbox: what readers have been told, against what is held. It runs on the publisher's thread, without I/O or clock.

The serving path writes what it holds to a `HeldDonors` and notes the donor's id; the outbox compares the two, so that
changes of one donor that nobody was told of in between become one event or none.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from semblend_trt.discovery.fingerprint import as_token_array
from semblend_trt.fleet.events import EventError
from semblend_trt.fleet.sketch import sketch_key, sketches_of
from semblend_trt.fleet.wire import Announcement, donor_digest, token_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from semblend_trt.discovery.fingerprint import TokenArray
    from semblend_trt.fleet.counters import EventCounters
    from semblend_trt.fleet.wire import EventWriter
    from semblend_trt.namespace import CacheNamespace

logger = logging.getLogger(__name__)

# Donors are described together up to so many tokens, which stay in the processor's cache meanwhile.
PORTION_TOKENS = 16384


@dataclass(slots=True, eq=False)
class Held:
    """A donor as the serving path left it: `tokens` int32 [n] until it is sketched, then what was made of them.

    `namespace` is None until it is known; no library holds such a donor. `salted_key` is the sketch key of a request
    with a salt, empty for one without. `tier` may change, and `embedding` (float32 [dim]) may come later; `is_unfit`
    marks a donor that no event can tell of.
    """

    namespace: CacheNamespace | None
    salted_key: bytes
    tier: str
    count: int
    tokens: npt.NDArray[np.int32] | None
    embedding: npt.NDArray[np.float32] | None = None
    digest: int = 0
    sketch: bytes = b""
    is_unfit: bool = False


@dataclass(slots=True, eq=False)
class HeldDonors:
    """One library's donors by id. Written by the serving path, read by the publisher; each step of a dict is whole."""

    donors: dict[str, Held] = field(default_factory=dict)


class Notice(NamedTuple):
    """One message ready to be sent."""

    kind: str
    event_id: int
    payload: bytes


class _Told(NamedTuple):
    """What readers were told of a donor: which one the id meant, with which embedding, its tier, its part of the
    state's digest.
    """

    held: Held
    embedding: npt.NDArray[np.float32] | None
    tier: str
    digest: int


class Outbox:
    """Makes messages of changes. `changes` is what the serving path appends (library, donor id) to."""

    def __init__(self, writer: EventWriter, counters: EventCounters) -> None:
        self._writer, self._counters = writer, counters
        self._libraries: list[HeldDonors] = []
        self._told: dict[str, _Told] = {}
        self._digest = 0
        self._waiting: deque[tuple[HeldDonors, str]] = deque()
        self._reset_due = True
        self.changes: deque[tuple[HeldDonors, str]] = deque()

    def __len__(self) -> int:
        """Donors that may have changed since they were told of."""
        return len(self._waiting) + len(self.changes) + self._reset_due

    def add(self, library: HeldDonors) -> None:
        self._libraries.append(library)

    def remove(self, library: HeldDonors) -> None:
        """Takes a library out; what was told of its donors is taken back."""
        if library in self._libraries:
            self._libraries.remove(library)
            ids = list(library.donors)
            library.donors.clear()
            self._waiting.extend((library, donor_id) for donor_id in ids)

    def absorb(self, limit: int) -> int:
        """Describes up to `limit` changed donors, so that their tokens can go; returns how many there were."""
        changed = [self.changes.popleft() for _ in range(min(limit, len(self.changes)))]
        self._waiting.extend(changed)
        self._describe(library.donors.get(donor_id) for library, donor_id in changed)
        return len(changed)

    def forget_changes(self) -> int:
        """Drops what waits, since a resync will tell its result; returns the number."""
        count = len(self._waiting)
        self._waiting.clear()
        return count

    def resync(self) -> None:
        """From the next message on, readers are told everything from the start."""
        self._reset_due = True

    def take(self, limit: int) -> list[Notice]:
        """The next messages, at most `limit`; what they say counts as told."""
        taken: list[Notice] = []
        if self._reset_due and limit > 0:
            self._begin()
            taken.append(self._notice("provider_generation_reset", self._writer.reset()))
        while self._waiting and len(taken) < limit:
            notice = self._change_of(*self._waiting.popleft())
            if notice is not None:
                taken.append(notice)
        return taken

    def heartbeat(self, interval_seconds: float) -> Notice:
        """A sign of life that says what a reader that followed knows."""
        payload = self._writer.heartbeat(interval_seconds, len(self._told), self._digest)
        return self._notice("provider_heartbeat", payload)

    def purge(self) -> Notice:
        """The last word: nothing is held any more."""
        self._told, self._digest = {}, 0
        self._waiting.clear()
        return self._notice("donors_purged", self._writer.purged())

    def describe_all(self) -> None:
        """Describes whatever is held, after changes were lost."""
        for library in self._libraries:
            self._describe(list(library.donors.values()))

    def _begin(self) -> None:
        self._reset_due = False
        self._told, self._digest = {}, 0
        self._waiting = deque((library, donor_id) for library in self._libraries for donor_id in _ids_of(library))

    def _notice(self, kind: str, payload: bytes) -> Notice:
        return Notice(kind, self._writer.last_id, payload)

    def _change_of(self, library: HeldDonors, donor_id: str) -> Notice | None:
        """What has to be said of a donor; None when readers know all of it."""
        held, told = library.donors.get(donor_id), self._told.get(donor_id)
        if held is None or held.is_unfit:
            return None if told is None else self._evicted(donor_id)
        # Nothing but a registration can carry an embedding, and one of a known donor replaces what was known.
        if told is None or told.held is not held or told.embedding is not held.embedding:
            return self._registered(donor_id, held)
        tier = held.tier
        if told.tier == tier:
            return None
        self._note(donor_id, held, told.embedding, tier)
        return self._notice("donor_relocated", self._writer.relocated(donor_id, tier))

    def _evicted(self, donor_id: str) -> Notice:
        self._unlearn(donor_id)
        return self._notice("donor_evicted", self._writer.evicted(donor_id))

    def _registered(self, donor_id: str, held: Held) -> Notice | None:
        if held.tokens is not None:
            self._describe([held])
        if held.is_unfit or held.namespace is None:
            return None
        tier, embedding = held.tier, held.embedding
        announcement = Announcement(donor_id, held.namespace, tier, held.count, held.digest, held.sketch, embedding)
        try:
            payload = self._writer.registered(announcement)
        except EventError as error:
            logger.warning("donor %s is not announced: %s", donor_id, error)
            held.is_unfit = True
            self._counters.count_dropped("oversize")
            return None
        self._note(donor_id, held, embedding, tier)
        return self._notice("donor_registered", payload)

    def _note(self, donor_id: str, held: Held, embedding: npt.NDArray[np.float32] | None, tier: str) -> None:
        self._unlearn(donor_id)
        self._told[donor_id] = told = _Told(held, embedding, tier, donor_digest(donor_id, tier))
        self._digest ^= told.digest

    def _unlearn(self, donor_id: str) -> None:
        told = self._told.pop(donor_id, None)
        if told is not None:
            self._digest ^= told.digest

    def _describe(self, donors: Iterable[Held | None]) -> None:
        """Describes those that are not yet, as many at a time as have PORTION_TOKENS tokens."""
        portion: list[Held] = []
        size = 0
        for held in donors:
            if held is None or held.tokens is None or held.namespace is None:
                continue
            portion.append(held)
            size += held.count
            if size >= PORTION_TOKENS:
                self._describe_portion(portion)
                portion, size = [], 0
        if portion:
            self._describe_portion(portion)

    def _describe_portion(self, donors: list[Held]) -> None:
        """A donor that cannot be described costs only itself; it is left out, and counted."""
        try:
            _describe_all(donors)
        except Exception:
            if len(donors) > 1:
                for held in donors:
                    self._describe([held])
                return
            logger.exception("a donor of %d tokens cannot be described and is not announced", donors[0].count)
            donors[0].is_unfit, donors[0].tokens = True, None
            self._counters.count_dropped("internal_error")


def _describe_all(donors: list[Held]) -> None:
    """Makes sketches and digests and lets the tokens go."""
    texts = [_together(held.tokens) for held in donors if held.tokens is not None]
    tokens = np.frombuffer(bytearray().join(texts), dtype=np.int32)
    ends = np.cumsum([len(text) for text in texts])
    keys = [held.salted_key or _open_key(held.namespace.key) for held in donors if held.namespace is not None]
    sketches, start = sketches_of(tokens, ends, keys), 0
    wide = tokens.astype("<i8")
    for held, sketch, end in zip(donors, sketches, ends.tolist(), strict=True):
        held.sketch, held.digest, held.tokens = sketch, token_digest(wide[start:end], held.salted_key), None
        start = end


def _together(tokens: TokenArray) -> memoryview:
    """A request's ids as int32 that stand together; where they do, they are not looked through again."""
    return (tokens if tokens.dtype == np.int32 and tokens.flags.c_contiguous else as_token_array(tokens)).data


@functools.lru_cache(maxsize=64)
def _open_key(namespace_key: str) -> bytes:
    """The sketch key of a namespace's requests without a salt; those with one are secrets, and not remembered."""
    return sketch_key(namespace_key, None)


def _ids_of(library: HeldDonors) -> Iterable[str]:
    # One step for the interpreter's lock, so the serving path cannot change the dict meanwhile.
    return list(library.donors)
