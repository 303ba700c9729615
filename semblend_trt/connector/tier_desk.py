"""TierDesk: where the scheduler collects orders for the tiers, and hears what became of them.

A donor on disk alone is never promised: a lookup that would have used it has it fetched, and a later one finds it in
memory. A donor that is used from host memory is lifted to the device, if there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from semblend_trt.donors.donor_table import Tier
from semblend_trt.donors.offload import DiskLink, TierEvent, TierNews, TierOrders

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable

    from semblend_trt.donors.catalog import DonorCatalog
    from semblend_trt.donors.donor_file import DonorText
    from semblend_trt.donors.donor_table import Placement

# Each fetch and lift holds room in two tiers until it has ended.
MAX_FETCHES, MAX_LIFTS = 4, 2
# Taking a found donor in indexes its text; a lookup waits for no more of them than this.
_FOUND_AT_ONCE = 4


class HoldsTexts(Protocol):
    """The library, as far as the desk needs it."""

    def remember(self, donor_id: str, text: DonorText) -> None:
        """The donor can be found from now on."""

    def forget(self, donor_id: str) -> None:
        """The donor is not held any more."""

    def moved(self, donor_id: str, tier: Tier) -> None:
        """The donor is held in `tier` now."""


class TierDesk:
    """Keeps catalog and library in step with the tiers. `link` is None while there is no disk tier."""

    def __init__(
        self, catalog: DonorCatalog, library: HoldsTexts, link: DiskLink | None, count: Callable[[TierEvent], None]
    ) -> None:
        """`count` is told of every event that is heard."""
        self._catalog, self._library, self._link, self._count = catalog, library, link, count
        self._drops: list[str] = []
        self._demotions: list[str] = []
        self._releases: list[str] = []
        self._writes: list[str] = []
        self._fetches: list[str] = []
        self._lifts: list[str] = []
        self._fetching: set[str] = set()
        self._lifting: set[str] = set()

    def take_orders(self) -> TierOrders:
        """What the tiers have to do since the last call."""
        kinds = (self._drops, self._demotions, self._releases, self._writes, self._fetches, self._lifts)
        orders = TierOrders(*map(tuple, kinds))
        for kind in kinds:
            kind.clear()
        return orders

    def placed(self, placement: Placement) -> None:
        """Orders what makes room for a donor that the catalog has placed."""
        self.dropped(placement.dropped)
        for donor_id in placement.released:
            self._releases.append(donor_id)
            self._library.moved(donor_id, Tier.DISK)
        for donor_id in placement.demoted:
            self._demotions.append(donor_id)
            self._library.moved(donor_id, Tier.HOST)
        self._writes.extend(donor_id for donor_id in placement.written if donor_id in placement.demoted)

    def dropped(self, donor_ids: Iterable[str]) -> None:
        """Orders that donors go which the catalog holds no more."""
        for donor_id in donor_ids:
            self._drops.append(donor_id)
            self._library.forget(donor_id)

    def enter(self, donor_id: str, text: DonorText) -> None:
        """The donor is being saved, and may get a file later."""
        if self._link is not None:
            self._link.texts[donor_id] = text

    def withdraw(self, donor_id: str) -> None:
        """The donor gets no file any more."""
        if self._link is not None:
            self._link.texts.pop(donor_id, None)

    def wanted(self, donor_ids: Iterable[str]) -> None:
        """Fetches donors that rest on disk, as far as there is room and few others are on their way."""
        for donor_id in sorted(donor_ids):
            if len(self._fetching) >= MAX_FETCHES:
                return
            placement = self._catalog.fetch(donor_id)
            if placement is not None:
                self.placed(placement)
                self._fetches.append(donor_id)
                self._fetching.add(donor_id)

    def used(self, donor_ids: Iterable[str]) -> None:
        """Lifts donors of the host that a plan uses, as far as there is room and few others are on their way."""
        for donor_id in sorted(donor_ids):
            if len(self._lifting) >= MAX_LIFTS:
                return
            placement = self._catalog.lift(donor_id)
            if placement is not None:
                self.placed(placement)
                self._lifts.append(donor_id)
                self._lifting.add(donor_id)

    def hear(self, news: deque[TierNews]) -> None:
        """Takes all news, and of the donors that were found on disk a few."""
        while news:
            self._heard(news.popleft())
        for _ in range(_FOUND_AT_ONCE):
            if self._link is not None and self._link.found:
                self._heard(self._link.found.popleft())

    def _heard(self, news: TierNews) -> None:
        self._count(news.event)
        event, donor_id = news.event, news.donor_id
        if event is TierEvent.FILE_FOUND and news.text is not None:
            self._found(donor_id, news.text)
        elif event is TierEvent.FILES_READ:
            # Before, files that nobody has counted yet take up the disk.
            self._catalog.begin_writing()
        elif event in (TierEvent.FILE_WRITTEN, TierEvent.WRITE_FAILED, TierEvent.WRITE_SKIPPED):
            self._catalog.written(donor_id, event is TierEvent.FILE_WRITTEN)
        elif event in (TierEvent.LIFTED, TierEvent.LIFT_FAILED):
            self._lifting.discard(donor_id)
            self._catalog.lifted(donor_id, event is TierEvent.LIFTED)
            self._library.moved(donor_id, self._catalog.tier(donor_id) or Tier.HOST)
        elif event in (TierEvent.FETCHED, TierEvent.FETCH_FAILED):
            self._fetching.discard(donor_id)
            is_here = event is TierEvent.FETCHED
            if self._catalog.fetched(donor_id, is_here) and not is_here:
                self.dropped([donor_id])
            elif is_here:
                self._library.moved(donor_id, Tier.HOST)

    def _found(self, donor_id: str, text: DonorText) -> None:
        dropped = self._catalog.adopt(donor_id, text.namespace_key, len(text.tokens), text.digest)
        if dropped is None:
            self._drops.append(donor_id)
        else:
            self.dropped(dropped)
            self._library.remember(donor_id, text)
