"""DonorIndex: the scheduler's donors, from the request that may leave one until the donor is dropped."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from semblend_trt.background import quiet_logger
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.donors.catalog import Capacities, CatalogStats, DonorCatalog, Tier
from semblend_trt.donors.offload import (
    DiskLink,
    DonorObserver,
    DonorText,
    OffloadEvent,
    OffloadEventKind,
    OffloadQueue,
    SaveIntent,
)
from semblend_trt.donors.store import arena_blocks
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from semblend_trt.config import Settings
    from semblend_trt.discovery.fingerprint import TokenArray
    from semblend_trt.donors.offload import SavedDonor
    from semblend_trt.pool_facts import PoolFacts

logger = quiet_logger(__name__)

# Neighbours to compare on each side. One suffices where no text continues another.
_REACH = 2
# A text is kept beside one that begins alike if it adds a span, or 1 / LITTLE_SHARE of its tokens.
LITTLE_SHARE = 8
# How many first tokens of a text begin the text in question, and that text.
Near: TypeAlias = "tuple[int, DonorText]"


class DonorTexts(DonorObserver):
    """Keep donors' texts by namespace and generation, sorted by tokens, so that texts that begin alike are neighbours.

    A text is kept once: what adds little to another donor becomes no donor, and a donor goes once another, held one
    continues it. `by_id` has those of running saves too, `spans` only those of held donors, and `generations` those
    above 0. A search for near texts compares a few arrays, whatever is held."""

    def __init__(self, settings: Settings) -> None:
        self.spans = SpanIndex()
        self.generations: dict[str, int] = {}
        self._settings = settings
        self._orders: dict[tuple[str, int], list[DonorText]] = {}
        self.by_id: dict[str, DonorText] = {}
        self._highest = 0  # generation
        # Donors that others continue: they go once they can.
        self._continued: dict[str, str] = {}

    def put(self, text: DonorText) -> None:
        """Hold a donor's text, whose tokens never change, in place of its former one."""
        self._remove(text.donor_id)
        self.by_id[text.donor_id], self._highest = text, max(self._highest, text.generation)
        if text.generation:
            self.generations[text.donor_id] = text.generation
        insort(self._orders.setdefault((text.namespace_key, text.generation), []), text)

    def gone(self, donor_id: str) -> None:
        """Forget the donor; its text may be kept again."""
        self.spans.remove(donor_id)
        self._continued.pop(donor_id, None)
        self._remove(donor_id)

    def near(self, namespace_key: str, tokens: TokenArray) -> Iterator[Near]:
        """Yield some texts of each generation, among them the one that begins most like `tokens`."""
        asked = DonorText("", namespace_key, tokens)
        for generation in range(self._highest + 1):
            order = self._orders.get((namespace_key, generation), [])
            at = bisect_left(order, asked)
            for each in order[max(0, at - _REACH) : at + _REACH]:
                yield each.common(asked), each

    def keeper(self, intent: SaveIntent, near: Iterable[Near]) -> str | None:
        """Return the donor that makes the intent's tokens needless, or None. `near`: texts near them.

        Its generation is not higher. It holds all but few of the tokens, or their prompt with another answer."""
        for common, text in near:
            if text.donor_id == intent.donor_id or text.generation > intent.generation:
                continue
            has_answer = common >= intent.prompt_tokens and not self._adds_little(len(text.tokens), common)
            if has_answer or self._adds_little(intent.max_tokens, common):
                return text.donor_id
        return None

    def continued_by(self, intent: SaveIntent, near: Iterable[Near]) -> list[str]:
        """Return donors of the same or a higher generation that this text holds all but few tokens of."""
        found = (text for common, text in near if self._adds_little(len(text.tokens), common))
        others = (text for text in found if text.donor_id != intent.donor_id)
        return [text.donor_id for text in others if text.generation >= intent.generation]

    def continue_with(self, intent: SaveIntent, near: Iterable[Near]) -> None:
        """Note that the intent's held donor continues those that it holds all but few tokens of."""
        continued = self.continued_by(intent, near)
        older = [each for each, newer in self._continued.items() if newer in continued]
        self._continued.update(dict.fromkeys([*continued, *older], intent.donor_id))

    @property
    def continued(self) -> dict[str, str]:
        """Donors, each with the held one that continues it."""
        return {older: newer for older, newer in self._continued.items() if newer in self.spans}

    def _adds_little(self, length: int, common: int) -> bool:
        """Return whether a text of `length` tokens is not worth keeping where another one holds its first `common`."""
        least = min(self._settings.min_span_tokens, self._settings.min_donor_tokens, 1 + length // LITTLE_SHARE)
        return length - common < least

    def _remove(self, donor_id: str) -> None:
        if (text := self.by_id.pop(donor_id, None)) is None:
            return
        self.generations.pop(donor_id, None)
        order = self._orders[text.namespace_key, text.generation]
        del order[order.index(text, bisect_left(order, text))]
        if not order:
            del self._orders[text.namespace_key, text.generation]


@dataclass(slots=True)
class _Saving:
    """A save; `is_sound` until the engine copies into one of its blocks, or the donor is to be dropped."""

    intent: SaveIntent
    block_ids: frozenset[int]
    is_sound: bool = True


class DonorIndex:
    """Keep texts, catalog and offload queue in step: a donor is found only while its bytes are held, if only by the
    blocks that the engine holds until they are saved.

    `catalog` says where a donor is, `texts` what it holds; `offload` collects the catalog's decisions about tiers."""

    def __init__(
        self,
        settings: Settings,
        pool: PoolFacts,
        observers: Sequence[DonorObserver],
        disk: DiskLink | None,
        count: Callable[[OffloadEventKind], None],
    ) -> None:
        """Hold no donor yet. `observers` hear of held donors, `count` of every tier event; `disk` needs a disk tier."""
        self._settings, self._observers = settings, observers
        self._are_held = pool.holds_saved_blocks and not pool.exchanges_blocks
        self.texts, geometry = DonorTexts(settings), pool.geometry
        capacities = Capacities(
            host_bytes=settings.host_bytes,
            bytes_per_token=geometry.bytes_per_token(pool.dtype),
            max_donors=settings.max_donors,
            device_blocks=arena_blocks(settings.device_bytes, geometry, pool.dtype),
            block_size=geometry.block_size,
        )
        if disk is not None:
            from semblend_trt.donors.disk_tier import KvForm  # few engines have a disk tier

            sizes = KvForm(geometry, pool.dtype).file_bytes
            capacities = replace(capacities, disk_bytes=settings.disk_bytes, file_bytes=sizes)
            disk.texts = self.texts.by_id
        self.catalog = DonorCatalog(capacities, settings.eviction)
        self.offload = OffloadQueue(self.catalog, (*observers, self.texts), disk, count)
        self._saving: dict[str, _Saving] = {}
        self._doomed: set[str] = set()

    def held(self) -> CatalogStats:
        """Return what the catalog holds now; any thread may call."""
        return replace(self.catalog.stats(), approximate=len(self.texts.generations))

    def begin_save(
        self,
        intent: SaveIntent,
        namespace_key: str,
        tokens: TokenArray,
        block_ids: Iterable[int] = (),
        generation: int | None = 0,
    ) -> bool:
        """Take room for the donor's whole text, `tokens` (int32 [n]), and have the workers save it.

        Returns False when the text is too short, held already or without room, or has no `generation`."""
        donor_id = intent.donor_id
        text = DonorText(donor_id, namespace_key, tokens, generation or 0)
        intent = replace(intent, max_tokens=len(tokens), generation=text.generation)
        near = list(self.texts.near(namespace_key, tokens))
        is_short = generation is None or len(tokens) < self._settings.min_donor_tokens
        if is_short or self.is_kept(intent, near):
            self.cancel(intent)
            return False
        continued = next(iter(self.texts.continued_by(intent, near)), "")
        try:
            moves = self.catalog.reserve(donor_id, len(tokens), continued, is_held=self._are_held)
        except CapacityError as error:
            logger.info("request %d does not become a donor: %s", intent.request_id, error)
            self.cancel(intent)
            return False
        self.offload.make_room(moves)
        self.texts.put(text)
        if self._are_held:
            self.texts.spans.add(namespace_key, donor_id, tokens)
        self._saving[donor_id] = _Saving(intent, frozenset(block_ids))
        self.offload.save(replace(intent, tier=moves.tier, is_written=donor_id in moves.written))
        return True

    def is_kept(self, intent: SaveIntent, near: Iterable[Near]) -> bool:
        """Return whether another donor makes this one needless; that counts as a use of the other."""
        if (keeper := self.texts.keeper(intent, near)) is not None:
            self.catalog.touch(keeper)
        return keeper is not None

    def is_saving(self, request_id: int) -> bool:
        """Return whether the blocks of this ended request are held until its donor is saved."""
        return any(saving.intent.request_id == request_id for saving in self._saving.values())

    def copied_into(self, block_id: int) -> None:
        """Discard running saves from this block: the engine copies into it, in no known order to their reads."""
        for saving in self._saving.values():
            saving.is_sound &= block_id not in saving.block_ids

    def saved(self, saved: SavedDonor) -> None:
        """Take the worker's report: the donor is held in a tier, not saved, or lost on its way down."""
        donor_id, why, entry = saved.donor_id, saved.error, self._saving.pop(saved.donor_id, None)
        if entry is None:
            if why is not None:
                self.lost({donor_id})
            return
        text, whole = self.texts.by_id[donor_id], entry.intent.max_tokens
        tokens = text.tokens[: saved.tokens]
        text, intent = replace(text, tokens=tokens), replace(entry.intent, max_tokens=len(tokens))
        if why is None and not entry.is_sound:
            why = "its KV is not to be kept any more"
        near = list(self.texts.near(text.namespace_key, tokens))
        is_cut, is_short = len(tokens) < whole, len(tokens) < self._settings.min_donor_tokens
        if why is None and is_cut and (is_short or self.is_kept(intent, near)):
            why = f"only {len(tokens)} of its {whole} tokens were"
        if why is not None:
            logger.warning("donor %s was not saved: %s", donor_id, why)
            self.catalog.cancel(donor_id)
            self.offload.drop([donor_id])
            return
        tier = self.catalog.commit(donor_id, len(tokens))
        if is_cut:
            self.texts.put(text)
            self.texts.spans.remove(donor_id)
        if donor_id not in self.texts.spans:
            self.texts.spans.add(text.namespace_key, donor_id, tokens)
        for observer in self._observers:
            if text.generation:
                observer.gone(donor_id)  # events cannot say that a donor is approximate
            else:
                observer.held(donor_id, tokens, tier.value)
        self.texts.continue_with(intent, near)
        self._drop_what_can_go()

    def cancel(self, intent: SaveIntent) -> None:
        """Give back the room of a request that does not become a donor."""
        self._saving.pop(intent.donor_id, None)
        self.catalog.cancel(intent.donor_id)
        self.offload.forget(intent.donor_id)

    def lost(self, donor_ids: set[str]) -> None:
        """Drop donors whose KV was unreadable, so that no later prompt counts on them.

        A donor that another request leases stays until that request's load reports it."""
        self.offload.drop([donor_id for donor_id in sorted(donor_ids) if self.catalog.drop(donor_id)])

    def lost_all(self) -> None:
        """Drop every donor, now or when its save, transfer or last lease ends. No lookup finds them."""
        for saving in self._saving.values():
            saving.is_sound = False
        self._doomed |= set(self.texts.by_id)
        self._drop_what_can_go()

    def take_events(self, events: deque[OffloadEvent]) -> None:
        """Take the tiers' events, and drop what can go."""
        for text in self.offload.take_events(events):
            # Found on disk: lookups and the fleet learn of it, unless another one keeps its text.
            donor_id, key, tokens, length = text.donor_id, text.namespace_key, text.tokens, len(text.tokens)
            intent = SaveIntent(0, donor_id, length, generation=text.generation, prompt_tokens=length)
            near = list(self.texts.near(key, tokens))
            self.texts.put(text)
            self.texts.spans.add(key, donor_id, tokens)
            if self.is_kept(intent, near):
                self.lost({donor_id})
                continue
            for observer in () if text.generation else self._observers:
                observer.found(donor_id, key, tokens, Tier.DISK.value)
            self.texts.continue_with(intent, near)
            self._drop_what_can_go()
        self._drop_what_can_go()

    def _drop_what_can_go(self) -> None:
        """Drop doomed donors, and those that others continue once these have their files, where nothing reads them."""
        continued = self.texts.continued.items()
        self.lost(self._doomed | {older for older, newer in continued if not self.catalog.is_writing(newer)})
        self._doomed.intersection_update(self.texts.by_id)
