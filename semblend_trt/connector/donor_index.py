"""The scheduler's donors: what is held, what may be leased for a plan, and what a finished request adds."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semblend_trt.discovery.planner import Deadline, LookupRequest, Planned, Planner
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.discovery.text_order import TextOrder
from semblend_trt.donors.catalog import DonorCatalog, Lease
from semblend_trt.donors.device_tier import arena_blocks
from semblend_trt.donors.donor_file import DonorText
from semblend_trt.donors.donor_table import Capacities, Tier
from semblend_trt.donors.offload import DiskLink, OffloadCommands, OffloadEvent, OffloadEventKind, SaveIntent
from semblend_trt.errors import CapacityError, DonorUnavailableError
from semblend_trt.once_a_minute import OnceAMinute
from semblend_trt.plan import gaps

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.config import Settings
    from semblend_trt.connector.requests import TrackedRequest
    from semblend_trt.discovery.text_order import Near
    from semblend_trt.donors.donor_table import TierMoves
    from semblend_trt.donors.observer import DonorObserver
    from semblend_trt.donors.offload import SavedDonor
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.pool_facts import PoolFacts

logger = logging.getLogger(__name__)
logger.addFilter(OnceAMinute(by_values=False))

# Each fetch and each promotion holds room in two tiers until it has ended.
MAX_FETCHES, MAX_PROMOTIONS = 4, 2
# Fetches that no look-up has asked for begin only while fewer than this are under way.
MAX_PREFETCHES = 2
# Most tokens of a request's answer that its donor holds.
MAX_ANSWER_TOKENS = 1024
# A text is kept beside another one that begins alike if it adds a span, or one in so many of its tokens.
LITTLE_SHARE = 8
# A look-up indexes at most this many donors that were found on disk: it waits for them.
_FOUND_AT_ONCE = 4


@dataclass(slots=True)
class _Saving:
    """A donor that a worker is asked to save: int32 `tokens`, and the engine's blocks that hold them.

    `is_sound` until the engine is seen to copy into one of the blocks, or the donor is to be dropped.
    """

    intent: SaveIntent
    namespace_key: str
    tokens: npt.NDArray[np.int32]
    block_ids: frozenset[int]
    is_sound: bool = True


@dataclass(frozen=True, slots=True)
class HeldDonors:
    """Donors that can be found, and the bytes taken in each tier, including those that running saves have reserved.

    `approximate` donors were built from approximate KV, or will be when their save ends.
    """

    donors: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    disk_bytes: int = 0
    approximate: int = 0


class DonorIndex:
    """Span index, planner and catalog, kept in step: a donor is found only while its bytes are held.

    A text is kept once: what would add little to another donor is not saved, and a donor that another one
    continues goes when that is held. What the catalog decides about the tiers is collected in `offload`.
    """

    def __init__(
        self,
        settings: Settings,
        pool: PoolFacts,
        observers: Sequence[DonorObserver],
        disk: DiskLink | None,
        count: Callable[[OffloadEventKind], None],
    ) -> None:
        """`observers` hear which donors are held, and where. `disk` is None without an open disk tier. `count` hears
        every event of the tiers."""
        self._settings, self._observers = settings, observers
        self._index = SpanIndex()
        # Of donors built from approximate KV, also while they are being saved; all others are of generation 0.
        self._generations: dict[str, int] = {}
        self._planner = Planner(
            self._index,
            settings,
            settings.policy,
            pool.geometry.num_layers,
            self._is_near,
            self._generations,
            pool.chunk,
        )
        self._block_size = pool.geometry.block_size
        self._bytes_per_token = pool.geometry.bytes_per_token(pool.dtype)
        capacities = Capacities(
            host_bytes=settings.host_bytes,
            bytes_per_token=self._bytes_per_token,
            max_donors=settings.max_donors,
            device_blocks=arena_blocks(settings.device_bytes, pool.geometry, pool.dtype),
            block_size=self._block_size,
            disk_bytes=0 if disk is None else settings.disk_bytes,
            num_layers=pool.geometry.num_layers,
        )
        self.catalog = DonorCatalog(capacities, settings.eviction)
        self.offload = OffloadQueue(self, disk, count)
        self._saving: dict[str, _Saving] = {}
        self._doomed: set[str] = set()
        # Of all donors, also while they are being saved; and those that others continue, which go once they can.
        self._texts = TextOrder()
        self._continued: dict[str, str] = {}

    # -- lookup ----------------------------------------------------------------------------------------------------

    def plan(self, lookup: LookupRequest) -> tuple[Planned, list[Lease]]:
        """Plans a lookup and leases every donor of the plan. A donor that cannot be leased is planned around, as often
        as the deadline allows.

        Where a plan with donors on disk would reuse more, they are fetched: a later lookup finds them in memory.
        """
        excluded: frozenset[str] = frozenset()
        deadline = Deadline(self._settings.lookup_deadline_ms, len(lookup.tokens))
        on_disk: list[str] = []
        reused_with_disk = 0
        planned, leases = Planned(plan=None, outcome_reason="donor_unavailable", runs_found=0), list[Lease]()
        while True:
            found = self._planner.plan(lookup.excluding(excluded), deadline, planned.scan)
            planned = replace(planned, runs_found=found.runs_found, scan=found.scan)
            if found.plan is None or not found.plan.matched_tokens:
                planned = found
                break
            donors = _most_used_first(found.plan)
            leases, missing = self._lease(donors)
            if not missing:
                planned = found
                self.offload.promote(donors)
                break
            for lease in leases:
                lease.release()
            leases, resting = [], self.catalog.resting()
            if not on_disk and missing & resting:
                on_disk, reused_with_disk = (
                    [each for each in donors if each in missing & resting],
                    found.plan.reused_tokens,
                )
                excluded |= resting
            excluded |= missing
            if deadline.is_over():
                break
        if on_disk and reused_with_disk > (planned.plan.reused_tokens if planned.plan is not None else 0):
            self.offload.fetch(on_disk)
            if planned.plan is None:
                planned = replace(planned, outcome_reason="donor_on_disk")
        return planned, leases

    def generation(self, donor_id: str) -> int:
        """How often the donor's KV was built from approximate KV; 0 for what a cold run would produce."""
        return self._generations.get(donor_id, 0)

    def held(self) -> HeldDonors:
        """What the catalog holds at this moment; any thread may ask."""
        stats = self.catalog.stats()
        device_bytes = stats.device_blocks_used * self._block_size * self._bytes_per_token
        donors, approximate = stats.ready + stats.resting, len(self._generations)
        return HeldDonors(donors, stats.used_bytes, device_bytes, stats.disk_bytes_used, approximate)

    def holds(self, namespace_key: str, tokens: npt.NDArray[np.int32]) -> bool:
        """Whether donors hold all of `tokens`, int32 [n], that would be kept of them, in any tier, as a cold run would
        compute it."""
        held = (near for near in self._texts.near(namespace_key, tokens) if near.donor_id in self._index)
        return any(not near.generation and self._is_little(len(tokens) - near.common, len(tokens)) for near in held)

    def __iter__(self) -> Iterator[str]:
        """The donors that are held or being saved."""
        return iter(self._texts)

    # -- saving ----------------------------------------------------------------------------------------------------

    def intend(
        self, donor_id: str, tracked: TrackedRequest, max_new_tokens: int, generations: int = 0
    ) -> SaveIntent | None:
        """What the request may leave as a donor; it takes no room before it ends.

        That is its leading part up to generation `generations`, if text is computed there that no donor of its plan
        holds; else its exact part; of the answer MAX_ANSWER_TOKENS at most. Returns no intent when that is too short,
        or held already.
        """
        plan, generation = tracked.plan, 0
        limit = len(tracked.prompt) + min(max_new_tokens, MAX_ANSWER_TOKENS)
        if plan is not None and plan.matched_tokens and not plan.is_exact:
            end, generation = plan.donor_part(generations)
            taken = ((span.target_start, span.target_end) for span in plan.spans)
            longest = max(map(len, gaps(taken, plan.num_computed_tokens, end)), default=0)
            if longest < self._settings.min_donor_tokens:
                end, generation = plan.donor_part(0)
            limit = limit if end == plan.prompt_length else end
        prompt = tracked.prompt[:limit]
        intent = SaveIntent(tracked.request_id, donor_id, limit, generation=generation, prompt_tokens=len(prompt))
        if limit < self._settings.min_donor_tokens:
            return None
        return None if self._is_kept(intent, self._texts.near(tracked.namespace_key, prompt), limit) else intent

    def begin_save(
        self,
        intent: SaveIntent,
        namespace_key: str,
        tokens: npt.NDArray[np.int32],
        block_ids: Iterable[int] = (),
        generation: int | None = 0,
    ) -> bool:
        """Takes room for `tokens` (int32 [n], the donor's whole text, in the engine's blocks `block_ids`), and has the
        workers save them. Returns False when they are too few, held already or without room, or when no `generation`
        says what they are."""
        donor_id, text = intent.donor_id, _digest(namespace_key, tokens[: intent.prompt_tokens])
        intent = replace(intent, max_tokens=len(tokens), generation=generation or 0)
        near = list(self._texts.near(namespace_key, tokens))
        is_short = generation is None or len(tokens) < self._settings.min_donor_tokens
        if is_short or self._is_kept(intent, near, len(tokens)):
            self.cancel(intent)
            return False
        try:
            moves = self.catalog.reserve(donor_id, len(tokens), next(iter(self._continued_by(intent, near)), ""))
        except CapacityError as error:
            logger.info("request %d does not become a donor: %s", intent.request_id, error)
            self.cancel(intent)
            return False
        self.offload.make_room(moves)
        self._name(donor_id, namespace_key, tokens, intent.generation)
        self._saving[donor_id] = _Saving(intent, namespace_key, tokens, frozenset(block_ids))
        self.offload.add_text(donor_id, DonorText(namespace_key, tokens, text, intent.generation))
        self.offload.save(replace(intent, tier=moves.tier, is_written=donor_id in moves.written))
        return True

    def copied_into(self, block_id: int) -> None:
        """The engine copies into this block, in no known order to a save that may still read it: a donor that is being
        saved from it is not kept."""
        for saving in self._saving.values():
            saving.is_sound &= block_id not in saving.block_ids

    def saved(self, saved: SavedDonor) -> None:
        """The worker holds the donor, could not save it, or lost it on its way to the host. Only a held one is
        found."""
        entry = self._saving.pop(saved.donor_id, None)
        if entry is None:
            if saved.error is not None:
                self.lost({saved.donor_id})
            return
        tokens, why = entry.tokens[: saved.tokens], saved.error
        if why is None and not entry.is_sound:
            why = "its KV is not to be kept any more"
        near = list(self._texts.near(entry.namespace_key, tokens))
        is_cut = why is None and len(tokens) < len(entry.tokens)
        is_short = len(tokens) < self._settings.min_donor_tokens
        if is_cut and (is_short or self._is_kept(entry.intent, near, len(tokens))):
            why = f"only {len(tokens)} of its {len(entry.tokens)} tokens were"
        if why is not None:
            logger.warning("donor %s was not saved: %s", saved.donor_id, why)
            self.catalog.cancel(saved.donor_id)
            self.offload.drop([saved.donor_id])
            return
        generation = entry.intent.generation
        tier = self.catalog.commit(saved.donor_id, len(tokens))
        if is_cut:
            self._name(saved.donor_id, entry.namespace_key, tokens, generation)
        self._index.add(entry.namespace_key, saved.donor_id, tokens)
        for observer in self._observers:
            if generation:
                observer.gone(saved.donor_id)  # events cannot say that a donor is approximate
            else:
                observer.held(saved.donor_id, tokens, tier.value)
        self._continue(entry.intent, near)

    def cancel(self, intent: SaveIntent) -> None:
        """Gives back the room of a request that does not become a donor."""
        self._saving.pop(intent.donor_id, None)
        self.catalog.cancel(intent.donor_id)
        self.forget(intent.donor_id)

    def lost(self, donor_ids: set[str]) -> list[str]:
        """Drops donors whose KV could not be read, so that no later prompt counts on them; returns those dropped.

        A donor that another request has leased stays until that request's own load tells.
        """
        dropped = [donor_id for donor_id in sorted(donor_ids) if self.catalog.drop(donor_id)]
        self.offload.drop(dropped)
        return dropped

    def lost_all(self) -> None:
        """Drops every donor: at once, or when its save, its transfer or its last lease ends. No look-up finds them."""
        for saving in self._saving.values():
            saving.is_sound = False
        self._doomed |= set(self)
        self._drop_doomed()

    def _drop_doomed(self) -> None:
        if self._doomed:
            self.lost(self._doomed)
            self._doomed.intersection_update(self)

    # -- the tiers -------------------------------------------------------------------------------------------------

    def take_events(self, events: deque[OffloadEvent]) -> None:
        """Takes the tiers' events."""
        self.offload.take_events(events)
        self._drop_doomed()
        self._drop_continued()

    def remember(self, donor_id: str, text: DonorText) -> None:
        """Makes a donor whose file was found known to look-ups and to the fleet; its text is not kept a second time."""
        intent = SaveIntent(0, donor_id, len(text.tokens), generation=text.generation, prompt_tokens=len(text.tokens))
        near = list(self._texts.near(text.namespace_key, text.tokens))
        self._name(donor_id, text.namespace_key, text.tokens, text.generation)
        self._index.add(text.namespace_key, donor_id, text.tokens)
        if self._is_kept(intent, near, len(text.tokens)):
            self.lost({donor_id})
            return
        for observer in () if text.generation else self._observers:
            observer.found(donor_id, text.namespace_key, text.tokens, Tier.DISK.value)
        self._continue(intent, near)

    def moved(self, donor_id: str, tier: Tier) -> None:
        """Tells the observers where the donor is held now."""
        for observer in self._observers:
            observer.moved(donor_id, tier.value)

    def forget(self, donor_id: str) -> None:
        """The donor is not found any more, and its text may be kept anew."""
        for observer in self._observers:
            observer.gone(donor_id)
        self._index.remove(donor_id)
        self.offload.remove_text(donor_id)
        self._generations.pop(donor_id, None)
        self._continued.pop(donor_id, None)
        self._texts.remove(donor_id)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _is_little(self, tokens: int, length: int) -> bool:
        """Whether `tokens` that no other donor holds are too few to keep a text of `length` tokens for them."""
        return tokens < min(self._settings.min_span_tokens, self._settings.min_donor_tokens, 1 + length // LITTLE_SHARE)

    def _is_kept(self, intent: SaveIntent, near: Iterable[Near], most: int) -> bool:
        """Whether a donor of the same or a lower generation holds all but few of a text of at most `most` tokens, or
        its prompt with another answer; that counts as a use of that donor. `near` are texts near this one."""
        for each in near:
            if each.donor_id == intent.donor_id or each.generation > intent.generation:
                continue
            is_longer = not self._is_little(each.length - each.common, each.length)
            if self._is_little(most - each.common, most) or (is_longer and each.common >= intent.prompt_tokens):
                self.catalog.touch(each.donor_id)
                return True
        return False

    def _continued_by(self, intent: SaveIntent, near: Iterable[Near]) -> list[str]:
        """Donors of the same or a higher generation of which the text that these are near holds all but few."""
        others = (each for each in near if each.donor_id != intent.donor_id and each.generation >= intent.generation)
        return [each.donor_id for each in others if self._is_little(each.length - each.common, each.length)]

    def _continue(self, intent: SaveIntent, near: Iterable[Near]) -> None:
        """Has the donors go that this one, which is held now, continues."""
        continued = self._continued_by(intent, near)
        self._continued.update(dict.fromkeys(continued, intent.donor_id))
        for older, newer in self._continued.items():
            self._continued[older] = intent.donor_id if newer in continued else newer
        self._drop_continued()

    def _drop_continued(self) -> None:
        """Drops donors that others continue: when nothing reads them, and the others are held and have their files."""
        ready = {each for each in self._continued.values() if each in self._index and not self.catalog.is_writing(each)}
        self.lost({older for older, newer in self._continued.items() if newer in ready})

    def _name(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], generation: int) -> None:
        self._texts.put(namespace_key, generation, donor_id, tokens)
        if generation:
            self._generations[donor_id] = generation

    def _lease(self, donor_ids: Iterable[str]) -> tuple[list[Lease], frozenset[str]]:
        leases, missing = [], set()
        for donor_id in sorted(donor_ids):
            try:
                leases.append(self.catalog.lease(donor_id))
            except DonorUnavailableError:
                missing.add(donor_id)
        return leases, frozenset(missing)

    def _is_near(self, donor_id: str) -> bool:
        return self.catalog.tier(donor_id) is Tier.DEVICE


class OffloadQueue:
    """Collects commands for the tiers, and keeps index and catalog in step with the tiers' events.

    A donor on disk alone is never promised: a look-up that would have used it has it fetched, and a later one finds it
    in memory. A donor that is used from host memory is promoted to the device, if there is one.
    """

    def __init__(self, index: DonorIndex, link: DiskLink | None, count: Callable[[OffloadEventKind], None]) -> None:
        self._index, self._catalog, self._link, self._count = index, index.catalog, link, count
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
            self._index.moved(donor_id, Tier.DISK)
        for donor_id in moves.offloaded:
            self._commands.offloads.append(donor_id)
            self._index.moved(donor_id, Tier.HOST)
        self._commands.writes.extend(donor_id for donor_id in moves.written if donor_id in moves.offloaded)

    def save(self, intent: SaveIntent) -> None:
        """Has an ended request's KV saved, for which the commands so far make room."""
        self._commands.saves.append(intent)

    def drop(self, donor_ids: Iterable[str]) -> None:
        """Has donors dropped that the catalog no longer holds."""
        for donor_id in donor_ids:
            self._commands.drops.append(donor_id)
            self._index.forget(donor_id)

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

    def add_text(self, donor_id: str, text: DonorText) -> None:
        """The donor is being saved, and may get a file later."""
        if self._link is not None:
            self._link.texts[donor_id] = text

    def remove_text(self, donor_id: str) -> None:
        """The donor gets no file any more."""
        if self._link is not None:
            self._link.texts.pop(donor_id, None)

    def take_events(self, events: deque[OffloadEvent]) -> None:
        """Takes all events, and of the donors that were found on disk a few."""
        while events:
            self._take(events.popleft())
        for _ in range(_FOUND_AT_ONCE):
            if self._link is not None and self._link.found:
                self._take(self._link.found.popleft())

    def _take(self, event: OffloadEvent) -> None:
        self._count(event.kind)
        kind, donor_id = event.kind, event.donor_id
        if kind is OffloadEventKind.FILE_FOUND and event.text is not None:
            self._found(donor_id, event.text)
        elif kind is OffloadEventKind.FILES_READ:
            # Before, the disk may hold files that the catalog has not counted yet.
            self._catalog.begin_writing()
        elif kind in (OffloadEventKind.FILE_WRITTEN, OffloadEventKind.WRITE_FAILED, OffloadEventKind.WRITE_SKIPPED):
            dropped = self._catalog.written(donor_id, kind is OffloadEventKind.FILE_WRITTEN, event.free)
            if dropped is not None and event.text is not None:
                self.drop(dropped)
                self.add_text(donor_id, event.text)
                self._commands.writes.append(donor_id)
        elif kind in (OffloadEventKind.PROMOTED, OffloadEventKind.PROMOTE_FAILED):
            self._promoting.discard(donor_id)
            self._catalog.promoted(donor_id, kind is OffloadEventKind.PROMOTED)
            self._index.moved(donor_id, self._catalog.tier(donor_id) or Tier.HOST)
        elif kind in (OffloadEventKind.FETCHED, OffloadEventKind.FETCH_FAILED):
            self._fetching.discard(donor_id)
            is_here = kind is OffloadEventKind.FETCHED
            if self._catalog.fetched(donor_id, is_here) and not is_here:
                self.drop([donor_id])
            elif is_here:
                self._index.moved(donor_id, Tier.HOST)

    def _begin_fetch(self, donor_id: str, moves: TierMoves | None) -> None:
        if moves is not None:
            self.make_room(moves)
            self._commands.fetches.append(donor_id)
            self._fetching.add(donor_id)

    def _found(self, donor_id: str, text: DonorText) -> None:
        dropped = self._catalog.adopt(donor_id, len(text.tokens))
        if dropped is None:
            self._commands.drops.append(donor_id)
        else:
            self.drop(dropped)
            self._index.remember(donor_id, text)


def _most_used_first(plan: SemanticKvPlan) -> list[str]:
    tokens = Counter[str]()
    for span in plan.spans:
        tokens[span.donor_id] += span.length
    return sorted(tokens, key=lambda donor_id: (-tokens[donor_id], donor_id))


def _digest(namespace_key: str, tokens: npt.NDArray[np.int32]) -> bytes:
    digest = hashlib.blake2b(namespace_key.encode(), digest_size=16)
    digest.update(tokens.tobytes())
    return digest.digest()
