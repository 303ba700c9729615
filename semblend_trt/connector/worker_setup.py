"""Set a worker up as its engine registers caches: refuse unknown ones, open the tiers, and agree with other ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from kernels.kv_move import warm_up
from semblend_trt import __version__
from semblend_trt.connector.eligibility import cuts_kv
from semblend_trt.donors.offload import DiskLink, OffloadEvent, OffloadEventKind
from semblend_trt.donors.store import DonorStore, HostTier, arena_blocks
from semblend_trt.errors import ConfigurationError
from semblend_trt.ranks import ranks_of
from semblend_trt.transfer.load import PlanLoader
from semblend_trt.transfer.save import DonorSaver
from semblend_trt.transfer.staging import HostReader, HostWriter, Staging

if TYPE_CHECKING:
    from kernels.layout import KvGeometry
    from kernels.rope import Rotation
    from semblend_trt.config import Settings
    from semblend_trt.connector.engine_spec import EngineSpec
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.donors.disk_tier import DiskTransfers
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

# Slots of the staging memory for loads, so that copies never wait for the kernels after them. Saves have one more.
_LOAD_SLOTS = 3
# Chunks of a save that the engine's own thread queues on a card, each in about 0.1 ms. Another thread costs several
# times more: it takes the interpreter's lock at every launch. On the CPU queueing is copying.
_CHUNKS_AT_ONCE = 16


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
        logger.warning(
            "KV reuse is off: a window of %d tokens is shorter than a block of %d; use shorter blocks",
            shortest,
            geometry.block_size,
        )
        return "window_below_block"
    return None


def open_tiers(
    settings: Settings,
    engine: EngineSpec,
    pool: torch.Tensor,
    geometry: KvGeometry,
    rotation: Rotation,
    runtime: Runtime,
    *,
    holds_saved_blocks: bool,
) -> tuple[DonorStore, PlanLoader, DonorSaver, DiskTransfers | None]:
    """Take the memory of one rank's tiers and staging. Raises ConfigurationError if it cannot be had."""
    device, dtype = pool.device, pool.dtype
    arena = snapshots = None
    if settings.device_bytes or not holds_saved_blocks:
        from semblend_trt.donors.device_tier import DeviceTier
    if settings.device_bytes:
        arena = DeviceTier(arena_blocks(settings.device_bytes, geometry, dtype), geometry, dtype, device)
    store = DonorStore(HostTier(settings.host_bytes, geometry, dtype, lock=pool.is_cuda), arena)
    reader, writer = None, HostWriter(rotation, None)
    if pool.is_cuda and settings.host_bytes:
        slot = settings.staging_bytes // (_LOAD_SLOTS + 1)
        reader = HostReader(device, rotation, Staging(slot * _LOAD_SLOTS, _LOAD_SLOTS, geometry, dtype, device))
        writer = HostWriter(rotation, Staging(slot, 1, geometry, dtype, device))
    if not holds_saved_blocks:
        blocks = min(arena_blocks(settings.snapshot_bytes, geometry, dtype), pool.shape[0])
        snapshots = DeviceTier(blocks, geometry, dtype, device, "SEMBLEND_SNAPSHOT_BYTES")
    warm_up(geometry, dtype, device, rotation)
    loader = PlanLoader(store, pool, geometry, rotation, runtime.readiness, reader)
    transfers = _open_disk(settings, engine, geometry, dtype, store.host, runtime)
    saver = DonorSaver(
        store,
        pool,
        geometry,
        rotation,
        writer,
        runtime.offload_events,
        transfers,
        runtime.ranks,
        at_once=_CHUNKS_AT_ONCE if pool.is_cuda else 0,
        snapshots=snapshots,
    )
    return store, loader, saver, transfers


def _open_disk(
    settings: Settings, engine: EngineSpec, geometry: KvGeometry, dtype: torch.dtype, host: HostTier, runtime: Runtime
) -> DiskTransfers | None:
    """Open the disk tier that was asked for; None without one, and if it cannot be had, which is counted."""
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
