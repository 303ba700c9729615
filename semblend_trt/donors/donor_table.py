"""Every donor's entry, the room it takes, and who would make more. Not thread safe; the catalog locks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.donors.donor_file import FileSize
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from semblend_trt.donors.eviction import DonorHistory, EvictionPolicy


@dataclass(frozen=True, slots=True)
class Capacities:
    """`host_bytes` bounds the KV bytes of one rank on the host; `bytes_per_token` is K and V of all its layers.

    The arena on the card has `device_blocks` blocks of `block_size` tokens. `disk_bytes` bounds the files, of which
    `file_size` says how large one becomes.
    """

    host_bytes: int
    bytes_per_token: int
    max_donors: int
    device_blocks: int = 0
    block_size: int = 1
    disk_bytes: int = 0
    file_size: FileSize = field(default_factory=lambda: FileSize(0, 0))

    @property
    def host_tokens(self) -> int:
        return self.host_bytes // self.bytes_per_token


class Tier(str, Enum):
    """What holds donors: the arena on the card, (page-locked) host memory, or files. On disk alone none is readable."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Placement:
    """A donor goes to `tier`. Before its bytes move there, `dropped` go, `released` leave memory for their files, and
    then `offloaded` move to the host, each in order. `written` of the offloaded, and the donor itself where it is named
    there, go on to disk as soon as they are in host memory."""

    tier: Tier
    offloaded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Size:
    """Room of one donor: tokens of host memory, blocks of the arena. `has_file`: it stays on disk when it leaves."""

    tokens: int
    blocks: int
    has_file: bool = False


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """What is left of each capacity; `donors` counts places of all tiers together."""

    tokens: int
    blocks: int
    donors: int


Candidate = tuple[str, Size]


class Candidates:
    """Donors of one tier that may go, the one to go first in front; those taken in vain are put back."""

    def __init__(self, donors: Iterable[Candidate] = ()) -> None:
        self._donors: Iterator[Candidate] = iter(donors)
        self._returned: list[Candidate] = []

    def next(self) -> Candidate | None:
        return self._returned.pop() if self._returned else next(self._donors, None)

    def take_tokens(self, missing: int) -> list[Candidate] | None:
        """The next donors that hold `missing` tokens together; None, and nothing is taken, when all do not."""
        taken: list[Candidate] = []
        while missing > 0:
            candidate = self.next()
            if candidate is None:
                self._returned.extend(reversed(taken))
                return None
            taken.append(candidate)
            missing -= candidate[1].tokens
        return taken


@dataclass(frozen=True, slots=True)
class Room:
    """What is free, and who of each tier may make more room."""

    free: FreeRoom
    host: Candidates
    device: Candidates
    disk: Candidates


def place_on_host(size: Size, room: Room) -> Placement | None:
    """Placement of a donor in host memory; None when the candidates do not make enough room."""
    taken = room.host.take_tokens(size.tokens - room.free.tokens)
    if taken is None:
        return None
    return _settled(Tier.HOST, [], taken, room)


def place_on_device(size: Size, room: Room) -> Placement | None:
    """Placement of a donor in the arena; None when the candidates do not make enough room.

    The displaced move down, the one used last having the first claim on host memory; those that do not fit there are
    dropped.
    """
    displaced: list[Candidate] = []
    blocks = room.free.blocks
    while blocks < size.blocks:
        candidate = room.device.next()
        if candidate is None:
            return None
        displaced.append(candidate)
        blocks += candidate[1].blocks
    offloaded, leaving = _move_down(displaced, room.free.tokens, room.host)
    return _settled(Tier.DEVICE, offloaded, leaving, room)


def _move_down(
    displaced: list[Candidate], free_tokens: int, host: Candidates
) -> tuple[list[Candidate], list[Candidate]]:
    """Returns who of `displaced` finds room on the host, and who leaves memory for that or because there is none."""
    offloaded: list[Candidate] = []
    leaving: list[Candidate] = []
    for donor_id, size in reversed(displaced):
        taken = host.take_tokens(size.tokens - free_tokens)
        if taken is None:
            leaving.append((donor_id, size))
            continue
        leaving += taken
        free_tokens += sum(victim.tokens for _, victim in taken) - size.tokens
        offloaded.insert(0, (donor_id, size))
    return offloaded, leaving


def _settled(tier: Tier, offloaded: list[Candidate], leaving: list[Candidate], room: Room) -> Placement | None:
    """The placement, once one more donor may be held: for that go those of the disk first, then those that leave memory
    anyway, then the host's, those on their way down, and the device's. None when there are not enough."""
    dropped = [donor_id for donor_id, size in leaving if not size.has_file]
    released = [donor_id for donor_id, size in leaving if size.has_file]
    while room.free.donors + len(dropped) < 1:
        if (candidate := room.disk.next()) is not None:
            dropped.append(candidate[0])
        elif released:
            dropped.append(released.pop(0))
        elif (candidate := room.host.next()) is not None:
            dropped.append(candidate[0])
        elif offloaded:
            dropped.append(offloaded.pop(0)[0])
        elif (candidate := room.device.next()) is not None:
            dropped.append(candidate[0])
        else:
            return None
    return Placement(tier, tuple(donor_id for donor_id, _ in offloaded), tuple(dropped), tuple(released))


class DonorState(str, Enum):
    """SAVING: room is reserved, nobody may read. READY: its KV is held. FETCHING: it is being read from disk."""

    SAVING = "saving"
    READY = "ready"
    FETCHING = "fetching"


class FileState(str, Enum):
    """The donor's file: there is none, its room is reserved and it is being written, or it is there."""

    NONE = "none"
    WRITING = "writing"
    HELD = "held"


@dataclass(slots=True)
class Entry:
    """`tokens` is what the donor takes in `tier`; while it is promoted it takes room on the device as well."""

    namespace_key: str
    tier: Tier
    history: DonorHistory
    state: DonorState = DonorState.SAVING
    file: FileState = FileState.NONE
    leases: int = 0
    is_promoting: bool = False

    @property
    def tokens(self) -> int:
        return self.history.tokens

    @property
    def is_readable(self) -> bool:
        """True when its KV is in memory."""
        return self.state is DonorState.READY and self.tier is not Tier.DISK

    @property
    def is_resting(self) -> bool:
        """True when it is known, but its KV would first have to be read from disk."""
        return self.tier is Tier.DISK or self.state is DonorState.FETCHING

    @property
    def is_movable(self) -> bool:
        """True when nobody reads it and nothing is on its way; a donor that is being written is read for that."""
        is_still = self.state is DonorState.READY and self.file is not FileState.WRITING and not self.is_promoting
        return is_still and not self.leases


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Counts at one moment. `used_bytes` (of `byte_budget`, host), `device_blocks_used` (of `device_blocks`) and
    `disk_bytes_used` (of `disk_bytes`) include what is reserved; `ready` donors are in memory, `resting` on disk alone.
    `evicted`, `offloaded`, `released`, `promoted` and `fetched` count since the start."""

    ready: int
    saving: int
    leases: int
    used_bytes: int
    byte_budget: int
    evicted: int
    offloaded: int = 0
    device_blocks_used: int = 0
    device_blocks: int = 0
    resting: int = 0
    disk_bytes_used: int = 0
    disk_bytes: int = 0
    released: int = 0
    promoted: int = 0
    fetched: int = 0


class Holdings:
    """What is held, and what happens to it when a placement is carried out.

    `used` counts blocks of the arena, tokens of the host and bytes of files. `writes_files` says that donors which come
    into host memory get a file where there is room.
    """

    def __init__(
        self, capacities: Capacities, eviction: Callable[[], EvictionPolicy], clock: Callable[[], float]
    ) -> None:
        self.capacities = capacities
        self.entries: dict[str, Entry] = {}
        self.used = dict.fromkeys(Tier, 0)
        self.writes_files = False
        self._eviction = {tier: eviction() for tier in Tier}
        self._clock = clock
        self._tick = 0
        self._counts = dict.fromkeys(("evicted", "offloaded", "released", "promoted", "fetched"), 0)
        self._resting: frozenset[str] | None = None

    # -- one donor -------------------------------------------------------------------------------------------------

    def room(self, tier: Tier, tokens: int) -> int:
        """What a donor of `tokens` tokens takes in `tier`, in the unit of `used`."""
        if tier is Tier.DEVICE:
            return -(-tokens // self.capacities.block_size)
        return tokens if tier is Tier.HOST else self.capacities.file_size.of(tokens)

    def size(self, entry: Entry) -> Size:
        return Size(entry.tokens, self.room(Tier.DEVICE, entry.tokens), entry.file is FileState.HELD)

    def enter(self, donor_id: str, entry: Entry) -> None:
        """Holds a donor that takes room in its tier, and in files where it has one."""
        self.entries[donor_id] = entry
        self._take(entry, 1)

    def resize(self, entry: Entry, tokens: int) -> None:
        """The donor takes the room of `tokens` tokens from now on."""
        self._take(entry, -1)
        entry.history.tokens = tokens
        self._take(entry, 1)

    def make_ready(self, donor_id: str, *, is_new: bool = True) -> None:
        """The donor may be leased, or fetched, and counts as just used; a new one's history begins."""
        entry = self.entries[donor_id]
        entry.state = DonorState.READY
        self._stamp(entry)
        if is_new:
            entry.history.added = entry.history.last_use
        else:
            entry.history.uses += 1
        self._eviction[entry.tier].added(donor_id, entry.history)
        self._resting = None

    def count_use(self, donor_id: str) -> None:
        entry = self.entries[donor_id]
        self._stamp(entry)
        entry.history.uses += 1
        self._eviction[entry.tier].used(donor_id)

    def described(self, donor_id: str) -> None:
        self._eviction[self.entries[donor_id].tier].described(donor_id)

    def lose_file(self, entry: Entry) -> None:
        """The donor has no file."""
        self._take(entry, -1)
        entry.file = FileState.NONE
        self._take(entry, 1)

    def move(self, donor_id: str, tier: Tier, *, evicted: bool = False) -> None:
        """The donor takes its room in `tier` from now on, and is a candidate there when it is ready."""
        entry = self.entries[donor_id]
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        self._take(entry, -1)
        entry.tier = tier
        self._take(entry, 1)
        if entry.state is DonorState.READY:
            self._eviction[tier].added(donor_id, entry.history)
        self._resting = None

    def remove(self, donor_id: str, *, evicted: bool = False) -> None:
        entry = self.entries.pop(donor_id)
        self._take(entry, -1)
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        self._resting = None

    # -- placements ------------------------------------------------------------------------------------------------

    def place(self, donor_id: str, tokens: int) -> Placement:
        """Where a new donor would go and who would make room, none of whom has moved yet. Raises CapacityError."""
        limits = self.capacities
        size = Size(tokens, self.room(Tier.DEVICE, tokens))
        placement = None
        if size.blocks <= limits.device_blocks:
            placement = place_on_device(size, self.find_room())
        if placement is None and size.tokens <= limits.host_tokens:
            placement = place_on_host(size, self.find_room())
        if placement is None:
            raise CapacityError(
                f"donor {donor_id} needs {tokens * limits.bytes_per_token} bytes of a budget of {limits.host_bytes}, "
                f"or {size.blocks} device blocks of {limits.device_blocks}, and one place of {limits.max_donors}; the "
                "donors that are leased or being saved leave no room, raise SEMBLEND_HOST_BYTES, "
                "SEMBLEND_DEVICE_BYTES or SEMBLEND_MAX_DONORS"
            )
        return placement

    def find_room(self, *, has_place: bool = False) -> Room:
        """What is free, and who may go; with `has_place` the donor to be placed is held already."""
        free = FreeRoom(
            tokens=self.capacities.host_tokens - self.used[Tier.HOST],
            blocks=self.capacities.device_blocks - self.used[Tier.DEVICE],
            donors=1 if has_place else self.capacities.max_donors - len(self.entries),
        )
        return Room(free, self._candidates(Tier.HOST), self._candidates(Tier.DEVICE), self._candidates(Tier.DISK))

    def apply(self, placement: Placement) -> Placement:
        """Moves everybody as `placement` says; what is returned names as well who gets a file, and whose is dropped."""
        for donor_id in placement.dropped:
            self.remove(donor_id, evicted=True)
        for donor_id in placement.released:
            self.move(donor_id, Tier.DISK, evicted=True)
        for donor_id in placement.offloaded:
            self.move(donor_id, Tier.HOST, evicted=True)
        self._counts["evicted"] += len(placement.dropped)
        self._counts["released"] += len(placement.released)
        self._counts["offloaded"] += len(placement.offloaded)
        return self.with_files(placement, placement.offloaded)

    def with_files(self, placement: Placement, donor_ids: tuple[str, ...]) -> Placement:
        """`placement` with those of `donor_ids` that get a file, and the donors whose files make room for it."""
        written, dropped = list(placement.written), list(placement.dropped)
        for donor_id in donor_ids:
            entry = self.entries[donor_id]
            if self.writes_files and entry.file is FileState.NONE:
                victims = self.make_file_room(entry.tokens)
                if victims is None:
                    continue
                dropped += victims
                self._take(entry, -1)
                entry.file = FileState.WRITING
                self._take(entry, 1)
                written.append(donor_id)
        released = tuple(donor_id for donor_id in placement.released if donor_id not in dropped)
        return replace(placement, written=tuple(written), dropped=tuple(dropped), released=released)

    def make_file_room(self, tokens: int, *, has_place: bool = True) -> tuple[str, ...] | None:
        """Drops donors on disk alone for the file of a donor of `tokens` tokens, and without `has_place` for the donor
        itself; returns them. None, and nothing has changed, when they do not suffice."""
        missing = self.used[Tier.DISK] + self.room(Tier.DISK, tokens) - self.capacities.disk_bytes
        crowd = 0 if has_place else len(self.entries) + 1 - self.capacities.max_donors
        candidates, victims = self._candidates(Tier.DISK), list[str]()
        while missing > 0 or crowd > len(victims):
            candidate = candidates.next()
            if candidate is None:
                return None
            victims.append(candidate[0])
            missing -= self.room(Tier.DISK, candidate[1].tokens)
        for victim in victims:
            self.remove(victim, evicted=True)
        self._counts["evicted"] += len(victims)
        return tuple(victims)

    def count(self, what: str) -> None:
        """One donor more was `promoted` or `fetched`."""
        self._counts[what] += 1

    def resting(self) -> frozenset[str]:
        """Donors that are on disk alone or still being read back."""
        if self._resting is None:
            self._resting = frozenset(donor_id for donor_id, entry in self.entries.items() if entry.is_resting)
        return self._resting

    def stats(self) -> CatalogStats:
        entries = self.entries.values()
        return CatalogStats(
            ready=sum(entry.is_readable for entry in entries),
            saving=sum(entry.state is DonorState.SAVING for entry in entries),
            leases=sum(entry.leases for entry in entries),
            used_bytes=self.used[Tier.HOST] * self.capacities.bytes_per_token,
            byte_budget=self.capacities.host_bytes,
            device_blocks_used=self.used[Tier.DEVICE],
            device_blocks=self.capacities.device_blocks,
            resting=sum(entry.is_resting for entry in entries),
            disk_bytes_used=self.used[Tier.DISK],
            disk_bytes=self.capacities.disk_bytes,
            **self._counts,
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _stamp(self, entry: Entry) -> None:
        self._tick += 1
        entry.history.last_use, entry.history.last_seconds = self._tick, self._clock()

    def _take(self, entry: Entry, sign: int) -> None:
        """Adds the entry's room to what is used, or with -1 takes it off."""
        tiers = {entry.tier} - {Tier.DISK}
        if entry.is_promoting:
            tiers.add(Tier.DEVICE)
        if entry.file is not FileState.NONE:
            tiers.add(Tier.DISK)
        for tier in tiers:
            self.used[tier] += sign * self.room(tier, entry.tokens)

    def _candidates(self, tier: Tier) -> Candidates:
        def movable() -> Iterator[tuple[str, Size]]:
            for donor_id in self._eviction[tier].candidates():
                entry = self.entries[donor_id]
                if entry.is_movable:
                    yield donor_id, self.size(entry)

        return Candidates(movable())
