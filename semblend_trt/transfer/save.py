"""Saves finished requests' KV, and moves donors between tiers, in the background: `get_finished` must never block."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from kernels.device import Event, current_stream, finish, on, record, side_stream, wait
from kernels.kv_move import Move, kv_move
from kernels.layout import KvGeometry, PagedKv
from semblend_trt.background import quiet_logger
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.offload import OffloadEvent, OffloadEventKind, SavedDonor
from semblend_trt.errors import CapacityError
from semblend_trt.ranks import Ranks
from semblend_trt.transfer.load import block_vector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kernels.rope import Rotation
    from semblend_trt.donors.disk_tier import DiskTransfers
    from semblend_trt.donors.offload import SaveIntent
    from semblend_trt.donors.store import DeviceTier, DonorStore
    from semblend_trt.transfer.staging import HostWriter

logger = quiet_logger(__name__)

T = TypeVar("T")

# A rank reports these in place of tokens: a save or offload still runs, or an offload lost nothing.
_RUNS, _NOTHING_LOST = -1, 1


@dataclass(slots=True)
class _Save:
    """A save: each step of `chunks` queues a part of the copy into `room`, the donor's once it is left."""

    intent: SaveIntent
    tokens: int
    chunks: Iterator[None]
    room: ExitStack
    error: Exception | None = None
    began: float = field(default_factory=time.perf_counter)


class DonorSaver:
    """Fill the tiers on one thread and stream, in call order: room is made before it is used.

    A save reads bytes that do not change: the engine holds a request's blocks until `finished` names it, or `snapshots`
    hold a copy queued before any later forward. `save_seconds` are the last saves' times, from start to last byte."""

    def __init__(
        self,
        store: DonorStore,
        pool: torch.Tensor,
        geometry: KvGeometry,
        rotation: Rotation,
        writer: HostWriter,
        events: deque[OffloadEvent] | None = None,
        transfers: DiskTransfers | None = None,
        ranks: Ranks | None = None,
        at_once: int = 0,
        snapshots: DeviceTier | None = None,
    ) -> None:
        """Take the parts of a rank: `pool` is the engine's, [blocks, layers, 2, row]; `writer` is this saver's alone.

        `events` hears of promotions, `transfers` gets donors bound for disk. `ranks` save the same donors, each its own
        heads. `start` queues up to `at_once` chunks of a host copy. Without `snapshots` the engine holds the KV."""
        self._store, self._pool, self._geometry, self._rotation = store, pool, geometry, rotation
        self._events: deque[OffloadEvent] = deque() if events is None else events
        self._writer, self._transfers, self._ranks = writer, transfers, ranks or Ranks()
        self._at_once, self._snapshots = at_once, snapshots
        self._stream = side_stream(pool.device)
        self._thread = ThreadPoolExecutor(1, "semblend-save")
        self._newest: Future[Any] = self._thread.submit(int)
        self._saves: dict[int, Future[SavedDonor]] = {}
        self._offloads: deque[Future[SavedDonor]] = deque()
        self.save_seconds: deque[float] = deque(maxlen=256)
        # Donors that are whole in the engine's blocks, which it holds until `finished` names their requests.
        self.in_blocks: dict[str, PagedKv] = {}

    @property
    def device(self) -> torch.device:
        return self._pool.device

    def start(self, intent: SaveIntent, block_ids: list[int], tokens: int) -> None:
        """Begin to save the first `tokens` positions of `block_ids`, or those that `snapshots` has room for."""
        source = self.source(block_ids)
        room = ExitStack()
        if self._snapshots is not None:
            tokens = min(tokens, self._snapshots.free_tokens)
            try:
                source = self._snapshot(self._snapshots, intent.donor_id, source, tokens, room)
            except Exception as error:
                room.close()
                self.refuse(intent, f"{type(error).__name__}: {error}")
                return
        elif tokens == intent.max_tokens:
            self.in_blocks[intent.donor_id] = source
        # The copy starts after the forward that wrote the last token.
        written = record(current_stream(self._pool.device))
        save = _Save(intent, tokens, self._chunks(intent, source, tokens, written, room), room)
        # It must not overtake running work. A copy to the device is one launch and may have to wait for room.
        if intent.tier is Tier.HOST and self._newest.done():
            self._queue(save, self._at_once)
        self._saves[intent.request_id] = self._submit(self._save, save)

    def source(self, block_ids: list[int]) -> PagedKv:
        """Return these blocks of the engine's pool."""
        return PagedKv(self._pool, block_vector(block_ids), self._geometry)

    def refuse(self, intent: SaveIntent, why: str) -> None:
        """End a save that cannot begin; `finished` reports it like any other, so all ranks drop the donor."""
        logger.warning("donor %s is not saved: %s", intent.donor_id, why)
        ended = self._saves[intent.request_id] = Future()
        ended.set_result(SavedDonor(intent.donor_id, 0, why))

    def offload(self, donor_id: str, *, is_written: bool = False) -> None:
        """Begin to move a donor of the device to the host, and with `is_written` to disk; one elsewhere stays."""
        self._offloads.append(self._submit(self._offload, donor_id, is_written))

    def promote(self, donor_id: str, loaded: Event | None = None) -> None:
        """Begin to move a donor from the host to the device, after `loaded`, if given."""
        self._submit(self._promote, donor_id, loaded)

    def finished(self) -> list[tuple[int, SavedDonor]]:
        """Return and forget the saves that have ended, failed ones included. Every rank must call it.

        With several ranks these have ended on all, with the tokens that all hold. What one rank lacks, none keeps."""
        ended, saves = [], dict(self._saves)
        for request_id, saved in zip(saves, self._agreed(saves.values()), strict=True):
            if saved is not None:
                del self._saves[request_id]
                self.in_blocks.pop(saved.donor_id, None)
                ended.append((request_id, saved))
        return ended

    def lost(self) -> list[SavedDonor]:
        """Return and forget the donors that any rank lost on their way down. Every rank must call it."""
        lost = []
        for saved in self._agreed([*self._offloads]):
            if saved is None:
                break
            self._offloads.popleft()
            if not saved.tokens:
                lost.append(saved)
        return lost

    def _agreed(self, futures: Iterable[Future[SavedDonor]]) -> Iterator[SavedDonor | None]:
        """Yield what all ranks have saved, None while one is not done; drop donors that another lacks."""
        own = [future.result() if future.done() else None for future in futures]
        least = self._ranks.least([_RUNS if saved is None else saved.tokens for saved in own]) if own else []
        for saved, tokens in zip(own, least, strict=True):
            if saved is None or tokens == _RUNS:
                yield None
            elif saved.error is not None or tokens == saved.tokens:
                yield saved
            elif tokens:
                yield SavedDonor(saved.donor_id, tokens)
            else:
                self._store.drop(saved.donor_id)
                yield SavedDonor(saved.donor_id, 0, "another rank does not hold it")

    def drain(self) -> None:
        """Wait until all work has ended."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Wait for running work and accept no more."""
        self._thread.shutdown(wait=True)

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        self._newest = future = self._thread.submit(work, *arguments)
        return future

    def _save(self, save: _Save) -> SavedDonor:
        intent = save.intent
        try:
            with save.room:
                self._queue(save)
                # After an error too: queued copies must not reach memory that another donor owns by then.
                finish(self._stream)
                if save.error is not None:
                    raise save.error
        except Exception as error:
            logger.exception("saving donor %s failed", intent.donor_id)
            return SavedDonor(intent.donor_id, 0, f"{type(error).__name__}: {error}")
        self.save_seconds.append(time.perf_counter() - save.began)
        if intent.is_written:
            self._write(intent.donor_id)
        return SavedDonor(intent.donor_id, save.tokens)

    def _snapshot(self, snapshots: DeviceTier, donor_id: str, source: PagedKv, tokens: int, room: ExitStack) -> PagedKv:
        """Queue a copy on the engine's stream, before later writes to these blocks; `room` holds it."""
        if not tokens:
            raise CapacityError("no room for a snapshot is left; raise SEMBLEND_SNAPSHOT_BYTES")
        with torch.inference_mode(), snapshots.writing(donor_id, tokens) as copy:
            kv_move([Move(source, 0, 0, tokens, turn=0)], copy, self._rotation)
        room.callback(snapshots.drop, donor_id)
        return copy

    @contextmanager
    def _queueing(self) -> Iterator[None]:
        """Set the saver's stream and inference mode: tensors that the engine's thread made in it need that mode."""
        with torch.inference_mode(), on(self._stream):
            yield

    def _queue(self, save: _Save, most: int | None = None) -> None:
        try:
            with self._queueing():
                for _ in islice(save.chunks, most):
                    pass
        except Exception as error:
            save.error = error

    def _chunks(
        self, intent: SaveIntent, source: PagedKv, tokens: int, written: Event | None, room: ExitStack
    ) -> Iterator[None]:
        """Take `room` in the tier and queue the copy to it on the current stream, a chunk a step."""
        wait(self._stream, [written])
        if intent.tier is Tier.DEVICE:
            target = room.enter_context(self._store.device_tier().writing(intent.donor_id, tokens))
            kv_move([Move(source, 0, 0, tokens)], target, self._rotation)
            yield
        else:
            held = room.enter_context(self._store.host.writing(intent.donor_id, tokens, self._stream))
            yield from self._writer.chunks(source, tokens, held)

    def _offload(self, donor_id: str, is_written: bool) -> SavedDonor:
        try:
            with self._queueing():
                self._store.offload(donor_id, self._writer.copy)
        except Exception as error:
            logger.exception("donor %s was lost on its way from the device to the host", donor_id)
            if is_written:
                self._events.append(OffloadEvent(OffloadEventKind.WRITE_SKIPPED, donor_id, "the donor is lost"))
            return SavedDonor(donor_id, 0, f"{type(error).__name__}: {error}")
        if is_written:
            self._write(donor_id)
        return SavedDonor(donor_id, _NOTHING_LOST)

    def _promote(self, donor_id: str, loaded: Event | None) -> None:
        try:
            wait(self._stream, [loaded])
            with self._queueing():
                self._store.promote(donor_id, self._writer.copy_up)
        except Exception as error:
            logger.warning("donor %s stays in host memory: %s", donor_id, error)
            reason = f"{type(error).__name__}: {error}"
            self._events.append(OffloadEvent(OffloadEventKind.PROMOTE_FAILED, donor_id, reason))
            return
        self._events.append(OffloadEvent(OffloadEventKind.PROMOTED, donor_id))

    def _write(self, donor_id: str) -> None:
        if self._transfers is None:
            self._events.append(OffloadEvent(OffloadEventKind.WRITE_SKIPPED, donor_id, "this rank has no disk tier"))
        else:
            self._transfers.write(donor_id)
