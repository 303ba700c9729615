"""DonorIndex: the scheduler's donors, from the request that may leave one until the donor is dropped."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from semblend_trt.background import OnceAMinute
from semblend_trt.donors.catalog import Capacities, DonorCatalog, Tier
from semblend_trt.donors.device_tier import arena_blocks
from semblend_trt.donors.disk_tier import DonorText, file_bytes
from semblend_trt.donors.offload import DiskLink, OffloadEvent, OffloadEventKind, OffloadQueue, SaveIntent
from semblend_trt.donors.texts import DonorTexts
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.config import Settings
    from semblend_trt.donors.observer import DonorObserver
    from semblend_trt.donors.offload import SavedDonor
    from semblend_trt.donors.texts import Near
    from semblend_trt.pool_facts import PoolFacts

logger = logging.getLogger(__name__)
logger.addFilter(OnceAMinute(by_values=False))


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
    """Texts, catalog and offload queue, kept in step: a donor is found only while its bytes are held.

    `catalog` says where a donor is, `texts` what it holds, and `offload` collects what the catalog decides about tiers.
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
        geometry, bytes_per_token = pool.geometry, pool.geometry.bytes_per_token(pool.dtype)
        capacities = Capacities(
            host_bytes=settings.host_bytes,
            bytes_per_token=bytes_per_token,
            max_donors=settings.max_donors,
            device_blocks=arena_blocks(settings.device_bytes, geometry, pool.dtype),
            block_size=geometry.block_size,
            disk_bytes=0 if disk is None else settings.disk_bytes,
            file_bytes=partial(file_bytes, geometry.num_layers, bytes_per_token),
        )
        self.catalog = DonorCatalog(capacities, settings.eviction)
        self.texts = DonorTexts(settings)
        self.offload = OffloadQueue(self.catalog, (*observers, self.texts), disk, count)
        self._saving: dict[str, _Saving] = {}
        self._doomed: set[str] = set()

    def held(self) -> HeldDonors:
        """What the catalog holds at this moment; any thread may ask."""
        stats, limits = self.catalog.stats(), self.catalog.capacities
        return HeldDonors(
            donors=stats.ready + stats.resting,
            host_bytes=stats.used_bytes,
            device_bytes=stats.device_blocks_used * limits.block_size * limits.bytes_per_token,
            disk_bytes=stats.disk_bytes_used,
            approximate=len(self.catalog.generations),
        )

    # -- saving ----------------------------------------------------------------------------------------------------

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
        donor_id = intent.donor_id
        intent = replace(intent, max_tokens=len(tokens), generation=generation or 0)
        near = list(self.texts.near(namespace_key, tokens))
        is_short = generation is None or len(tokens) < self._settings.min_donor_tokens
        if is_short or self.is_kept(intent, near, len(tokens)):
            self.cancel(intent)
            return False
        continued = next(iter(self.texts.continued_by(intent, near)), "")
        try:
            moves = self.catalog.reserve(donor_id, len(tokens), continued, intent.generation)
        except CapacityError as error:
            logger.info("request %d does not become a donor: %s", intent.request_id, error)
            self.cancel(intent)
            return False
        self.offload.make_room(moves)
        self.texts.put(namespace_key, intent.generation, donor_id, tokens)
        self._saving[donor_id] = _Saving(intent, namespace_key, tokens, frozenset(block_ids))
        self.offload.save(
            replace(intent, tier=moves.tier, is_written=donor_id in moves.written),
            DonorText(namespace_key, tokens, intent.generation),
        )
        return True

    def is_kept(self, intent: SaveIntent, near: Iterable[Near], most: int) -> bool:
        """Whether another donor makes this one needless; that counts as a use of the other."""
        keeper = self.texts.keeper(intent, near, most)
        if keeper is not None:
            self.catalog.touch(keeper)
        return keeper is not None

    def is_saving(self, request_id: int) -> bool:
        """Whether the blocks of this request, which has ended, are held until its donor is saved."""
        return any(saving.intent.request_id == request_id for saving in self._saving.values())

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
        near = list(self.texts.near(entry.namespace_key, tokens))
        is_cut = why is None and len(tokens) < len(entry.tokens)
        is_short = len(tokens) < self._settings.min_donor_tokens
        if is_cut and (is_short or self.is_kept(entry.intent, near, len(tokens))):
            why = f"only {len(tokens)} of its {len(entry.tokens)} tokens were"
        if why is not None:
            logger.warning("donor %s was not saved: %s", saved.donor_id, why)
            self.catalog.cancel(saved.donor_id)
            self.offload.drop([saved.donor_id])
            return
        generation = entry.intent.generation
        tier = self.catalog.commit(saved.donor_id, len(tokens))
        if is_cut:
            self.texts.put(entry.namespace_key, generation, saved.donor_id, tokens)
        self.texts.spans.add(entry.namespace_key, saved.donor_id, tokens)
        for observer in self._observers:
            if generation:
                observer.gone(saved.donor_id)  # events cannot say that a donor is approximate
            else:
                observer.held(saved.donor_id, tokens, tier.value)
        self.texts.continue_with(entry.intent, near)
        self._drop_continued()

    def cancel(self, intent: SaveIntent) -> None:
        """Gives back the room of a request that does not become a donor."""
        self._saving.pop(intent.donor_id, None)
        self.catalog.cancel(intent.donor_id)
        self.offload.forget(intent.donor_id)

    # -- dropping --------------------------------------------------------------------------------------------------

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
        self._doomed |= set(self.texts)
        self._drop_doomed()

    def take_events(self, events: deque[OffloadEvent]) -> None:
        """Takes the tiers' events."""
        for donor_id, text in self.offload.take_events(events):
            self._found(donor_id, text)
        self._drop_doomed()
        self._drop_continued()

    def _found(self, donor_id: str, text: DonorText) -> None:
        """Makes a donor whose file was found known to look-ups and to the fleet; its text is not kept a second time."""
        intent = SaveIntent(0, donor_id, len(text.tokens), generation=text.generation, prompt_tokens=len(text.tokens))
        near = list(self.texts.near(text.namespace_key, text.tokens))
        self.texts.put(text.namespace_key, text.generation, donor_id, text.tokens)
        self.texts.spans.add(text.namespace_key, donor_id, text.tokens)
        if self.is_kept(intent, near, len(text.tokens)):
            self.lost({donor_id})
            return
        for observer in () if text.generation else self._observers:
            observer.found(donor_id, text.namespace_key, text.tokens, Tier.DISK.value)
        self.texts.continue_with(intent, near)
        self._drop_continued()

    def _drop_doomed(self) -> None:
        if self._doomed:
            self.lost(self._doomed)
            self._doomed.intersection_update(self.texts)

    def _drop_continued(self) -> None:
        """Drops donors that others continue: when nothing reads them, and the others are held and have their files."""
        continued = self.texts.continued.items()
        self.lost({older for older, newer in continued if not self.catalog.is_writing(newer)})
