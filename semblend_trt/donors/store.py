"""What one rank holds, in memory. It obeys the scheduler's catalog and decides nothing."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from semblend_trt.errors import CapacityError, DonorUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernels.layout import PagedKv
    from semblend_trt.donors.device_tier import DeviceTier
    from semblend_trt.donors.host_tier import HostKv, HostTier


class DonorStore:
    """The host tier and, where there is one, the device tier. Thread safe.

    A donor that moves stays readable: it is in its new tier before it leaves the old one.
    """

    def __init__(self, host: HostTier, device: DeviceTier | None) -> None:
        self.host = host
        self.device = device

    @contextmanager
    def reading(self, donor_id: str) -> Iterator[PagedKv | HostKv]:
        """The donor's KV, from the device where it is there; the work that reads it is queued within the block.

        The caller tells the end of queued reads of host memory by `HostTier.read_until`.

        Raises DonorUnavailableError when neither tier holds it.
        """
        with ExitStack() as reads:
            yield self._readable(donor_id, reads)

    def offload(self, donor_id: str, copy: Callable[[PagedKv, int, HostKv], None]) -> bool:
        """Moves a donor of the device to the host; False when it is not there, or was dropped meanwhile.

        `copy(source, tokens, held)` fills `held`, and writes nothing more once it returns or raises. After an error
        neither tier holds the donor: the catalog has given its blocks away.
        """
        if self.device is None or donor_id not in self.device:
            return False
        try:
            tokens = self.device.tokens_of(donor_id)
            with self.device.reading(donor_id) as source:
                sizes = source.geometry
                shape = (sizes.num_layers, sizes.kv_factor, sizes.kv_heads, tokens, sizes.head_dim)
                with self.host.writing(donor_id, shape, source.pool.dtype) as held:
                    copy(source, tokens, held)
        except Exception:
            # Dropped by the scheduler meanwhile: then it is not missed.
            if not self.device.drop(donor_id):
                return False
            raise
        if not self.device.drop(donor_id):
            self.host.drop(donor_id)
            return False
        return True

    def promote(self, donor_id: str, copy: Callable[[HostKv, PagedKv], None]) -> None:
        """Copies a donor of the host to the device, and then drops it from the host.

        `copy(held, target)` fills `target` before it returns. Raises DonorUnavailableError when the host does not hold
        the donor, CapacityError without room on the device, and what `copy` raises; the host then holds the donor as
        before. Raises DonorUnavailableError too when the donor was dropped meanwhile; neither tier holds it then.
        """
        device = self.device_tier()
        with self.host.reading(donor_id) as held, device.writing(donor_id, held.capacity) as target:
            copy(held, target)
        if not self.host.drop(donor_id):
            device.drop(donor_id)
            raise DonorUnavailableError(f"donor {donor_id} was dropped while it was being promoted")

    def drop(self, donor_id: str) -> bool:
        """Drops the donor, or stops its save or its way down; False when there is none."""
        on_device = self.device is not None and self.device.drop(donor_id)
        return self.host.drop(donor_id) or on_device

    def device_tier(self) -> DeviceTier:
        """The device tier; CapacityError where this rank has none."""
        if self.device is None:
            raise CapacityError("this rank has no device tier; set SEMBLEND_DEVICE_BYTES alike on every rank")
        return self.device

    def clear(self) -> None:
        """Drops every donor."""
        if self.device is not None:
            self.device.clear()
        self.host.clear()

    def _readable(self, donor_id: str, reads: ExitStack) -> PagedKv | HostKv:
        if self.device is not None:
            with suppress(DonorUnavailableError):
                return reads.enter_context(self.device.reading(donor_id))
        try:
            # Never on the device, or moved down since: then the host has it already.
            return reads.enter_context(self.host.reading(donor_id))
        except DonorUnavailableError:
            if self.device is None:
                raise
            return reads.enter_context(self.device.reading(donor_id))  # moved up since, or held nowhere
