"""Saves finished requests' KV, and moves donors down, in the background: `get_finished` must never block."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.kv_move import Move, kv_move
from kernels.layout import KvGeometry, PagedKv
from semblend_trt.donors.placement import Tier
from semblend_trt.materialize import block_vector
from semblend_trt.runtime import SavedDonor
from semblend_trt.streams import Event, current_stream, on, record, side_stream, wait

if TYPE_CHECKING:
    import torch

    from kernels.rope import RopeRotation
    from semblend_trt.donors.host_kv import HostKv
    from semblend_trt.donors.store import DonorStore
    from semblend_trt.staging import HostWriter

logger = logging.getLogger(__name__)

_TIMINGS_KEPT = 256


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """One save or demotion that succeeded; `seconds` from its start in the background to its last byte."""

    donor_id: str
    what: str
    tokens: int
    seconds: float


class DonorSaver:
    """Fills the tiers on one thread and one stream of its own, in the order in which it was told.

    That order is what keeps the tiers within their budgets: the scheduler sends who makes room before who uses it. The
    engine holds a request's blocks until `finished` names it, so that a save reads bytes that nobody rewrites.
    `timings` are those of the last transfers.
    """

    def __init__(
        self, store: DonorStore, pool: torch.Tensor, geometry: KvGeometry, rotation: RopeRotation, writer: HostWriter
    ) -> None:
        """`pool`: the engine's, [blocks, layers, 2, row]; `writer` is this saver's alone."""
        self._store, self._pool, self._geometry, self._rotation = store, pool, geometry, rotation
        self._writer = writer
        self._stream = side_stream(pool.device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="semblend-save")
        self._saves: dict[int, Future[SavedDonor]] = {}
        self._demotions: deque[Future[SavedDonor | None]] = deque()
        self.timings: deque[TransferTiming] = deque(maxlen=_TIMINGS_KEPT)

    def start(self, request_id: int, donor_id: str, tier: Tier, block_ids: list[int], tokens: int) -> None:
        """Begins saving the first `tokens` positions of `block_ids` as `donor_id`, into `tier`."""
        # The copy may start once the forward that wrote the last token has run.
        written = record(current_stream(self._pool.device))
        self._saves[request_id] = self._thread.submit(self._save, donor_id, tier, block_ids, tokens, written)

    def demote(self, donor_id: str) -> None:
        """Begins moving a donor from the device to the host; one that is not on the device is left alone."""
        self._demotions.append(self._thread.submit(self._demote, donor_id))

    def finished(self) -> list[tuple[int, SavedDonor]]:
        """Returns and forgets the saves that have ended since the last call, failed ones included."""
        done = [request_id for request_id, future in self._saves.items() if future.done()]
        return [(request_id, self._saves.pop(request_id).result()) for request_id in done]

    def lost(self) -> list[SavedDonor]:
        """Returns and forgets the donors that were lost on their way down since the last call."""
        lost = []
        while self._demotions and self._demotions[0].done():
            news = self._demotions.popleft().result()
            if news is not None:
                lost.append(news)
        return lost

    def drain(self) -> None:
        """Waits until everything that was begun has ended."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Waits for what is running and takes nothing more."""
        self._thread.shutdown(wait=True)

    def _save(self, donor_id: str, tier: Tier, block_ids: list[int], tokens: int, written: Event | None) -> SavedDonor:
        began = time.perf_counter()
        source = PagedKv(self._pool, block_vector(block_ids), self._geometry)
        try:
            wait(self._stream, [written])
            with on(self._stream):
                if tier is Tier.DEVICE:
                    self._save_on_device(donor_id, source, tokens)
                else:
                    self._save_on_host(donor_id, source, tokens)
        except Exception as error:
            logger.exception("saving donor %s failed", donor_id)
            return SavedDonor(donor_id, 0, f"{type(error).__name__}: {error}")
        self.timings.append(TransferTiming(donor_id, f"save_{tier.value}", tokens, time.perf_counter() - began))
        return SavedDonor(donor_id, tokens)

    def _save_on_device(self, donor_id: str, source: PagedKv, tokens: int) -> None:
        with self._store.device_tier().writing(donor_id, tokens) as target:
            kv_move([Move(source, 0, 0, tokens)], target, self._rotation)
            if self._stream is not None:
                self._stream.synchronize()

    def _save_on_host(self, donor_id: str, source: PagedKv, tokens: int) -> None:
        sizes = self._geometry
        shape = (sizes.num_layers, sizes.kv_factor, sizes.kv_heads, tokens, sizes.head_dim)
        with self._store.host.writing(donor_id, shape, self._pool.dtype) as held:
            self._writer.copy(source, tokens, held)

    def _demote(self, donor_id: str) -> SavedDonor | None:
        began, moved = time.perf_counter(), 0

        def copy(source: PagedKv, tokens: int, held: HostKv) -> None:
            nonlocal moved
            self._writer.copy(source, tokens, held)
            moved = tokens

        try:
            with on(self._stream):
                demoted = self._store.demote(donor_id, copy)
        except Exception as error:
            logger.exception("donor %s was lost on its way from the device to the host", donor_id)
            return SavedDonor(donor_id, 0, f"{type(error).__name__}: {error}")
        if demoted:
            self.timings.append(TransferTiming(donor_id, "demotion", moved, time.perf_counter() - began))
        return None
