"""DonorCatalog: each donor's tier and room, and the donors that make room for another, in the order of a policy.

It runs on the scheduler and decides for every rank. A donor is *saving* from `reserve` to `commit`, then *ready*. Only
ready donors are moved or evicted, and leased, but for saving ones whose KV the engine's blocks hold until the commit. A
leased one neither moves down nor goes. A donor counts in one tier, and in two during a promotion.

A new donor goes to the device first. The donors that it displaces move down to the host, then out. A file is a second
copy: a donor with one is released when it leaves memory, and may be fetched again."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, count
from typing import Generic, Literal, TypeVar

from semblend_trt.config import Eviction
from semblend_trt.errors import CapacityError, DonorUnavailableError

# For this long files take no more room than when the disk was full.
FULL_SECONDS = 60.0
# A promotion may drop at most 1 / _PROMOTION_SHARE of the host's tokens: its own room there is free only later.
_PROMOTION_SHARE = 16


class Tier(str, Enum):
    """What holds donors: the arena on the card, (page-locked) host memory, or files. KV on disk alone is unreadable."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(slots=True)
class DonorHistory:
    """One donor's past, the same in every tier; the catalog keeps it.

    `last_use` is a tick of one counter (adding is a use too). `uses` counts the uses after the first."""

    tokens: int
    last_use: int = 0
    uses: int = 0


Rank = tuple[float, ...]
HistoryT_contra = TypeVar("HistoryT_contra", bound=DonorHistory, contravariant=True)


class EvictionPolicy(Generic[HistoryT_contra]):
    """Order the donors of one tier, the first to go first: the lowest rank.

    Not thread safe: the catalog calls it under its own lock, and changes nothing while it walks `candidates`. A donor's
    history is up to date when the policy hears of it. `floor`: the highest first number of an evicted donor's rank."""

    def __init__(self, rank: Callable[[HistoryT_contra], Rank]) -> None:
        """Order donors by `rank`, which is taken at every use."""
        self._rank, self.floor = rank, 0.0
        # A sorted list, in which a change moves some kilobytes for 10,000 names.
        self._order: list[tuple[Rank, str]] = []
        self._ranks: dict[str, Rank] = {}

    def used(self, donor_id: str, history: HistoryT_contra) -> None:
        """Note that the donor came into this tier, was leased, or its text was asked for again."""
        self._discard(donor_id)
        rank = self._ranks[donor_id] = self._rank(history)
        insort(self._order, (rank, donor_id))

    def removed(self, donor_id: str, *, evicted: bool = False) -> None:
        """Remove a donor that left this tier; `evicted` when it had to make room."""
        rank = self._discard(donor_id)
        if evicted and rank is not None:
            self.floor = max(self.floor, rank[0])

    def candidates(self) -> Iterator[str]:
        """Iterate over donors, the first to go first."""
        return (name for _, name in self._order)

    def _discard(self, donor_id: str) -> Rank | None:
        if (rank := self._ranks.pop(donor_id, None)) is not None:
            del self._order[bisect_left(self._order, (rank, donor_id))]
        return rank


def policy_of(name: Eviction) -> EvictionPolicy[DonorHistory]:
    """Return the policy of one tier.

    `size_aware` is GreedyDual-Size with a cost of one for every use (Cao and Irani, USITS 1997): a donor's rank is one
    over its tokens, plus the rank of the last evicted donor. Among donors of one size the least recently used goes
    first; a donor of half the tokens may stay unused for twice the evictions."""
    if name is Eviction.LFU:
        return EvictionPolicy(lambda history: (history.uses, history.last_use))
    if name is Eviction.LRU:
        return EvictionPolicy(lambda history: (history.last_use,))
    policy = EvictionPolicy[DonorHistory](lambda history: (policy.floor + 1.0 / history.tokens, history.last_use))
    return policy


@dataclass(frozen=True, slots=True)
class Capacities:
    """Bounds of one rank's tiers; `bytes_per_token` is K and V of all layers.

    The arena has `device_blocks` blocks of `block_size` tokens. A donor of n tokens has a file of `file_bytes(n)`."""

    host_bytes: int
    bytes_per_token: int
    max_donors: int
    device_blocks: int = 0
    block_size: int = 1
    disk_bytes: int = 0
    file_bytes: Callable[[int], int] = int

    def limit(self, tier: Tier) -> int:
        """Return blocks of the arena, tokens of the host, or bytes of files."""
        if tier is Tier.DEVICE:
            return self.device_blocks
        return self.host_bytes // self.bytes_per_token if tier is Tier.HOST else self.disk_bytes

    def room(self, tier: Tier, tokens: int) -> int:
        """Return what a donor takes in `tier`, in the unit of `limit`."""
        if tier is Tier.DEVICE:
            return -(-tokens // self.block_size)
        return tokens if tier is Tier.HOST else self.file_bytes(tokens)


@dataclass(frozen=True, slots=True)
class TierMoves:
    """A donor goes to `tier`. Before its bytes move, the other donors move, in this order.

    `dropped` go, `released` leave memory and keep their files, `offloaded` move to the host. `written` get a file once
    in host memory: some of the offloaded, or the donor itself."""

    tier: Tier
    offloaded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    written: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """Donors, leases and each tier's bytes at one moment, with those that running saves reserve.

    `resting` donors are on disk, `approximate` ones built, or being built, from approximate KV: the index counts them.
    Those from `evicted` on are totals since the start."""

    ready: int = 0
    saving: int = 0
    leases: int = 0
    resting: int = 0
    approximate: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    disk_bytes: int = 0
    evicted: int = 0
    offloaded: int = 0
    released: int = 0
    promoted: int = 0
    fetched: int = 0

    @property
    def donors(self) -> int:
        """Donors that can be found."""
        return self.ready + self.resting


@dataclass(slots=True, kw_only=True)
class _Entry(DonorHistory):
    """A donor as policies see it. `is_held`: while it is saved, the engine's blocks hold its KV."""

    tier: Tier
    state: Literal["saving", "ready", "fetching"] = "saving"
    file: Literal["none", "writing", "held"] = "none"  # from "writing" on it takes disk room
    leases: int = 0
    writing_since: float = 0.0
    is_promoting: bool = False
    is_held: bool = False

    @property
    def is_readable(self) -> bool:
        return self.state == "ready" and self.tier is not Tier.DISK

    @property
    def is_resting(self) -> bool:
        """True when its KV would first have to be read from disk."""
        return self.tier is Tier.DISK or self.state == "fetching"

    @property
    def is_movable(self) -> bool:
        """True when nothing reads it, its file's writer included, and it is not moving."""
        return self.state == "ready" and self.file != "writing" and not self.is_promoting and not self.leases


@dataclass(slots=True, eq=False)
class Lease:
    """One reader's hold on a donor, which cannot go before `release`. A second release does nothing."""

    catalog: DonorCatalog
    donor_id: str
    entry: _Entry
    released: bool = False

    def release(self) -> None:
        with self.catalog._lock:
            if not self.released:
                self.released = True
                self.entry.leases -= 1  # the catalog may not have it any more, if its save failed


class DonorCatalog:
    """Track donors, their tiers, room and leases. Thread safe."""

    def __init__(self, capacities: Capacities, eviction: Eviction) -> None:
        self.capacities = capacities
        self._entries: dict[str, _Entry] = {}
        self._used = dict.fromkeys(Tier, 0)
        self._counts = Counter[str]()
        self._writes_files = False
        self._eviction = {tier: policy_of(eviction) for tier in Tier}
        self._ticks = count(1)
        self._full_at, self._full_since = 0, -FULL_SECONDS
        self._lock = threading.Lock()

    def reserve(self, donor_id: str, tokens: int, continues: str = "", *, is_held: bool = False) -> TierMoves:
        """Make room for a donor of at most `tokens` tokens, if possible on the device.

        Where another donor would have to move, the one that it `continues` leaves memory first. Raises ValueError when
        the id is taken, CapacityError when unleased donors make too little room. Nothing has changed then."""
        with self._lock:
            if donor_id in self._entries:
                raise ValueError(f"donor {donor_id} is already held; use another id or drop it first")
            moves, old, limits = self._search(tokens), self._entries.get(continues), self.capacities
            others_move = moves is None or moves.offloaded or moves.dropped or moves.released
            if others_move and old is not None and old.is_movable and old.tier is not Tier.DISK:
                moves = self._search(tokens, continues) or moves
            if moves is None:
                raise CapacityError(
                    f"donor {donor_id} needs {tokens * limits.bytes_per_token} bytes of a budget of "
                    f"{limits.host_bytes}, or {limits.room(Tier.DEVICE, tokens)} device blocks of "
                    f"{limits.device_blocks}, and one place of {limits.max_donors}; the donors that are leased or "
                    "being saved leave no room, raise SEMBLEND_HOST_BYTES, SEMBLEND_DEVICE_BYTES or SEMBLEND_MAX_DONORS"
                )
            moves = self._apply(moves, continues)
            entry = _Entry(tokens, uses=0 if old is None else old.uses, tier=moves.tier, is_held=is_held)
            self._enter(donor_id, entry)
            return self._with_files(moves, (donor_id,)) if moves.tier is Tier.HOST else moves

    def commit(self, donor_id: str, tokens: int) -> Tier:
        """Make a saving donor ready with the `tokens` it holds, free the rest, and return its tier."""
        with self._lock:
            entry = self._entries[donor_id]
            with self._recounting(entry):
                entry.tokens = tokens
            self._make_ready(donor_id, entry)
            return entry.tier

    def cancel(self, donor_id: str) -> bool:
        """Give back a saving donor's room; False when it is ready or missing."""
        return self._remove_where(lambda entry: entry.state == "saving", donor_id)

    def drop(self, donor_id: str) -> bool:
        """Drop a ready donor; False, without effect, when it is read, moving or not held."""
        return self._remove_where(lambda entry: entry.is_movable, donor_id)

    def lease(self, donor_id: str) -> Lease:
        """Hold a readable donor, which counts as a use; DonorUnavailableError when it is not in memory."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or not (entry.is_readable or (entry.is_held and entry.state == "saving")):
                raise DonorUnavailableError(f"donor {donor_id} is not held and cannot be leased")
            entry.leases += 1
            if entry.state == "ready":
                self._count_use(donor_id, entry)
            return Lease(self, donor_id, entry)

    def touch(self, donor_id: str) -> None:
        """Count a use of a donor, if it is ready."""
        with self._lock:
            if (entry := self._entries.get(donor_id)) is not None and entry.state == "ready":
                self._count_use(donor_id, entry)

    def begin_writing(self) -> None:
        """Give a file, where there is room, to donors that come into host memory from now on."""
        self._writes_files = self.capacities.disk_bytes > 0

    def adopt(self, donor_id: str, tokens: int) -> tuple[str, ...] | None:
        """Take in a donor whose file was found; return the donors on disk alone that were dropped for it.

        None, without effect, when the id is taken or room is missing."""
        with self._lock:
            if donor_id in self._entries:
                return None
            if (dropped := self._make_file_room(tokens, is_held=False)) is not None:
                entry = _Entry(tokens, tier=Tier.DISK, file="held")
                self._enter(donor_id, entry)
                self._make_ready(donor_id, entry)
            return dropped

    def written(self, donor_id: str, succeeded: bool, *, is_full: bool = False) -> None:
        """Note that the donor's file was written, or failed; `is_full` where the disk had no room for it.

        For FULL_SECONDS files then take no more room than now. If a file that makes its own room fails as well,
        something else fills the disk: no file is written meanwhile."""
        with self._lock:
            if (entry := self._entries.get(donor_id)) is None or entry.file != "writing":
                return
            with self._recounting(entry):
                entry.file = "held" if succeeded else "none"
            if is_full:
                made_room = self._is_full() and entry.writing_since > self._full_since
                self._full_at = 0 if made_room else self._used[Tier.DISK]
                self._full_since = time.monotonic()

    def fetch(self, donor_id: str, *, may_drop: bool = True) -> TierMoves | None:
        """Make room on the host for a donor on disk alone; None when it is elsewhere or room is missing.

        Without `may_drop` only donors with files make room. The donor can be leased once `fetched` reports success."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.tier is not Tier.DISK or not entry.is_movable:
                return None
            moves = self._room_on(Tier.HOST, entry.tokens)
            if moves is None or (moves.dropped and not may_drop):
                return None
            entry.state = "fetching"
            moves = self._apply(moves)
            self._move(donor_id, Tier.HOST)
            return moves

    def fetched(self, donor_id: str, succeeded: bool) -> bool:
        """Note that the donor was read back, or is lost; False when it was not being fetched."""
        with self._lock:
            if (entry := self._entries.get(donor_id)) is None or entry.state != "fetching":
                return False
            if succeeded:
                entry.uses += 1
                self._make_ready(donor_id, entry)
                self._counts["fetched"] += 1
            else:
                self._remove(donor_id)
            return True

    def promote(self, donor_id: str) -> TierMoves | None:
        """Make device room for a donor of the host; None when it is not there, or too many tokens would be dropped.

        It stays readable on the host until `promoted` reports the copy."""
        with self._lock:
            entry = self._entries.get(donor_id)
            if entry is None or entry.tier is not Tier.HOST or entry.state != "ready":
                return None
            if entry.is_promoting or entry.file == "writing":
                return None
            entry.is_promoting = True  # so that it does not make room for itself
            moves = self._room_on(Tier.DEVICE, entry.tokens)
            lost = sum(self._entries[each].tokens for each in (() if moves is None else moves.dropped))
            if moves is None or lost > self.capacities.limit(Tier.HOST) // _PROMOTION_SHARE:
                entry.is_promoting = False
                return None
            self._used[Tier.DEVICE] += self.capacities.room(Tier.DEVICE, entry.tokens)
            return self._apply(moves)

    def promoted(self, donor_id: str, succeeded: bool) -> None:
        """Note that the donor left the host for the device, or stays where it was."""
        with self._lock:
            if (entry := self._entries.get(donor_id)) is None or not entry.is_promoting:
                return
            with self._recounting(entry):
                entry.is_promoting = False
            if succeeded:
                self._move(donor_id, Tier.DEVICE)
                self._counts["promoted"] += 1

    def tier(self, donor_id: str) -> Tier | None:
        """Return the tier in which the donor counts; None when it is not held."""
        entry = self._entries.get(donor_id)
        return None if entry is None else entry.tier

    def is_writing(self, donor_id: str) -> bool:
        """Return whether the donor's file is still to be written."""
        entry = self._entries.get(donor_id)
        return entry is not None and entry.file == "writing"

    def resting(self) -> frozenset[str]:
        """Return donors that are found but cannot be leased: on disk alone, or being read back."""
        with self._lock:
            return frozenset(donor_id for donor_id, entry in self._entries.items() if entry.is_resting)

    def stats(self) -> CatalogStats:
        """Return what is held now; any thread may call."""
        with self._lock:
            entries, used, a_token = self._entries.values(), self._used, self.capacities.bytes_per_token
            return CatalogStats(
                ready=sum(entry.is_readable for entry in entries),
                saving=sum(entry.state == "saving" for entry in entries),
                leases=sum(entry.leases for entry in entries),
                resting=sum(entry.is_resting for entry in entries),
                host_bytes=used[Tier.HOST] * a_token,
                device_bytes=used[Tier.DEVICE] * self.capacities.block_size * a_token,
                disk_bytes=used[Tier.DISK],
                **self._counts,
            )

    def __len__(self) -> int:
        return len(self._entries)

    def _remove_where(self, may_go: Callable[[_Entry], bool], donor_id: str) -> bool:
        with self._lock:
            is_going = donor_id in self._entries and may_go(self._entries[donor_id])
            if is_going:
                self._remove(donor_id)
            return is_going

    # -- callers of the methods below hold the lock ------------------------------------------------------------------

    def _enter(self, donor_id: str, entry: _Entry) -> None:
        self._entries[donor_id] = entry
        self._count_room(entry, 1)

    def _remove(self, donor_id: str, *, evicted: bool = False) -> None:
        entry = self._entries.pop(donor_id)
        self._count_room(entry, -1)
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)

    def _make_ready(self, donor_id: str, entry: _Entry) -> None:
        """Let the donor be leased or fetched, as one just used."""
        entry.state = "ready"
        self._count_use(donor_id, entry, 0)

    def _count_use(self, donor_id: str, entry: _Entry, uses: int = 1) -> None:
        entry.last_use, entry.uses = next(self._ticks), entry.uses + uses
        self._eviction[entry.tier].used(donor_id, entry)

    def _move(self, donor_id: str, tier: Tier, *, evicted: bool = False) -> None:
        """Move the donor's room to `tier`, where it is a candidate if ready."""
        entry = self._entries[donor_id]
        self._eviction[entry.tier].removed(donor_id, evicted=evicted)
        with self._recounting(entry):
            entry.tier = tier
        if entry.state == "ready":
            self._eviction[tier].used(donor_id, entry)

    @contextmanager
    def _recounting(self, entry: _Entry) -> Iterator[None]:
        self._count_room(entry, -1)
        yield
        self._count_room(entry, 1)

    def _count_room(self, entry: _Entry, sign: int) -> None:
        """Add the entry's room to what is used; -1 takes it off."""
        takes = {
            Tier.DEVICE: entry.tier is Tier.DEVICE or entry.is_promoting,
            Tier.HOST: entry.tier is Tier.HOST,
            Tier.DISK: entry.file != "none",
        }
        for tier, is_taken in takes.items():
            if is_taken:
                self._used[tier] += sign * self.capacities.room(tier, entry.tokens)

    def _is_full(self) -> bool:
        return time.monotonic() < self._full_since + FULL_SECONDS

    def _free(self, tier: Tier) -> int:
        is_full = tier is Tier.DISK and self._is_full()
        return (self._full_at if is_full else self.capacities.limit(tier)) - self._used[tier]

    def _movable(self, tier: Tier, but: str = "") -> Iterator[str]:
        """Yield donors of `tier` that may go, `but` this one, in eviction order."""
        candidates = self._eviction[tier].candidates()
        return (each for each in candidates if each != but and self._entries[each].is_movable)

    def _search(self, tokens: int, leaving: str = "") -> TierMoves | None:
        """Return what makes room for a new donor; of a full catalog `leaving` goes, or one of the lowest tier."""
        is_full = len(self._entries) >= self.capacities.max_donors
        if is_full and not leaving:
            leaving = next(chain.from_iterable(map(self._movable, reversed(Tier))), "")
            if not leaving:
                return None
        in_order = (self._room_on(tier, tokens, leaving, is_full=is_full) for tier in (Tier.DEVICE, Tier.HOST))
        return next((moves for moves in in_order if moves is not None), None)

    def _room_on(self, tier: Tier, tokens: int, leaving: str = "", *, is_full: bool = False) -> TierMoves | None:
        """Return what makes room in the arena or in host memory, before anything moves; None when nothing does.

        `leaving` leaves memory in any case, and the catalog if it `is_full`. Of donors displaced from the arena, the
        last used has the first claim on host memory. Others leave."""
        limits, entries, gone = self.capacities, self._entries, [leaving] if leaving else []
        free, movable = {each: self._free(each) for each in Tier}, {each: self._movable(each, leaving) for each in Tier}
        for donor_id in gone:
            free[entries[donor_id].tier] += limits.room(entries[donor_id].tier, entries[donor_id].tokens)
        needed = limits.room(tier, tokens)
        displaced = self._take(movable, tier, needed - free[tier]) if needed <= limits.limit(tier) else None
        if displaced is None:
            return None
        offloaded, others = list[str](), gone if tier is Tier.DEVICE else gone + displaced
        for donor_id in reversed(displaced) if tier is Tier.DEVICE else ():
            length = entries[donor_id].tokens
            if (taken := self._take(movable, Tier.HOST, length - free[Tier.HOST])) is None:
                others.append(donor_id)
                continue
            others += taken
            free[Tier.HOST] += sum(entries[each].tokens for each in taken) - length
            offloaded.insert(0, donor_id)
        released = [each for each in others if entries[each].file == "held" and not (is_full and each == leaving)]
        dropped = tuple(each for each in others if each not in released)
        return TierMoves(tier, tuple(offloaded), dropped, tuple(released))

    def _take(self, movable: dict[Tier, Iterator[str]], tier: Tier, missing: int, fewest: int = 0) -> list[str] | None:
        """Take the tier's next donors, `fewest` and what is `missing`; None, without effect, when they are too few."""
        taken: list[str] = []
        while missing > 0 or len(taken) < fewest:
            if (donor_id := next(movable[tier], None)) is None:
                movable[tier] = iter(taken)
                return None
            taken.append(donor_id)
            missing -= self.capacities.room(tier, self._entries[donor_id].tokens)
        return taken

    def _apply(self, moves: TierMoves, continues: str = "") -> TierMoves:
        """Carry out `moves`; return them with files and drops for these. `continues` leaves unevicted."""
        for donor_id in moves.dropped:
            self._remove(donor_id, evicted=donor_id != continues)
        for donor_id in moves.released:
            self._move(donor_id, Tier.DISK, evicted=donor_id != continues)
        for donor_id in moves.offloaded:
            self._move(donor_id, Tier.HOST, evicted=True)
        evicted = len(moves.dropped) - (continues in moves.dropped)
        self._counts.update(evicted=evicted, released=len(moves.released), offloaded=len(moves.offloaded))
        return self._with_files(moves, moves.offloaded)

    def _with_files(self, moves: TierMoves, donor_ids: tuple[str, ...]) -> TierMoves:
        """Return `moves` with the `donor_ids` that get a file, and the donors dropped for it."""
        written, dropped = moves.written, moves.dropped
        for donor_id in donor_ids if self._writes_files else ():
            entry = self._entries[donor_id]
            if entry.file == "none" and (victims := self._make_file_room(entry.tokens)) is not None:
                with self._recounting(entry):
                    entry.file, entry.writing_since = "writing", time.monotonic()
                written, dropped = (*written, donor_id), dropped + victims
        released = tuple(donor_id for donor_id in moves.released if donor_id not in dropped)
        return replace(moves, written=written, dropped=dropped, released=released)

    def _make_file_room(self, tokens: int, *, is_held: bool = True) -> tuple[str, ...] | None:
        """Drop and return donors on disk alone for a file, and a donor if not held; None, and no effect, if too few."""
        missing = self.capacities.room(Tier.DISK, tokens) - self._free(Tier.DISK)
        crowd = 0 if is_held else len(self._entries) + 1 - self.capacities.max_donors
        victims = self._take({Tier.DISK: self._movable(Tier.DISK)}, Tier.DISK, missing, crowd)
        for victim in victims or ():
            self._remove(victim, evicted=True)
            self._counts["evicted"] += 1
        return None if victims is None else tuple(victims)
