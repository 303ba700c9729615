"""How donors move between tiers: the scheduler's commands, and rank 0's events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.discovery.fingerprint import equal_around, read_only
from semblend_trt.donors.catalog import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from semblend_trt.discovery.fingerprint import TokenArray
    from semblend_trt.donors.catalog import DonorCatalog, TierMoves
    from semblend_trt.namespace import CacheNamespace

# Each fetch and each promotion holds room in two tiers until it has ended.
MAX_FETCHES, MAX_PROMOTIONS = 4, 2
# Fetches that no lookup asked for begin only while fewer than this are under way.
MAX_PREFETCHES = 2
# A lookup waits while it indexes donors found on disk: at most this number.
_FOUND_AT_ONCE = 4


@dataclass(frozen=True, slots=True, eq=False)
class DonorText:
    """A donor's `tokens`, int32 [n], by which texts are sorted. `generation`: above 0 if built from approximate KV."""

    donor_id: str
    namespace_key: str
    tokens: TokenArray
    generation: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", read_only(self.tokens))

    def common(self, other: DonorText) -> int:
        """Return the number of first tokens that both texts have."""
        return equal_around(self.tokens, 0, other.tokens, 0)[0]

    def __lt__(self, other: DonorText) -> bool:
        common = self.common(other)
        if common == min(len(self.tokens), len(other.tokens)):
            return len(self.tokens) < len(other.tokens)
        return bool(self.tokens[common] < other.tokens[common])


@dataclass(frozen=True, slots=True)
class SaveIntent:
    """If the request finishes, its first `max_tokens` written tokens may become donor `donor_id`.

    `generation` is above 0 where their KV will be built from approximate KV. The workers get the intent once the
    request has ended: `tier` then has room for all tokens, and with `is_written` the donor also gets a file.
    `block_ids` are the request's at its end, if they are not those that the workers have followed."""

    request_id: int
    donor_id: str
    max_tokens: int
    tier: Tier = Tier.HOST
    is_written: bool = False
    generation: int = 0
    prompt_tokens: int = 0
    block_ids: tuple[int, ...] = ()


class OffloadEventKind(str, Enum):
    """What happened to a donor or the disk. The values are metric labels, which call a promotion a lift."""

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
    """`donor_id` may be empty. FILE_FOUND has a `text`; `is_full`: the disk had no room for the file."""

    kind: OffloadEventKind
    donor_id: str = ""
    error: str | None = None
    text: DonorText | None = None
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class SavedDonor:
    """What the worker holds of a donor: `tokens` positions; 0 when `error` says why not."""

    donor_id: str
    tokens: int
    error: str | None = None


@dataclass(slots=True)
class DiskLink:
    """Exists while the disk tier is open.

    `texts`: the scheduler's, of all donors by id. `found`: events of files present at the start."""

    texts: dict[str, DonorText] = field(default_factory=dict)
    found: deque[OffloadEvent] = field(default_factory=deque)


@dataclass(slots=True)
class OffloadCommands:
    """Commands to every rank's tiers for one iteration.

    Before a forward `drops` go from every tier, and `releases` leave memory but keep their files. `fetches` are read
    from their files to the host. After the launch `offloads` move from the device to the host. Then `writes` among
    these, and among host donors, get a file. `promotions` are copied to the device and leave the host. `saves`, for
    which all this makes room, begin last."""

    drops: list[str] = field(default_factory=list)
    offloads: list[str] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    fetches: list[str] = field(default_factory=list)
    promotions: list[str] = field(default_factory=list)
    saves: list[SaveIntent] = field(default_factory=list)


class DonorObserver:
    """Hear of an engine's donors on the scheduler's thread, and do nothing. No method waits or raises.

    Token arrays are int32 [n] and never change."""

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        """Note that a donor of this namespace, bound to `salt`, may be held soon."""

    def held(self, donor_id: str, tokens: TokenArray, tier: str) -> None:
        """Note that the donor with these tokens is held in `tier`."""

    def found(self, donor_id: str, namespace_key: str, tokens: TokenArray, tier: str) -> None:
        """Note that a donor that an earlier process saved is held in `tier`."""

    def moved(self, donor_id: str, tier: str) -> None:
        """Note that the donor is held in `tier` now."""

    def gone(self, donor_id: str) -> None:
        """Note that the donor is no longer held, or its save failed."""

    def is_broken(self, profile: str, namespace_key: str) -> bool:  # noqa: ARG002
        """Return whether spot checks found a profile's promise broken in a namespace."""
        return False

    def close(self) -> None:
        """Note that the engine ends, and all its donors with it."""


class OffloadQueue:
    """Collect tier commands, keep the catalog in step with tier events, and inform the observers.

    A donor on disk alone is never promised: a lookup that would have used it has it fetched, and a later one finds it
    in memory. A donor used from host memory is promoted to the device, if there is one."""

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
        """Return the commands since the last call; they must reach the workers before later ones."""
        taken, self._commands = self._commands, OffloadCommands()
        return taken

    def make_room(self, moves: TierMoves) -> None:
        """Add the commands that make room for a donor that the catalog has placed."""
        self.drop(moves.dropped)
        self._commands.releases += moves.released
        self._commands.offloads += moves.offloaded
        for donor_id in moves.released:
            self._moved(donor_id, Tier.DISK)
        for donor_id in moves.offloaded:
            self._moved(donor_id, Tier.HOST)
        self._commands.writes.extend(donor_id for donor_id in moves.written if donor_id in moves.offloaded)

    def save(self, intent: SaveIntent) -> None:
        """Have an ended request's KV saved after the commands so far, which make room; a file may follow."""
        self._commands.saves.append(intent)

    def drop(self, donor_ids: Iterable[str]) -> None:
        """Have donors dropped that the catalog no longer holds."""
        for donor_id in donor_ids:
            self._commands.drops.append(donor_id)
            self.forget(donor_id)

    def forget(self, donor_id: str) -> None:
        """Report the donor as gone; it gets no file."""
        for observer in self._observers:
            observer.gone(donor_id)

    def fetch(self, donor_ids: Iterable[str], most: int = MAX_FETCHES, *, may_drop: bool = True) -> None:
        """Read donors back from disk in this order, while room lasts and fewer than `most` are on their way."""
        for donor_id in donor_ids:
            if len(self._fetching) < most and (moves := self._catalog.fetch(donor_id, may_drop=may_drop)) is not None:
                self.make_room(moves)
                self._commands.fetches.append(donor_id)
                self._fetching.add(donor_id)

    def prefetch(self, donor_ids: Iterable[str]) -> None:
        """Read back donors that a later lookup may use: few at once, and only where no donor is lost for it.

        Equal tokens still decide what that lookup reuses."""
        self.fetch(donor_ids, MAX_PREFETCHES, may_drop=False)

    def promote(self, donor_ids: Iterable[str]) -> None:
        """Copy donors of the host to the device in this order, while room lasts and few are on their way."""
        for donor_id in donor_ids:
            if len(self._promoting) < MAX_PROMOTIONS and (moves := self._catalog.promote(donor_id)) is not None:
                self.make_room(moves)
                self._commands.promotions.append(donor_id)
                self._promoting.add(donor_id)

    def take_events(self, events: deque[OffloadEvent]) -> Iterator[DonorText]:
        """Take all events, and a few donors that were found on disk.

        Yields the text of each donor that the catalog has adopted before it takes anything else."""
        while events:
            yield from self._take(events.popleft())
        for _ in range(_FOUND_AT_ONCE):
            if self._link is not None and self._link.found:
                yield from self._take(self._link.found.popleft())

    def _take(self, event: OffloadEvent) -> Iterator[DonorText]:
        self._count(event.kind)
        kind, donor_id = event.kind, event.donor_id
        if kind is OffloadEventKind.FILE_FOUND and event.text is not None:
            if (dropped := self._catalog.adopt(donor_id, len(event.text.tokens))) is None:
                self._commands.drops.append(donor_id)
            else:
                self.drop(dropped)
                yield event.text
        elif kind is OffloadEventKind.FILES_READ:
            # Before this event, the disk may hold files that the catalog has not counted.
            self._catalog.begin_writing()
        elif kind in (OffloadEventKind.FILE_WRITTEN, OffloadEventKind.WRITE_FAILED, OffloadEventKind.WRITE_SKIPPED):
            self._catalog.written(donor_id, kind is OffloadEventKind.FILE_WRITTEN, is_full=event.is_full)
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

    def _moved(self, donor_id: str, tier: Tier) -> None:
        for observer in self._observers:
            observer.moved(donor_id, tier.value)
