"""Saves finished requests' KV in the background: `get_finished` must never block."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from semblend_trt.runtime import SavedDonor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.rope import RopeRotation
    from semblend_trt.donors.tiers import HostTier

logger = logging.getLogger(__name__)


class DonorSaver:
    """Copies blocks into the host tier on one thread of its own, in the order in which requests finished.

    The engine holds a request's blocks until `finished` names it, so the copy reads bytes nobody rewrites.
    """

    def __init__(self, tier: HostTier, geometry: KvGeometry, rotation: RopeRotation) -> None:
        self._tier, self._geometry, self._rotation = tier, geometry, rotation
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="semblend-save")
        self._running: dict[int, Future[SavedDonor]] = {}

    def start(self, request_id: int, donor_id: str, pool: torch.Tensor, block_ids: list[int], tokens: int) -> None:
        """Begins saving `tokens` positions of `pool` ([blocks, layers, 2, row]) as `donor_id`."""
        written = None
        if pool.is_cuda:
            written = torch.cuda.Event()
            written.record()  # the copy may start once the forward that wrote the last token has run
        self._running[request_id] = self._thread.submit(self._save, donor_id, pool, block_ids, tokens, written)

    def finished(self) -> list[tuple[int, SavedDonor]]:
        """Returns and forgets the saves that have ended since the last call, failed ones included."""
        done = [request_id for request_id, future in self._running.items() if future.done()]
        return [(request_id, self._running.pop(request_id).result()) for request_id in done]

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _save(
        self, donor_id: str, pool: torch.Tensor, block_ids: list[int], tokens: int, written: torch.cuda.Event | None
    ) -> SavedDonor:
        try:
            self._copy(donor_id, pool, block_ids, tokens, written)
        except Exception as error:
            logger.exception("saving donor %s failed", donor_id)
            return SavedDonor(donor_id, 0, f"{type(error).__name__}: {error}")
        return SavedDonor(donor_id, tokens)

    def _copy(
        self, donor_id: str, pool: torch.Tensor, block_ids: list[int], tokens: int, written: torch.cuda.Event | None
    ) -> None:
        geometry = self._geometry
        # gathered: [layers, 2, kv_heads, tokens, head_dim]
        shape = (geometry.num_layers, 2, geometry.kv_heads, tokens, geometry.head_dim)
        with _side_stream(pool, written):
            gathered = torch.empty(shape, dtype=pool.dtype, device=pool.device)
            source = PagedKv(pool, torch.tensor(block_ids, dtype=torch.int64), geometry)
            kv_move([Move(source, 0, 0, tokens)], ContiguousKv(gathered), self._rotation)
            self._tier.save(donor_id, gathered)


@contextmanager
def _side_stream(pool: torch.Tensor, written: torch.cuda.Event | None) -> Iterator[None]:
    """Runs the body on a stream of its own behind `written`, and leaves only when its copies are done."""
    if written is None:
        yield
        return
    stream = torch.cuda.Stream(pool.device)
    stream.wait_event(written)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
