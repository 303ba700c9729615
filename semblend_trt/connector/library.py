"""The scheduler's donors: what is held, what may be leased for a plan, and what a finished request adds."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semblend_trt.connector.metadata import SaveIntent
from semblend_trt.connector.tier_desk import TierDesk
from semblend_trt.discovery.deadline import Deadline
from semblend_trt.discovery.planner import LookupRequest, Planned, Planner
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.donors.catalog import DonorCatalog, Lease
from semblend_trt.donors.device_tier import arena_blocks
from semblend_trt.donors.donor_file import DonorText
from semblend_trt.donors.donor_table import Tier
from semblend_trt.donors.eviction import eviction_factory
from semblend_trt.errors import CapacityError, DonorUnavailableError
from semblend_trt.fleet.announcer import Silence
from semblend_trt.metrics import HeldDonors

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable

    import numpy as np
    import numpy.typing as npt

    from semblend_trt.config import Settings
    from semblend_trt.connector.kind_reader import KindReader
    from semblend_trt.connector.requests import TrackedRequest
    from semblend_trt.donors.offload import DiskLink, TierEvent, TierNews, TierOrders
    from semblend_trt.fleet.announcer import DonorNews
    from semblend_trt.runtime import PoolFacts, SavedDonor

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Saving:
    """A donor that a worker is asked to save: int32 `tokens`, and the engine's blocks that hold them.

    `is_sound` until the engine is seen to copy into one of the blocks.
    """

    namespace_key: str
    tokens: npt.NDArray[np.int32]
    block_ids: frozenset[int]
    is_sound: bool = True


# A donor that vanishes between search and lease is rare; asking more than a few times would stall the scheduler.
MAX_PLANNING_ROUNDS = 3


class Library:
    """Index, planner and catalog kept in step: a donor is found only while its bytes are held.

    What the catalog decides about the tiers is collected until `take_orders`.
    """

    def __init__(
        self,
        settings: Settings,
        pool: PoolFacts,
        news: DonorNews | None = None,
        disk: DiskLink | None = None,
        count: Callable[[TierEvent], None] = lambda _: None,
        kinds: KindReader | None = None,
    ) -> None:
        """`news` is told which donors are held, and where; nobody is without it. `disk` is there while the disk tier
        is open, and `count` is told of what happens in the tiers. `kinds` reads donors' texts for eviction."""
        self._settings, self._news = settings, news or Silence()
        self._index = SpanIndex()
        self._planner = Planner(self._index, settings, settings.policy, pool.geometry.num_layers, self._is_near)
        self._block_size = pool.geometry.block_size
        self._bytes_per_token = pool.geometry.bytes_per_token(pool.dtype)
        self.catalog = DonorCatalog(
            byte_budget=settings.host_bytes,
            bytes_per_token=self._bytes_per_token,
            max_donors=settings.max_donors,
            device_blocks=arena_blocks(settings.device_bytes, pool.geometry, pool.dtype),
            block_size=self._block_size,
            disk_bytes=0 if disk is None else settings.disk_bytes,
            num_layers=pool.geometry.num_layers,
            eviction=eviction_factory(settings.eviction, time.monotonic),
        )
        self._tiers = TierDesk(self.catalog, self, disk, count)
        self._kinds = kinds
        self._saving: dict[str, _Saving] = {}
        self._donor_of_text: dict[bytes, str] = {}
        self._text_of_donor: dict[str, bytes] = {}

    def plan(self, lookup: LookupRequest) -> tuple[Planned, list[Lease]]:
        """Plans a lookup and leases every donor of the plan; a donor that cannot be leased is planned around.

        Donors on disk alone are fetched where a plan with them would reuse more, for whoever asks next.
        """
        excluded: frozenset[str] = frozenset()
        deadline = Deadline(self._settings.lookup_deadline_ms)
        resting: frozenset[str] = frozenset()
        reused_with_resting = 0
        planned, leases = Planned(plan=None, outcome_reason="donor_unavailable", runs_found=0), list[Lease]()
        for _ in range(MAX_PLANNING_ROUNDS):
            found = self._planner.plan(lookup.excluding(excluded), deadline)
            planned = replace(planned, runs_found=found.runs_found)
            if found.plan is None or not found.plan.matched_tokens:
                planned = found
                break
            donors = {span.donor_id for span in found.plan.spans}
            leases, missing = self._lease(donors)
            if not missing:
                planned = found
                self._tiers.used(donors)
                break
            for lease in leases:
                lease.release()
            leases, all_resting = [], self.catalog.resting()
            if not resting and missing & all_resting:
                resting, reused_with_resting = missing & all_resting, found.plan.reused_tokens
                excluded |= all_resting
            excluded |= missing
        if resting and reused_with_resting > (planned.plan.reused_tokens if planned.plan is not None else 0):
            self._tiers.wanted(resting)
            if planned.plan is None:
                planned = replace(planned, outcome_reason="donor_on_disk")
        return planned, leases

    def intend(self, donor_id: str, tracked: TrackedRequest, max_new_tokens: int) -> SaveIntent | None:
        """Reserves room for the request's exact part, so that no save can exceed a budget later.

        Returns no intent when the part is too short, already held, or does not fit.
        """
        plan = tracked.plan
        limit = len(tracked.prompt) + max_new_tokens
        if plan is not None and plan.matched_tokens and not plan.is_exact:
            limit = min(limit, plan.exact_token_count)
        if limit < self._settings.min_donor_tokens:
            return None
        text = _digest(tracked.namespace_key, tracked.prompt[:limit])
        held = self._donor_of_text.get(text)
        if held is not None:
            self.catalog.touch(held)
            return None
        try:
            placement = self.catalog.reserve(donor_id, tracked.namespace_key, limit, text)
        except CapacityError as error:
            logger.info("request %d does not become a donor: %s", tracked.request_id, error)
            return None
        self._tiers.placed(placement)
        self._donor_of_text[text], self._text_of_donor[donor_id] = donor_id, text
        return SaveIntent(tracked.request_id, donor_id, limit, placement.tier, donor_id in placement.written)

    def held(self) -> HeldDonors:
        """What the catalog holds at this moment; may be asked by any thread."""
        stats = self.catalog.stats()
        device_tokens = stats.device_blocks_used * self._block_size
        device_bytes = device_tokens * self._bytes_per_token
        return HeldDonors(stats.ready + stats.resting, stats.used_bytes, device_bytes, stats.disk_bytes_used)

    def take_orders(self) -> TierOrders:
        """What the tiers have to do since the last call; it must reach the workers before any later intent."""
        return self._tiers.take_orders()

    def hear(self, news: deque[TierNews]) -> None:
        """Takes what the tiers have to tell: files that were found, written or lost, donors that moved up."""
        self._tiers.hear(news)
        for donor_id, mix in () if self._kinds is None else self._kinds.known():
            self.catalog.describe(donor_id, mix)

    def begin_save(
        self, intent: SaveIntent, namespace_key: str, tokens: npt.NDArray[np.int32], block_ids: Iterable[int] = ()
    ) -> bool:
        """True when `tokens` (int32, the donor's whole text) are worth saving and wait for the worker's word. They lie
        in `block_ids`."""
        if len(tokens) < self._settings.min_donor_tokens:
            self.cancel(intent)
            return False
        self._saving[intent.donor_id] = _Saving(namespace_key, tokens, frozenset(block_ids))
        self._tiers.enter(intent.donor_id, DonorText(namespace_key, tokens, self._text_of_donor[intent.donor_id]))
        return True

    def copied_into(self, block_id: int) -> None:
        """The engine copies into this block, in no known order to a save that may still read it: what is being saved
        from it is not kept."""
        for saving in self._saving.values():
            saving.is_sound &= block_id not in saving.block_ids

    def saved(self, news: SavedDonor) -> None:
        """The worker holds the donor, could not save it, or lost it on its way down; only a held donor is found."""
        entry = self._saving.pop(news.donor_id, None)
        if entry is None:
            if news.error is not None:
                self.lost({news.donor_id})
            return
        if news.error is not None or news.tokens < self._settings.min_donor_tokens or not entry.is_sound:
            told = news.error or (f"{news.tokens} tokens" if entry.is_sound else "the engine copied into its blocks")
            logger.warning("donor %s was not saved: %s", news.donor_id, told)
            self.catalog.cancel(news.donor_id)
            self._tiers.dropped([news.donor_id])
            return
        tokens = entry.tokens[: news.tokens]
        self.catalog.commit(news.donor_id, tokens)
        self._index.add(entry.namespace_key, news.donor_id, tokens)
        if self._kinds is not None:
            self._kinds.read(news.donor_id, tokens)
        self._news.held(news.donor_id, tokens, (self.catalog.tier(news.donor_id) or Tier.HOST).value)

    def lost(self, donor_ids: set[str]) -> list[str]:
        """Drops donors whose KV could not be read, so that no later prompt counts on them; returns those dropped.

        A donor that another request has leased stays until that request's own load tells.
        """
        dropped = [donor_id for donor_id in sorted(donor_ids) if self.catalog.drop(donor_id)]
        self._tiers.dropped(dropped)
        return dropped

    def cancel(self, intent: SaveIntent) -> None:
        """Gives the reservation of a request that does not become a donor back."""
        self._saving.pop(intent.donor_id, None)
        self.catalog.cancel(intent.donor_id)
        self.forget(intent.donor_id)

    def remember(self, donor_id: str, text: DonorText) -> None:
        """A donor whose file was found can be found as well, and its text is not kept a second time."""
        self._index.add(text.namespace_key, donor_id, text.tokens)
        if self._kinds is not None:
            self._kinds.read(donor_id, text.tokens)
        self._news.found(donor_id, text.namespace_key, text.tokens, (self.catalog.tier(donor_id) or Tier.DISK).value)
        if self._donor_of_text.setdefault(text.digest, donor_id) == donor_id:
            self._text_of_donor[donor_id] = text.digest

    def moved(self, donor_id: str, tier: Tier) -> None:
        """Tells the fleet where the donor is held now."""
        self._news.moved(donor_id, tier.value)

    def forget(self, donor_id: str) -> None:
        """The donor is found no more, and its text may be kept anew."""
        self._news.gone(donor_id)
        self._index.remove(donor_id)
        self._tiers.withdraw(donor_id)
        text = self._text_of_donor.pop(donor_id, None)
        if text is not None:
            self._donor_of_text.pop(text, None)

    def _lease(self, donor_ids: set[str]) -> tuple[list[Lease], frozenset[str]]:
        leases, missing = [], set()
        for donor_id in sorted(donor_ids):
            try:
                leases.append(self.catalog.lease(donor_id))
            except DonorUnavailableError:
                missing.add(donor_id)
        return leases, frozenset(missing)

    def _is_near(self, donor_id: str) -> bool:
        return self.catalog.tier(donor_id) is Tier.DEVICE


def _digest(namespace_key: str, tokens: npt.NDArray[np.int32]) -> bytes:
    digest = hashlib.blake2b(namespace_key.encode(), digest_size=16)
    digest.update(tokens.tobytes())
    return digest.digest()
