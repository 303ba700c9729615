"""The donors' namespaces, and for each an index from a prompt's fingerprints to the workers that hold its text.

A hash table maps each entry of a sketch to the set of its holders. Workers hold whole texts, so most entries of a text
share one set, which a search reads once.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.compiled import entry
from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.sketch import MAX_LEVEL, Sketch
from semblend_trt.namespace import NO_SALT, SALT_PREFIX, TENANT_PREFIX, CacheNamespace, salt_digest, tenant_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from semblend_trt.fleet.sketch import PromptFingerprints

    _Entries = npt.NDArray[np.uint32]
    _Slots = npt.NDArray[np.int64]

# One match may be chance: one in 2**32 values equals an entry of another anchor.
FEWEST_MATCHES = 2
# A slot is entry << 32 | number of a set, and 0 when free. The table grows when more than this share is filled.
_ENTRY_SHIFT, _NUMBER, _FREE = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0)
_MOST_FILLED, _FEWEST_SLOTS = 0.75, 1 << 10
# A holder is worker << 26 | level << 20 | number of its donors, int64; a set is its holders in ascending order, as
# bytes.
_WORKER_SHIFT, _LEVEL_SHIFT = 26, 20
_COUNT = (1 << _LEVEL_SHIFT) - 1
# The number of the empty set.
_EMPTY = 1

MAX_NAMESPACES = 16384
_MAX_SPELLINGS = 1024
# Namespaces searched for a request. One tenant and model has several only where adapters or engines differ.
_MAX_MET = 8


@dataclass(frozen=True, slots=True, eq=False)
class Posting:
    """A donor in an index: its worker's number, its sketch's level and entries, uint32 [n], ascending."""

    worker: int
    level: int
    entries: _Entries


class SketchIndex:
    """The sketches of one namespace. The caller numbers the workers. Not thread safe.

    The estimate for a worker covers all its donors: an entry of the prompt that several of them hold counts once. For
    one donor it is `sketch.overlap`. A donor of level L shows one in 2**L anchors, and each counts as 2**L.
    An entry takes 11 to 21 bytes, and each different set of holders 8 bytes per holder.
    """

    def __init__(self) -> None:
        # Odd and secret, so that a forger cannot choose entries that collide.
        self._factor = np.uint64(secrets.randbits(64) | 1)
        self._table = np.zeros(_FEWEST_SLOTS, dtype=np.uint64)
        self._used = np.zeros(1, dtype=np.int64)
        self._sets: list[bytes] = [b"", b""]
        self._uses: list[int] = [0, 0]
        self._numbers: dict[bytes, int] = {b"": _EMPTY}
        self._free: list[int] = []
        self._donors_of_level: Counter[int] = Counter()

    def add(self, worker: int, sketch: Sketch) -> Posting:
        """Adds a donor."""
        entries = np.sort(sketch.entries)
        posting = Posting(worker, sketch.level, entries[np.diff(entries, prepend=~entries[:1]) != 0])
        self._make_room(len(posting.entries))
        self._donors_of_level[posting.level] += 1
        self._change(self._slots_of(posting.entries, takes=True), posting, 1)
        return posting

    def remove(self, posting: Posting) -> None:
        """Removes a donor that was added."""
        self._donors_of_level[posting.level] -= 1
        self._change(self._slots_of(posting.entries), posting, -1)

    def search(self, workers: int, prompt: PromptFingerprints) -> npt.NDArray[np.float64]:
        """The share of `prompt` that each of the workers 0 .. `workers` - 1 holds, 0..1: float64 [workers]."""
        # A sketch has no entries below its level.
        is_asked = prompt.levels >= min((level for level, donors in self._donors_of_level.items() if donors), default=0)
        numbers = (self._table[self._slots_of(prompt.entries[is_asked])] & _NUMBER).astype(np.int64)
        is_held = numbers > _EMPTY
        found, row = np.unique(numbers[is_held], return_inverse=True)
        # The number of the prompt's entries of at least each level that each set holds: int64 [sets, levels].
        cells = row * (MAX_LEVEL + 1) + prompt.levels[is_asked][is_held]
        held = np.bincount(cells, minlength=len(found) * (MAX_LEVEL + 1)).reshape(-1, MAX_LEVEL + 1)
        held = held[:, ::-1].cumsum(axis=1)[:, ::-1]
        sets = [self._sets[number] for number in found.tolist()]
        holders, rows = _holders_in(b"".join(sets)), np.repeat(np.arange(len(sets)), [len(each) // 8 for each in sets])
        worker, level = holders >> _WORKER_SHIFT, holders >> _LEVEL_SHIFT & MAX_LEVEL
        # Of a worker's levels in a set, the lowest counts; it comes first.
        is_first = np.diff(rows * workers + worker, prepend=-1) != 0
        worker, level, matched = worker[is_first], level[is_first], held[rows[is_first], level[is_first]]
        share = np.bincount(worker, matched / np.maximum(prompt.eligible, 1)[level], workers)
        share[np.bincount(worker, matched, workers) < FEWEST_MATCHES] = 0.0
        return np.minimum(share, 1.0)

    # -- the sets ---------------------------------------------------------------------------------------------------

    def _change(self, slots: _Slots, posting: Posting, step: int) -> None:
        """Adds `step` to the number of donors of the posting's worker and level, for the entries in `slots`."""
        holder = posting.worker << _WORKER_SHIFT | posting.level << _LEVEL_SHIFT
        before = (self._table[slots] & _NUMBER).tolist()
        uses = Counter(before)
        after = {number: self._changed(number, holder, step) for number in uses}
        for old, new in after.items():
            self._uses[old] -= uses[old]
            self._uses[new] += uses[old]
        for old in uses:
            if old != _EMPTY and not self._uses[old]:
                del self._numbers[self._sets[old]]
                self._sets[old] = b""
                self._free.append(old)
        entries = posting.entries.astype(np.uint64) << _ENTRY_SHIFT
        self._table[slots] = entries | np.array([after[number] for number in before], dtype=np.uint64)

    def _changed(self, number: int, holder: int, step: int) -> int:
        """The number of the set that results when `holder` (with a count of 0) has `step` more donors."""
        packed = self._sets[number]
        holders = _holders_in(packed)
        at = int(np.searchsorted(holders, holder))
        known = int(holders[at]) if at < len(holders) and holders[at] & ~_COUNT == holder else holder
        rest = packed[8 * (at + (known != holder)) :]
        changed = (known + step).to_bytes(8, sys.byteorder) if (known + step) & _COUNT else b""
        return self._number_of(packed[: 8 * at] + changed + rest)

    def _number_of(self, packed: bytes) -> int:
        number = self._numbers.get(packed)
        if number is None:
            if not self._free:
                self._free.append(len(self._sets))
                self._sets.append(b"")
                self._uses.append(0)
            number = self._numbers[packed] = self._free.pop()
            self._sets[number] = packed
        return number

    # -- the table --------------------------------------------------------------------------------------------------

    def _slots_of(self, entries: _Entries, *, takes: bool = False) -> _Slots:
        return _probe(self._table, self._factor, entries, takes, self._used)

    def _make_room(self, count: int) -> None:
        """Rebuilds the table without unused entries when it has no room for `count` more."""
        if self._used[0] + count > _MOST_FILLED * len(self._table):
            before = self._table[self._table & _NUMBER > _EMPTY]
            size = _FEWEST_SLOTS
            while size < 2 * (len(before) + count):
                size *= 2
            self._table = np.zeros(size, dtype=np.uint64)
            self._used[0] = 0
            self._table[self._slots_of((before >> _ENTRY_SHIFT).astype(np.uint32), takes=True)] = before


@functools.cache
def warm_up() -> None:
    """Compiles the index's code, or loads it from disk, so that no event waits for that."""
    SketchIndex().add(0, Sketch(0, 1, np.ones(1, dtype=np.uint32)))


@entry
def _probe(
    table: npt.NDArray[np.uint64], factor: np.uint64, entries: _Entries, takes: bool, used: npt.NDArray[np.int64]
) -> _Slots:
    """The slot of each entry, or the free slot for it, by linear probing: int64 [n].

    With `takes`, for which there must be room, free slots get the empty set and are counted in `used`, int64 [1].
    """
    slots, mask = np.empty(len(entries), dtype=np.int64), len(table) - 1
    for number in range(len(entries)):
        wanted = np.uint64(entries[number])
        at = np.int64(wanted * factor >> _ENTRY_SHIFT) & mask
        while table[at] != _FREE and table[at] >> _ENTRY_SHIFT != wanted:
            at = (at + 1) & mask
        if takes and table[at] == _FREE:
            table[at] = wanted << _ENTRY_SHIFT | np.uint64(_EMPTY)
            used[0] += 1
        slots[number] = at
    return slots


def _holders_in(packed: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(packed, dtype=np.int64)


@dataclass(slots=True, eq=False)
class KnownNamespace:
    """A namespace: its key, its salt's digest, the number and sketches of its donors."""

    key: str
    salt: str
    donors: int = 0
    index: SketchIndex = field(default_factory=SketchIndex)


class KnownNamespaces:
    """The namespaces of the known donors. Not thread safe."""

    def __init__(self, max_namespaces: int = MAX_NAMESPACES) -> None:
        self._max_namespaces = max_namespaces
        self._by_key: dict[str, KnownNamespace] = {}
        self._by_salt: dict[str, dict[str, KnownNamespace]] = {}
        self._spellings: OrderedDict[str, CacheNamespace] = OrderedDict()

    @property
    def is_full(self) -> bool:
        return len(self._by_key) >= self._max_namespaces

    def enter(self, values: Mapping[str, Any]) -> KnownNamespace:
        """Adds a donor to the namespace with these `values`.

        Raises NamespaceError for bad values, for a tenant key that does not match the salt, and for too many
        namespaces.
        """
        namespace = self._read(values)
        known = self._by_key.get(namespace.key)
        if known is None:
            if self.is_full:
                raise NamespaceError(f"donors are in more than {self._max_namespaces} namespaces; no more are kept")
            salt = str(namespace.extra.get("cache_salt", NO_SALT))
            known = KnownNamespace(namespace.key, salt)
            self._by_key[known.key] = known
            self._by_salt.setdefault(salt, {})[known.key] = known
        known.donors += 1
        return known

    def leave(self, known: KnownNamespace) -> None:
        """Removes a donor; a namespace without donors is forgotten."""
        known.donors -= 1
        if not known.donors:
            del self._by_key[known.key]
            of_salt = self._by_salt[known.salt]
            del of_salt[known.key]
            if not of_salt:
                del self._by_salt[known.salt]

    def met_by(self, salt: str | None) -> list[KnownNamespace]:
        """The namespaces that a request with this raw salt may reuse from, at most _MAX_MET, most donors first.

        Raises NamespaceError for a salt that no request may have.
        """
        met = self._by_salt.get(NO_SALT if salt is None else salt_digest(salt), {}).values()
        return sorted(met, key=lambda each: -each.donors)[:_MAX_MET]

    def _read(self, values: Mapping[str, Any]) -> CacheNamespace:
        """The namespace; cached for donors that state it in the same words."""
        spelling = repr(values)
        namespace = self._spellings.get(spelling)
        if namespace is None:
            namespace = CacheNamespace.from_dict(values)
            _check_tenant(namespace)
            self._spellings[spelling] = namespace
            if len(self._spellings) > _MAX_SPELLINGS:
                self._spellings.popitem(last=False)
        return namespace


def _check_tenant(namespace: CacheNamespace) -> None:
    salt, unsalted = str(namespace.extra.get("cache_salt", NO_SALT)), tenant_key(None)
    expected = unsalted if salt in (NO_SALT, salt_digest("")) else TENANT_PREFIX + salt.removeprefix(SALT_PREFIX)
    if namespace.extra.get("tenant_key", expected) != expected:
        raise NamespaceError("the namespace's tenant key is not that of its salt; use CacheNamespace.for_request()")
