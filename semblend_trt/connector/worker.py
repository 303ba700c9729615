"""The connector's worker half, on every rank: places donors' KV before the forward, and keeps finished requests' KV.

Plans and commands arrive in the metadata, so that all ranks do the same. TensorRT-LLM asks for the saves of ended
requests before it sends the next metadata. Rank 0 then hands on what the scheduler decided."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from kernels.device import Event, current_stream, on, record
from kernels.kv_move import warm_up
from semblend_trt import __version__
from semblend_trt.config import load_settings
from semblend_trt.connector.contract import KvCacheConnectorWorker
from semblend_trt.connector.eligibility import cuts_kv, served_facts, spec_of
from semblend_trt.connector.engine_spec import WRAPPER_MODULE, EngineSpec
from semblend_trt.connector.requests import readable_metadata
from semblend_trt.donors.offload import DiskLink, OffloadEvent, OffloadEventKind
from semblend_trt.donors.store import DeviceTier, DonorStore, HostTier, arena_blocks
from semblend_trt.errors import ConfigurationError, DonorUnavailableError, UnsupportedModelError
from semblend_trt.plan import EngineMode
from semblend_trt.pool_facts import PoolFacts, geometry_of, needs_scales
from semblend_trt.ranks import agree_on_loads, ranks_of
from semblend_trt.runtime import runtime_for
from semblend_trt.transfer.load import PlanLoader
from semblend_trt.transfer.save import DonorSaver
from semblend_trt.transfer.staging import HostReader, HostWriter, Staging

if TYPE_CHECKING:
    from kernels.layout import KvGeometry, PagedKv
    from kernels.rope import Rotation
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.connector.requests import SemBlendConnectorMetadata
    from semblend_trt.donors.disk_tier import DiskTransfers
    from semblend_trt.donors.offload import OffloadCommands, SaveIntent
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

# Slots of the staging memory for loads, so that copies never wait for the kernels after them. Saves have one more.
_LOAD_SLOTS = 3
# Chunks of a save that the engine's own thread queues on a card, each in about 0.1 ms. Another thread costs several
# times more: it takes the interpreter's lock at every launch. On the CPU queueing is copying.
_CHUNKS_AT_ONCE = 16


@dataclass(slots=True)
class _FollowedRequest:
    """A running request that may become a donor; `iteration` is the last one that it was part of."""

    block_ids: list[int] = field(default_factory=list)
    written_tokens: int = 0
    iteration: int = 0
    is_whole: bool = True  # no forward failed that was to write its tokens


class SemBlendKvConnectorWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """Order loads before what follows on the stream of `start_load_kv`, unless the engine wrapper waits by layer.

    The layer hooks do nothing, because CUDA-graph replay skips them. `facts` are None for a refused model. `store`,
    `loader` and `saver` exist once the caches are registered, `transfers` only with a disk tier."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._runtime = runtime_for(llm_args)
        self._settings = load_settings(**self._engine.settings)
        self.facts: ModelFacts | None = None
        # In TensorRT-LLM only V2 does, which its layout shows; other engines state it.
        self._holds_saved_blocks, self._is_v2 = self._engine.holds_saved_blocks, False
        self._iteration = self._completed_iteration = self._weights_changes = 0
        self._followed: dict[int, _FollowedRequest] = {}
        self._to_save: dict[int, SaveIntent] = {}
        # Whether the step only goes on with what may become a donor; it compares no weights then.
        self._goes_on = False
        # Moves between the tiers that wait for the forward's launch, and the event after the loads before it.
        self._waiting: list[tuple[OffloadCommands, Event | None]] = []
        self.store: DonorStore | None = None
        self.loader: PlanLoader | None = None
        self.saver: DonorSaver | None = None
        self.transfers: DiskTransfers | None = None
        try:
            self.facts = served_facts(self._engine, self._settings.policy)
        except UnsupportedModelError as error:
            self._runtime.refusal = error.reason
        except Exception:
            logger.exception("KV reuse is off: the model's configuration cannot be read")
            self._runtime.refusal = "model_unreadable"

    @property
    def _engine(self) -> EngineSpec:  # at every use: the arguments may change until the caches are registered
        return spec_of(self._llm_args)

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the pool, [blocks, layers, 2, kv_heads * block_size * head_dim]; refuse any other layout by name.

        What one rank refuses, all refuse. Raises ConfigurationError if a rank lacks the memory for tiers or staging."""
        self._register(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Take the V2 cache manager's pool. Refuse by name several layer groups, or KV dropped outside a window."""
        pool, self._holds_saved_blocks, self._is_v2 = None, True, True
        try:
            refusal = layout_refusal(layout, self._engine)
            if refusal is None:
                pool = layout.as_single_pool_tensor()
        except Exception:
            logger.exception("KV reuse is off: the layout of the caches cannot be read")
            refusal = "pool_layout"
        self._register(pool, refusal)

    def _register(self, pool: torch.Tensor | None, refusal: str | None = None) -> None:
        runtime, failure = self._runtime, None
        runtime.refusal = runtime.refusal or refusal
        join_ranks(runtime, self._engine.ranks)
        try:
            if self.facts is not None and runtime.refusal is None:
                self._take_pool(pool, self.facts)
        except ConfigurationError as error:
            failure = error
        agree_on_start(runtime, failure)
        if pool is not None:
            self._attach(pool)
        if (scheduler := runtime.scheduler) is not None:
            scheduler.wait_for_initialization()

    def _attach(self, pool: torch.Tensor) -> None:
        """Attach a wrapper that executes plans to the engine of these caches; the stock worker has none."""

    def _take_pool(self, pool: Any, facts: ModelFacts) -> None:
        runtime, holds = self._runtime, self._holds_saved_blocks
        geometry = geometry_of(pool, facts.sizes(self._engine.ranks))
        runtime.refusal = pool_refusal(pool, geometry, facts, is_first=self.store is None)
        if geometry is None or runtime.refusal is not None:
            self._followed.clear()
            return
        scales = self._kv_scales() if needs_scales(pool) else None
        if needs_scales(pool) and scales is None:
            runtime.refusal = "kv_scales"
            return
        self._open_tiers(pool, geometry, facts.rotation)
        runtime.pool = PoolFacts(geometry, pool.shape[0], pool.dtype, scales, facts.chunk, holds, self._is_v2)

    def _open_tiers(self, pool: torch.Tensor, geometry: KvGeometry, rotation: Rotation) -> None:
        """Take the memory of this rank's tiers and staging. Raises ConfigurationError if it cannot be had."""
        settings, runtime, device, dtype = self._settings, self._runtime, pool.device, pool.dtype
        arena, snapshots, is_card = None, None, device.type == "cuda"
        if settings.device_bytes:
            arena = DeviceTier(arena_blocks(settings.device_bytes, geometry, dtype), geometry, dtype, device)
        self.store = DonorStore(HostTier(settings.host_bytes, geometry, dtype, lock=is_card), arena)
        reader, writer = None, HostWriter(rotation, None)
        if is_card and settings.host_bytes:
            slot = settings.staging_bytes // (_LOAD_SLOTS + 1)
            reader = HostReader(device, rotation, Staging(slot * _LOAD_SLOTS, _LOAD_SLOTS, geometry, dtype, device))
            writer = HostWriter(rotation, Staging(slot, 1, geometry, dtype, device))
        if not self._holds_saved_blocks:
            blocks = min(arena_blocks(settings.snapshot_bytes, geometry, dtype), pool.shape[0])
            snapshots = DeviceTier(blocks, geometry, dtype, device, "SEMBLEND_SNAPSHOT_BYTES")
        warm_up(geometry, dtype, device, rotation)
        self.loader = PlanLoader(self.store, pool, geometry, rotation, runtime.readiness, reader)
        if self._holds_saved_blocks and not self._is_v2:
            self.loader.in_blocks = self._in_blocks
        self.transfers = transfers = self._open_disk(geometry, dtype, self.store.host)
        events, ranks, at_once = runtime.offload_events, runtime.ranks, _CHUNKS_AT_ONCE if is_card else 0
        self.saver = DonorSaver(
            self.store, pool, geometry, rotation, writer, events, transfers, ranks, at_once=at_once, snapshots=snapshots
        )

    def _open_disk(self, geometry: KvGeometry, dtype: torch.dtype, host: HostTier) -> DiskTransfers | None:
        """Open the disk tier that was asked for; None without one, and if it cannot be had, which is counted."""
        settings, engine, runtime = self._settings, self._engine, self._runtime
        if not settings.disk_bytes:
            return None
        if settings.disk_path is None:
            raise ConfigurationError("SEMBLEND_DISK_BYTES is set; set SEMBLEND_DISK_PATH to a folder as well")
        from semblend_trt.donors.disk_tier import DiskTier, DiskTransfers, KvForm

        try:
            # Ranks do not agree on whose files are whole, and must not read different ones.
            ranks = engine.ranks * (engine.pipeline_parallel_size or 1) * (engine.context_parallel_size or 1)
            if ranks > 1:
                raise ConfigurationError(f"the disk tier serves engines of one rank; this one has {ranks}")
            disk = DiskTier(settings.disk_path, KvForm(geometry, dtype), settings.disk_key_path)
        except (OSError, ConfigurationError) as error:
            logger.warning("no donors are kept on disk: %s", error)
            runtime.offload_events.append(OffloadEvent(OffloadEventKind.DISK_UNAVAILABLE, error=str(error)))
            return None
        runtime.disk = DiskLink()
        return DiskTransfers(disk, host, runtime.disk, runtime.offload_events)

    def _kv_scales(self) -> str | None:
        """Return a digest of the fp8 cache's scales if the worker knows them; the contract does not name them."""
        logger.warning(
            "KV reuse is off: nothing tells the scales of the fp8 cache; set connector_module to %s", WRAPPER_MODULE
        )
        return None

    def register_forward_pass_callable(self) -> None:
        """Return None: nothing has to run after a forward, because saves wait for their own event."""

    def start_load_kv(self, stream: torch.cuda.Stream | None) -> None:
        """Apply the bound metadata: drop and offload donors, follow blocks, and place plans' spans on `stream`.

        With several ranks, one that cannot place its part of a plan keeps all of them from using it."""
        runtime = self._runtime
        if self._completed_iteration != self._iteration:
            # The last forward failed: what it wrote is unknown, and its blocks may be another request's already.
            runtime.readiness.abandon(stream)
            for followed in self._followed.values():
                followed.is_whole &= followed.iteration != self._iteration
        self._completed_iteration = self._iteration
        self._iteration += 1
        runtime.is_forward_open = True
        are_checked, runtime.are_weights_checked = runtime.are_weights_checked, False
        bound = self.get_connector_meta()
        self._clear_connector_meta()  # an engine that binds no other must not have it applied twice
        metadata = readable_metadata(bound, runtime)
        self._goes_on = metadata is not None and bool(metadata.grown or metadata.progress) and not metadata.followed
        if metadata is None:
            return
        if metadata.plans and not are_checked:
            self._check_weights()
        self._make_room(metadata.commands)
        self._follow(metadata)
        with on(stream):
            try:
                self._load(metadata.plans, metadata.weights_changes)
            finally:
                self._await_launch(metadata.commands)  # also when the loads have failed

    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None:
        """Wait for nothing: `start_load_kv` or the engine wrapper orders every layer before the forward."""

    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None:
        """Do nothing: KV is saved when its request has finished."""

    def wait_for_save(self, stream: torch.cuda.Stream | None) -> None:
        """End the loads and note a completed forward: engines call this only after one. Waits for no save."""
        self._runtime.readiness.join(stream)
        self._completed_iteration = self._iteration
        self._runtime.is_forward_open = False

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Start moves between tiers, and saves of ended requests; return those whose save has ended on every rank.

        Waits for no transfer. If the engine does not hold saved blocks, a call names one request. Some engines never
        give a second one's blocks back."""
        runtime, ended_saves = self._runtime, self._runtime.ended_saves
        if any(request_id not in self._to_save for request_id in finished_gen_req_ids):
            # What rank 0's scheduler decided since the last metadata; every rank asks for the same requests.
            scheduler = runtime.scheduler
            commands = runtime.ranks.broadcast(None if scheduler is None else scheduler.take_commands())
            if commands is not None:
                self._make_room(commands)
                self._await_launch(commands)
        # Only now has the forward been launched, which a look at the weights and the saver's thread would hold up.
        self._check_weights(is_due=not self._goes_on or bool(finished_gen_req_ids))
        waiting, self._waiting = self._waiting, []
        for commands, loaded in waiting:
            assert self.saver is not None
            for donor_id in commands.offloads:
                self.saver.offload(donor_id, is_written=donor_id in commands.writes)
            for donor_id in commands.promotions:
                self.saver.promote(donor_id, loaded)
        for request_id in finished_gen_req_ids:
            if not self._begin_save(request_id):
                ended_saves.append(request_id)
        if self.saver is not None:
            ended = self.saver.finished()
            ended_saves.extend(request_id for request_id, _ in ended)
            runtime.saved.extend(saved for _, saved in ended)
            runtime.saved.extend(self.saver.lost())
            runtime.saves_ended()
        count = len(ended_saves) if self._holds_saved_blocks else min(1, len(ended_saves))
        return [ended_saves.popleft() for _ in range(count)], started_loading_req_ids

    def close(self) -> None:
        """Wait for running saves and for files that are being written, and free the donors."""
        if self.saver is not None:
            self.saver.close()
        if self.transfers is not None:
            self.transfers.close()
            self._runtime.disk = None
        if self.store is not None:
            self.store.clear()

    def _await_launch(self, commands: OffloadCommands) -> None:
        if self.saver is not None and (commands.offloads or commands.promotions):
            self._waiting.append((commands, record(current_stream(self.saver.device))))

    def _make_room(self, commands: OffloadCommands) -> None:
        self._to_save.update((intent.request_id, intent) for intent in commands.saves)
        for donor_id in (*commands.drops, *commands.releases):
            if self.store is not None:
                self.store.drop(donor_id)
        if self.transfers is not None:
            for donor_id in commands.drops:
                self.transfers.drop(donor_id)
            for donor_id in commands.fetches:
                self.transfers.fetch(donor_id)
            for donor_id in [each for each in commands.writes if each not in commands.offloads]:
                self.transfers.write(donor_id)

    def _follow(self, metadata: SemBlendConnectorMetadata) -> None:
        for request_id in metadata.forgotten:
            self._followed.pop(request_id, None)
            self._runtime.active_plans.take(request_id)
        self._followed.update((request_id, _FollowedRequest()) for request_id in metadata.followed)
        for progress in metadata.progress:
            if (followed := self._followed.get(progress.request_id)) is not None:
                if progress.is_first:
                    followed.block_ids.clear()
                followed.block_ids.extend(progress.new_block_ids)
                # An engine that schedules these tokens again had dropped the batch before its forward.
                followed.is_whole |= progress.written_tokens <= followed.written_tokens
                followed.written_tokens, followed.iteration = progress.written_tokens, self._iteration
        for request_id in metadata.grown:
            if (followed := self._followed.get(request_id)) is not None:
                followed.written_tokens += 1
                followed.iteration = self._iteration

    def _check_weights(self, *, is_due: bool = True) -> None:
        """Refuse all reuse if new weights bring other scales. Raises nothing: ended requests wait for the caller."""
        runtime = self._runtime
        runtime.check_weights(is_due=is_due)
        if runtime.weights_changes == self._weights_changes:
            return
        self._weights_changes = runtime.weights_changes
        try:
            have_changed = self._have_scales_changed()
        except Exception:
            logger.exception("the scales of the fp8 cache cannot be read; they count as changed")
            have_changed = True
        if have_changed:
            logger.error("KV reuse is off: the new weights bring other scales of the fp8 cache; restart the engine")
            runtime.refusal = runtime.refusal or "kv_scales"

    def _have_scales_changed(self) -> bool:  # vLLM's half knows them by layer
        pool = self._runtime.pool
        return pool is not None and pool.scales is not None and self._kv_scales() != pool.scales

    def _load(self, plans: tuple[SemanticKvPlan, ...], weights_changes: int) -> None:
        assert self.loader is not None or not plans
        failed: list[tuple[SemanticKvPlan, Exception]] = []
        if weights_changes != self._runtime.weights_changes:
            stale = DonorUnavailableError("its donors were computed with other weights")
            failed = [(plan, stale) for plan in plans if plan.spans]
        elif self.loader is not None:
            failed = self.loader.load(plans)
        here = {index: error for index, plan in enumerate(plans) for other, error in failed if other is plan}
        failures, self._runtime.weights_changes = agree_on_loads(
            self._runtime.ranks, plans, here, self._runtime.weights_changes
        )
        for index, plan in enumerate(plans):
            error = failures.get(index)
            if error is not None:
                self._runtime.failed_loads.append(plan.request_id)
                if plan.execution.mode is EngineMode.STOCK:
                    # The stock engine skips these tokens in any case: only an error is not wrong.
                    raise error
                text = "request %d: its donors cannot be placed; the engine computes everything"
                logger.error(text, plan.request_id, exc_info=error)
            self._runtime.active_plans.put(plan if error is None else plan.without_spans("load_failed"))

    def _begin_save(self, request_id: int) -> bool:
        intent, followed = self._to_save.pop(request_id, None), self._followed.pop(request_id, None)
        if intent is None or self.saver is None:
            return False
        if not self._is_whole(followed):
            self.saver.refuse(intent, "a forward that was to write its KV has failed")
            return True
        block_ids, tokens = self._written(intent, followed)
        if tokens:
            self.saver.start(intent, block_ids, tokens)
        else:
            self.saver.refuse(intent, "its blocks are none of the pool's")
        return True

    def _in_blocks(self, donor_ids: set[str]) -> dict[str, PagedKv]:
        """Return those donors that are whole in the engine's blocks, which it holds until `get_finished` at least."""
        assert self.saver is not None
        found = {each: kv for each, kv in self.saver.in_blocks.items() if each in donor_ids}
        for intent in (each for each in self._to_save.values() if each.donor_id in donor_ids):
            followed = self._followed.get(intent.request_id)
            block_ids, tokens = self._written(intent, followed) if self._is_whole(followed) else ([], 0)
            if tokens and tokens == intent.max_tokens:
                found[intent.donor_id] = self.saver.source(block_ids)
        return found

    def _is_whole(self, followed: _FollowedRequest | None) -> TypeGuard[_FollowedRequest]:
        """Return whether every forward that was to write the request's KV has completed."""
        return followed is not None and followed.is_whole and followed.iteration <= self._completed_iteration

    def _written(self, intent: SaveIntent, followed: _FollowedRequest) -> tuple[list[int], int]:
        """Return the blocks and the tokens that can be saved of an ended request; 0 for blocks of no pool."""
        assert self._runtime.pool is not None
        block_size, known = self._runtime.pool.geometry.block_size, set[int]()
        block_ids = list(intent.block_ids) or followed.block_ids
        tokens = min(followed.written_tokens, intent.max_tokens)
        for block in block_ids:
            # A block outside of the pool (-1 would be another request's), or one that comes twice, ends the save.
            if not 0 <= block < self._runtime.pool.num_blocks or block in known:
                tokens = min(tokens, len(known) * block_size)
                break
            known.add(block)
        return block_ids[: -(-tokens // block_size)], tokens


def layout_refusal(layout: Any, engine: EngineSpec) -> str | None:
    """Return why this layout is not taken. TensorRT-LLM has a layer group for each window, and one without."""
    cut = sorted({each.window_size for each in layout.groups if cuts_kv(engine, [each.window_size])})
    if cut:
        logger.warning(
            "KV reuse is off: the engine drops KV outside of windows of %s tokens; set max_attention_window to "
            "[max_seq_len], and max_seq_len",
            cut,
        )
        return "attention_window"
    if len(layout.groups) != 1:
        logger.warning("KV reuse is off: the caches are %d layer groups, not one pool", len(layout.groups))
        return "layer_groups"
    return None


def pool_refusal(pool: Any, geometry: KvGeometry | None, facts: ModelFacts, *, is_first: bool) -> str | None:
    """Return why this pool is not taken; one that does not fit the model has no `geometry`."""
    if geometry is None or not is_first:
        described = f"a pool of type {type(pool).__name__}"
        if isinstance(pool, torch.Tensor):
            described = f"a pool of shape {list(pool.shape)}, strides {list(pool.stride())} and dtype {pool.dtype}"
        why = "does not fit the model" if geometry is None else "is the second one of this engine"
        logger.warning("KV reuse is off: %s %s", described, why)
        return "pool_layout"
    shortest = min((each for each in facts.windows if each is not None), default=geometry.block_size)
    if shortest < geometry.block_size:
        text = "KV reuse is off: a window of %d tokens is shorter than a block of %d; use shorter blocks"
        logger.warning(text, shortest, geometry.block_size)
        return "window_below_block"
    return None


def join_ranks(runtime: Runtime, size: int) -> None:
    """Find the engine's `size` ranks if the engine has not set them; without them nothing is reused."""
    if runtime.ranks.size == size:
        return
    found = ranks_of(size)
    if found is None:
        logger.warning("KV reuse is off: the ranks of this engine cannot tell one another what became of their loads")
        runtime.refusal = runtime.refusal or "ranks_unknown"
    else:
        runtime.ranks = found


def agree_on_start(runtime: Runtime, error: ConfigurationError | None) -> None:
    """Adopt the first refusal of any rank on all of them; raise an error of one rank on all.

    Ranks of different versions refuse: they would read one another's metadata differently."""
    gathered = runtime.ranks.gather((__version__, runtime.refusal, None if error is None else str(error)))
    if error is not None:
        raise error
    failed = next((text for _, _, text in gathered if text is not None), None)
    if failed is not None:
        raise ConfigurationError(f"another rank cannot start: {failed}")
    if len({version for version, _, _ in gathered}) > 1:
        runtime.refusal = runtime.refusal or "metadata_version"
    runtime.refusal = runtime.refusal or next((refusal for _, refusal, _ in gathered if refusal is not None), None)
