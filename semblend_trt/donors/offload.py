"""How donors move between tiers: the scheduler's commands, rank 0's events, and the transfers to and from disk."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.background import Background, OnceAMinute
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.disk_tier import DonorFileError, DonorText

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from semblend_trt.donors.catalog import DonorCatalog, TierMoves
    from semblend_trt.donors.disk_tier import DiskTier
    from semblend_trt.donors.host_tier import HostTier
    from semblend_trt.donors.observer import DonorObserver

logger = logging.getLogger(__name__)
logger.addFilter(OnceAMinute(by_values=False))

# Each fetch and each promotion holds room in two tiers until it has ended.
MAX_FETCHES, MAX_PROMOTIONS = 4, 2
# Fetches that no look-up has asked for begin only while fewer than this are under way.
MAX_PREFETCHES = 2
# A look-up indexes at most this many donors that were found on disk: it waits for them.
_FOUND_AT_ONCE = 4
# A donor that waits to be written cannot leave host memory; on a slow disk more of them would crowd the others out.
MAX_WAITING = 8
_CLOSING_SECONDS = 60.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class SaveIntent:
    """If the request finishes, its first `max_tokens` written tokens may be kept as donor `donor_id`; its prompt is
    `prompt_tokens` of them. `generation` is above 0 where these tokens' KV will be built from approximate KV.

    To the workers it goes once the request has ended: then there is room for all of its tokens in `tier`, and with
    `is_written` the donor gets a file on disk as well.
    """

    request_id: int
    donor_id: str
    max_tokens: int
    tier: Tier = Tier.HOST
    is_written: bool = False
    generation: int = 0
    prompt_tokens: int = 0


class OffloadEventKind(str, Enum):
    """What happened to a donor, or to the disk. The values are the metric's labels, which call a promotion a lift."""

    FILE_FOUND = "file_found"
    FILE_REFUSED = "file_refused"
    FILES_READ = "files_read"
    FILE_WRITTEN = "file_written"
    WRITE_FAILED = "write_failed"
    WRITE_SKIPPED = "write_skipped"
    FETCHED = "fetched"
    FETCH_FAILED = "fetch_failed"
    PROMOTED = "lifted"
    PROMOTE_FAILED = "lift_failed"
    DISK_UNAVAILABLE = "disk_unavailable"


@dataclass(frozen=True, slots=True)
class OffloadEvent:
    """One event; `donor_id` may be empty. FILE_FOUND and WRITE_FAILED have a `text`; a full disk has `free` bytes."""

    kind: OffloadEventKind
    donor_id: str = ""
    error: str | None = None
    text: DonorText | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class SavedDonor:
    """What the worker holds of one donor: `tokens` positions; 0 when `error` says why it could not be kept."""

    donor_id: str
    tokens: int
    error: str | None = None


@dataclass(slots=True)
class DiskLink:
    """Exists while the disk tier is open. The scheduler keeps in `texts` the donors that may get a file and have none
    yet. `found` are events of the files that were there at the start."""

    texts: dict[str, DonorText] = field(default_factory=dict)
    found: deque[OffloadEvent] = field(default_factory=deque)


@dataclass(slots=True)
class OffloadCommands:
    """Before a forward `drops` go from every tier, `releases` leave memory and keep their files, and `fetches` are read
    back from their files to the host. Behind its launch `offloads` move from the device to the host, and get a file if
    they are among `writes`, as donors of the host do; `promotions` are copied to the device and then leave the host.
    Then `saves` begin, for which all of that makes room."""

    drops: list[str] = field(default_factory=list)
    offloads: list[str] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    fetches: list[str] = field(default_factory=list)
    promotions: list[str] = field(default_factory=list)
    saves: list[SaveIntent] = field(default_factory=list)


class OffloadQueue:
    """Collects commands for the tiers, keeps the catalog in step with the tiers' events, and tells the observers.

    A donor on disk alone is never promised: a look-up that would have used it has it fetched, and a later one finds it
    in memory. A donor that is used from host memory is promoted to the device, if there is one.
    """

    def __init__(
        self,
        catalog: DonorCatalog,
        observers: Sequence[DonorObserver],
        link: DiskLink | None,
        count: Callable[[OffloadEventKind], None],
    ) -> None:
        self._catalog, self._observers, self._link, self._count = catalog, observers, link, count
        self._commands = OffloadCommands()
        self._fetching: set[str] = set()
        self._promoting: set[str] = set()

    def take_commands(self) -> OffloadCommands:
        """The commands since the last call; they must reach the workers before any later ones."""
        taken, self._commands = self._commands, OffloadCommands()
        return taken

    def make_room(self, moves: TierMoves) -> None:
        """Adds the commands that make room for a donor that the catalog has placed."""
        self.drop(moves.dropped)
        for donor_id in moves.released:
            self._commands.releases.append(donor_id)
            self._moved(donor_id, Tier.DISK)
        for donor_id in moves.offloaded:
            self._commands.offloads.append(donor_id)
            self._moved(donor_id, Tier.HOST)
        self._commands.writes.extend(donor_id for donor_id in moves.written if donor_id in moves.offloaded)

    def save(self, intent: SaveIntent, text: DonorText) -> None:
        """Has an ended request's KV saved, for which the commands up to now make room; it may get a file later."""
        self._commands.saves.append(intent)
        if self._link is not None:
            self._link.texts[intent.donor_id] = text

    def drop(self, donor_ids: Iterable[str]) -> None:
        """Has donors dropped that the catalog no longer holds."""
        for donor_id in donor_ids:
            self._commands.drops.append(donor_id)
            self.forget(donor_id)

    def forget(self, donor_id: str) -> None:
        """The donor is not held any more, and gets no file."""
        for observer in self._observers:
            observer.gone(donor_id)
        if self._link is not None:
            self._link.texts.pop(donor_id, None)

    def fetch(self, donor_ids: Iterable[str]) -> None:
        """Reads donors back from disk, the first ones first, as far as there is room and few are on their way."""
        for donor_id in donor_ids:
            if len(self._fetching) < MAX_FETCHES:
                self._begin_fetch(donor_id, self._catalog.fetch(donor_id))

    def prefetch(self, donor_ids: Iterable[str]) -> None:
        """Reads donors back that a later lookup may use: few at once, and only where no other donor is lost for it.

        Equal tokens still decide what that lookup reuses.
        """
        for donor_id in donor_ids:
            if len(self._fetching) < MAX_PREFETCHES:
                self._begin_fetch(donor_id, self._catalog.fetch(donor_id, may_drop=False))

    def promote(self, donor_ids: Iterable[str]) -> None:
        """Copies donors of the host to the device, the first ones first, as far as there is room and few are on their
        way."""
        for donor_id in donor_ids:
            if len(self._promoting) < MAX_PROMOTIONS and (moves := self._catalog.promote(donor_id)) is not None:
                self.make_room(moves)
                self._commands.promotions.append(donor_id)
                self._promoting.add(donor_id)

    def take_events(self, events: deque[OffloadEvent]) -> Iterator[tuple[str, DonorText]]:
        """Takes all events, and of the donors that were found on disk a few. Yields those that the catalog has taken
        in, each before anything else is taken."""
        while events:
            yield from self._take(events.popleft())
        for _ in range(_FOUND_AT_ONCE):
            if self._link is not None and self._link.found:
                yield from self._take(self._link.found.popleft())

    def _take(self, event: OffloadEvent) -> Iterator[tuple[str, DonorText]]:
        self._count(event.kind)
        kind, donor_id = event.kind, event.donor_id
        if kind is OffloadEventKind.FILE_FOUND and event.text is not None:
            dropped = self._catalog.adopt(donor_id, len(event.text.tokens), event.text.generation)
            if dropped is None:
                self._commands.drops.append(donor_id)
            else:
                self.drop(dropped)
                yield donor_id, event.text
        elif kind is OffloadEventKind.FILES_READ:
            # Before, the disk may hold files that the catalog has not counted yet.
            self._catalog.begin_writing()
        elif kind in (OffloadEventKind.FILE_WRITTEN, OffloadEventKind.WRITE_FAILED, OffloadEventKind.WRITE_SKIPPED):
            dropped = self._catalog.written(donor_id, kind is OffloadEventKind.FILE_WRITTEN, event.free)
            if dropped is not None and event.text is not None and self._link is not None:
                self.drop(dropped)
                self._link.texts[donor_id] = event.text
                self._commands.writes.append(donor_id)
        elif kind in (OffloadEventKind.PROMOTED, OffloadEventKind.PROMOTE_FAILED):
            self._promoting.discard(donor_id)
            self._catalog.promoted(donor_id, kind is OffloadEventKind.PROMOTED)
            self._moved(donor_id, self._catalog.tier(donor_id) or Tier.HOST)
        elif kind in (OffloadEventKind.FETCHED, OffloadEventKind.FETCH_FAILED):
            self._fetching.discard(donor_id)
            is_here = kind is OffloadEventKind.FETCHED
            if self._catalog.fetched(donor_id, is_here) and not is_here:
                self.drop([donor_id])
            elif is_here:
                self._moved(donor_id, Tier.HOST)

    def _begin_fetch(self, donor_id: str, moves: TierMoves | None) -> None:
        if moves is not None:
            self.make_room(moves)
            self._commands.fetches.append(donor_id)
            self._fetching.add(donor_id)

    def _moved(self, donor_id: str, tier: Tier) -> None:
        for observer in self._observers:
            observer.moved(donor_id, tier.value)


class DiskTransfers:
    """Writes donors' files and reads them back in the background, on one thread each.

    Every `write` and every `fetch` ends in exactly one event, also when it fails. A donor is readable only after all of
    its bytes have been read back and checked.
    """

    def __init__(self, disk: DiskTier, host: HostTier, link: DiskLink, events: deque[OffloadEvent]) -> None:
        """Begins to look for the files that are there."""
        self._disk, self._host, self._link, self._events = disk, host, link, events
        self._waiting = 0
        self._lock = threading.Lock()
        self._writer, self._reader = Background("semblend-write"), Background("semblend-fetch")
        self._reader.submit(self._scan)

    def write(self, donor_id: str) -> None:
        """Begins writing a donor of host memory; with MAX_WAITING before it, it stays without a file."""
        with self._lock:
            is_taken = self._waiting < MAX_WAITING
            self._waiting += is_taken
        if is_taken:
            self._writer.submit(lambda: self._write(donor_id))
        else:
            self._tell(OffloadEventKind.WRITE_SKIPPED, donor_id, f"{MAX_WAITING} donors wait to be written")

    def fetch(self, donor_id: str) -> None:
        """Begins reading a donor back into host memory."""
        self._reader.submit(lambda: self._fetch(donor_id))

    def drop(self, donor_id: str) -> None:
        """Begins removing a donor's file, behind what is being written."""
        self._writer.submit(lambda: self._drop(donor_id))

    def drain(self) -> None:
        """Waits until everything that was begun has ended."""
        self._reader.drain()
        self._writer.drain()

    def close(self) -> None:
        """Waits, for a minute at most, until what was begun has ended."""
        end = time.monotonic() + _CLOSING_SECONDS
        closed = [thread.close(max(0.0, end - time.monotonic())) for thread in (self._reader, self._writer)]
        if all(closed):
            self._disk.close()
        else:
            logger.warning("the disk does not answer; donors that were being written are lost")

    def _write(self, donor_id: str) -> None:
        text = self._link.texts.pop(donor_id, None)
        try:
            if text is None:
                self._tell(OffloadEventKind.WRITE_SKIPPED, donor_id, "the donor is gone")
                return
            with self._host.reading(donor_id) as kv:
                text = replace(text, tokens=text.tokens[: kv.capacity])
                self._disk.write(donor_id, text, kv)
        except Exception as error:
            logger.warning("the file of donor %s cannot be written: %s", donor_id, error)
            free = None
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                free = self._disk.free_bytes() if self._waiting == 1 else 0  # others that wait take of it
            self._events.append(OffloadEvent(OffloadEventKind.WRITE_FAILED, donor_id, repr(error), text, free))
            return
        finally:
            with self._lock:
                self._waiting -= 1
        self._tell(OffloadEventKind.FILE_WRITTEN, donor_id)

    def _fetch(self, donor_id: str) -> None:
        try:
            form, tokens = self._disk.form, self._disk.tokens_of(donor_id)
            with self._host.writing(donor_id, form.shape(tokens), form.dtype) as held:
                self._disk.read(donor_id, held)
        except Exception as error:
            logger.warning("donor %s cannot be read back: %s", donor_id, error)
            self._tell(OffloadEventKind.FETCH_FAILED, donor_id, f"{type(error).__name__}: {error}")
            return
        self._tell(OffloadEventKind.FETCHED, donor_id)

    def _drop(self, donor_id: str) -> None:
        try:
            self._disk.forget(donor_id)
        except OSError as error:
            logger.warning("the file of donor %s cannot be removed: %s", donor_id, error)

    def _scan(self) -> None:
        try:
            for each in self._disk.scan():
                if isinstance(each, DonorFileError):
                    self._link.found.append(OffloadEvent(OffloadEventKind.FILE_REFUSED, "", f"{each.reason}: {each}"))
                else:
                    donor_id, text = each
                    self._link.found.append(OffloadEvent(OffloadEventKind.FILE_FOUND, donor_id, None, text))
        except Exception as error:
            logger.exception("the donors' folder cannot be read; nothing is written to it either")
            self._tell(OffloadEventKind.DISK_UNAVAILABLE, "", f"{type(error).__name__}: {error}")
            return
        self._link.found.append(OffloadEvent(OffloadEventKind.FILES_READ))

    def _tell(self, event: OffloadEventKind, donor_id: str, error: str | None = None) -> None:
        self._events.append(OffloadEvent(event, donor_id, error))
