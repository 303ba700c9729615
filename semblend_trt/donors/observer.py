"""DonorObserver: what hears which donors are held, and in which tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from semblend_trt.namespace import CacheNamespace


class DonorObserver:
    """Hears of an engine's donors on the scheduler's thread, and does nothing. No method waits or raises."""

    def intended(self, donor_id: str, namespace: CacheNamespace, salt: str | None) -> None:
        """A donor of this namespace, bound to `salt`, may be held soon."""

    def held(self, donor_id: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        """The donor with these tokens (int32 [n], never changed) is held in `tier`."""

    def found(self, donor_id: str, namespace_key: str, tokens: npt.NDArray[np.int32], tier: str) -> None:
        """A donor that an earlier process saved is held in `tier`; `tokens` is int32 [n], never changed."""

    def moved(self, donor_id: str, tier: str) -> None:
        """The donor is held in `tier` now."""

    def gone(self, donor_id: str) -> None:
        """The donor is no longer held, or its save failed."""

    def close(self) -> None:
        """The engine ends: none of its donors is held any more."""
