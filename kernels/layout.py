"""How KV lies in memory, which tokens of it are moved, compared or attended to, and the checks of these on the host.

The inner order of TensorRT-LLM's pool is HND, offset = (head * block_size + slot) * head_dim + channel, as in its
`getKVLocalIdx` (cpp/tensorrt_llm/kernels/kvCacheUtils.h)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A rotation keeps fp8's one scale, so kv_move and deviation need not know it. Attention takes it to be 1.
MOVABLE_DTYPES = (*SUPPORTED_DTYPES, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Sizes of one rank's KV: `kv_heads` are the heads that this rank holds, `block_size` the tokens of a block.

    `kv_factor` is 2 (K and V), or 1 if one latent row is both (MLA), as in TensorRT-LLM's pools."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    kv_factor: int = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KvGeometry.{name} is {getattr(self, name)}; it must be at least 1")
        if self.kv_factor not in (1, 2):
            raise ValueError(f"KvGeometry.kv_factor is {self.kv_factor}; it must be 2 (K and V) or 1 (MLA)")

    @property
    def row_elements(self) -> int:
        """Elements of K (or V, or the latent) of one block and one layer."""
        return self.kv_heads * self.block_size * self.head_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token over all layers."""
        return self.num_layers * self.kv_factor * self.kv_heads * self.head_dim * dtype.itemsize

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return that of `tokens` tokens in a tensor of their own: [layers, kv_factor, kv_heads, tokens, head_dim]."""
        return self.num_layers, self.kv_factor, self.kv_heads, tokens, self.head_dim

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, eq=False)
class LayeredPool:
    """A pool whose layers lie apart, as vLLM's do: K and V of each layer, or K as the one latent row of MLA.

    Each is [blocks, kv_heads, block_size, head_dim] with any strides. `shape` is that of the pool in one tensor. What
    all planes have is read once, because every move of a forward asks for it."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...] = ()

    @property
    def kinds(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """K, then V, of all layers; or the latent rows alone."""
        return (self.keys, self.values) if self.values else (self.keys,)

    @cached_property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """K, then V, of all layers."""
        return tuple(plane for kind in self.kinds for plane in kind)

    @cached_property
    def forms(self) -> set[tuple[Any, ...]]:
        """Shape, dtype and device of the planes, which are all alike in a sound pool."""
        return {(tuple(each.shape), each.dtype, each.device) for each in self.planes}

    @cached_property
    def strides(self) -> set[tuple[int, ...]]:
        return {plane.stride() for plane in self.planes}

    @cached_property
    def storages(self) -> set[int]:
        """Addresses of the planes' memory."""
        return {plane.untyped_storage().data_ptr() for plane in self.planes}

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        blocks, *row = self.keys[0].shape
        return blocks, len(self.keys), len(self.kinds), math.prod(row)

    def layers(self, first: int, end: int) -> LayeredPool:
        """Return layers `first .. end - 1`, without a copy."""
        return LayeredPool(self.keys[first:end], self.values[first:end])


Pool = torch.Tensor | LayeredPool


class PoolLayer(NamedTuple):
    """One layer of a pool: [blocks, layers, kv_factor (K, V), kv_heads * block_size * head_dim], or a LayeredPool."""

    pool: Pool
    layer: int
    geometry: KvGeometry


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One sequence in a pool as in PoolLayer: position p lies in block `block_ids[p // block_size]`, int64 [n].

    Keep `block_ids` on the host: every write checks them there, and would have to wait for a device."""

    pool: Pool
    block_ids: torch.Tensor
    geometry: KvGeometry

    @property
    def capacity(self) -> int:
        """Positions that the blocks hold."""
        return self.block_ids.numel() * self.geometry.block_size

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Layers, kv_factor, kv_heads and head_dim."""
        geometry = self.geometry
        return geometry.num_layers, geometry.kv_factor, geometry.kv_heads, geometry.head_dim

    @property
    def memory(self) -> torch.Tensor:
        """The pool, or K of the lowest layer where the layers lie apart."""
        return self.pool.keys[0] if isinstance(self.pool, LayeredPool) else self.pool

    def places(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return blocks and slots of `positions`, int64 [n] each, on the host."""
        size = self.geometry.block_size
        return self.block_ids.cpu()[positions // size], positions % size

    def layers(self, first: int, end: int) -> PagedKv:
        """Return layers `first .. end - 1`, without a copy."""
        pool = self.pool.layers(first, end) if isinstance(self.pool, LayeredPool) else self.pool[:, first:end]
        return replace(self, pool=pool, geometry=replace(self.geometry, num_layers=end - first))


@dataclass(frozen=True, slots=True)
class ContiguousKv:
    """One donor's KV: [layers, kv_factor, kv_heads, tokens, head_dim], K then V; any strides, on any device."""

    tensor: torch.Tensor

    @property
    def capacity(self) -> int:
        """Positions that the tensor holds."""
        return self.tensor.shape[3]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Layers, kv_factor, kv_heads and head_dim."""
        layers, kv_factor, kv_heads, _, head_dim = self.tensor.shape
        return layers, kv_factor, kv_heads, head_dim

    @property
    def memory(self) -> torch.Tensor:
        return self.tensor

    def layers(self, first: int, end: int) -> ContiguousKv:
        """Return layers `first .. end - 1`, without a copy."""
        return ContiguousKv(self.tensor[first:end])


Kv = PagedKv | ContiguousKv


@dataclass(frozen=True, slots=True)
class FreshRows:
    """K (rotated) and V of one layer from a forward.

    `k`, `v`: [tokens, kv_heads, head_dim], any strides. With kv_factor 1 (MLA) there is no `v`."""

    k: torch.Tensor
    v: torch.Tensor | None = None

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """K, then V if there is one."""
        return (self.k,) if self.v is None else (self.k, self.v)


@dataclass(frozen=True, slots=True)
class Move:
    """`length` tokens of `source` from `source_start`, moved to or compared with the target's from `target_start` on.

    An index is a position, unless `turn` says by how many positions K rotates: a staged copy begins anywhere."""

    source: Kv
    source_start: int
    target_start: int
    length: int
    turn: int | None = None

    @property
    def shift(self) -> int:
        """Positions by which K is rotated."""
        return self.target_start - self.source_start if self.turn is None else self.turn


def lie_alike(*each: Kv) -> bool:
    """Return whether, in each, K and V of all layers have the same strides: the Triton kernels know one set."""
    pools = (kv.pool for kv in each if isinstance(kv, PagedKv))
    return all(len(pool.strides) == 1 for pool in pools if isinstance(pool, LayeredPool))


def pool_view(pool: torch.Tensor, geometry: KvGeometry) -> torch.Tensor:
    """View `pool` as [blocks, layers, kv_factor, kv_heads, block_size, head_dim]; ValueError for another shape."""
    check_pool(pool, geometry)
    return pool.view(*pool.shape[:3], geometry.kv_heads, geometry.block_size, geometry.head_dim)


def layer_view(pool: Pool, geometry: KvGeometry, layer: int, kind: int) -> torch.Tensor:
    """View K, or the latent, (kind 0) or V (kind 1) of one layer as [blocks, kv_heads, block_size, head_dim]."""
    if isinstance(pool, LayeredPool):
        return pool.kinds[kind][layer]
    return pool_view(pool, geometry)[:, layer, kind]


def by_token(memory: torch.Tensor, geometry: KvGeometry, layers: int) -> torch.Tensor:
    """View contiguous memory of whole layers, token by token, as [layers, kv_factor, kv_heads, tokens, head_dim]."""
    shape = (layers, -1, geometry.kv_factor, geometry.kv_heads, geometry.head_dim)
    return memory.view(shape).permute(0, 2, 3, 1, 4)


def indexable(values: torch.Tensor) -> torch.Tensor:
    """Return `values`, as bytes where torch cannot index their dtype."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def check_sources(
    moves: Sequence[Move], name: str, other: str, sizes: tuple[int, int, int, int], memory: torch.Tensor
) -> None:
    """Raise ValueError unless every source holds its range and has `sizes` and the dtype of `memory`, called `other`.

    A PagedKv source must be on `memory`'s device. `sizes`: layers, kv_factor, kv_heads, head_dim."""
    checked: set[int] = set()
    for index, move in enumerate(moves):
        source = f"{name}[{index}].source"
        if id(move.source) not in checked:
            checked.add(id(move.source))
            check_kv(move.source, source)
            if move.source.sizes != sizes:
                raise ValueError(
                    f"{source} has (layers, kv_factor, kv_heads, head_dim) {move.source.sizes}; the {other} has {sizes}"
                )
            tensor = move.source.memory
            if tensor.dtype != memory.dtype:
                raise ValueError(f"{source} is {tensor.dtype}; the {other} is {memory.dtype}")
            if isinstance(move.source, PagedKv) and tensor.device != memory.device:
                raise ValueError(f"{source}.pool is on {tensor.device}; the {other} is on {memory.device}")
        check_range(f"{source} from source_start", move.source_start, move.length, move.source.capacity)


def check_range(what: str, start: int, length: int, capacity: int) -> None:
    """Raise ValueError unless `start .. start + length` lies in 0..capacity."""
    if start < 0 or length < 0 or start + length > capacity:
        raise ValueError(f"{what} {start} with length {length} leaves 0..{capacity}, the positions it holds")


def check_kv(kv: Kv, name: str) -> None:
    """Raise ValueError unless `kv` is well formed in itself."""
    if isinstance(kv, ContiguousKv):
        if kv.tensor.ndim != 5 or kv.tensor.shape[1] not in (1, 2):
            raise ValueError(
                f"{name}.tensor has shape {list(kv.tensor.shape)}; [layers, 2 (1 in MLA), kv_heads, tokens, head_dim] "
                "is needed"
            )
        check_dtype(kv.tensor.dtype, f"{name}.tensor")
        return
    check_pool(kv.pool, kv.geometry, f"{name}.pool")
    ids, last = kv.block_ids, kv.pool.shape[0] - 1
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise ValueError(f"{name}.block_ids is {ids.dtype} of shape {list(ids.shape)}; an int64 vector is needed")
    if ids.numel():
        held = ids.cpu().numpy()
        lowest, highest = int(held.min()), int(held.max())
        if lowest < 0 or highest > last:
            raise ValueError(f"{name}.block_ids spans {lowest}..{highest}, outside 0..{last}, the blocks of the pool")


def check_pool(pool: Pool, geometry: KvGeometry, name: str = "pool") -> None:
    """Raise ValueError, naming the tensor and its bound, when `pool` is not a pool of this geometry."""
    if isinstance(pool, LayeredPool):
        check_dtype(pool.dtype, name)
        row = (pool.shape[0], geometry.kv_heads, geometry.block_size, geometry.head_dim)
        counts, found = [len(kind) for kind in pool.kinds], pool.forms
        if found != {(row, pool.dtype, pool.device)} or counts != [geometry.num_layers] * geometry.kv_factor:
            raise ValueError(
                f"{name} has {counts} layers of {sorted(map(str, found))}; {geometry.num_layers} of {list(row)} in "
                f"each of {geometry.kv_factor} kinds, all of one dtype on one device, are needed for {geometry}"
            )
        return
    expected = (geometry.num_layers, geometry.kv_factor, geometry.row_elements)
    if pool.ndim != 4 or tuple(pool.shape[1:]) != expected:
        raise ValueError(
            f"{name} has shape {list(pool.shape)}; [blocks, {', '.join(map(str, expected))}] is needed for {geometry}"
        )
    check_dtype(pool.dtype, name)
    if pool.stride(3) != 1:
        raise ValueError(f"{name} has stride {pool.stride(3)} in its last dimension; it must be 1")


def check_dtype(dtype: torch.dtype, name: str) -> None:
    """Raise ValueError when `dtype` is not among MOVABLE_DTYPES."""
    if dtype not in MOVABLE_DTYPES:
        supported = ", ".join(str(each).removeprefix("torch.") for each in MOVABLE_DTYPES)
        raise ValueError(f"{name} is {dtype}; supported are {supported}")


@dataclass(slots=True, eq=False)
class SequenceRows:
    """Rows `first_row .. first_row + n - 1` of the batch, at `positions` of one sequence.

    `positions`: int64 [n], strictly rising; `block_ids`: int64, the sequence's blocks in the pool. Both are read once,
    so build it from host tensors; `host_positions` and `host_block_ids` stay there after `to`. It never changes but for
    `memo`, see `once`. Raises ValueError."""

    first_row: int
    positions: torch.Tensor
    block_ids: torch.Tensor
    first_position: int = field(init=False, repr=False)
    last_position: int = field(init=False, repr=False)
    host_positions: torch.Tensor = field(init=False, repr=False)
    host_block_ids: torch.Tensor = field(init=False, repr=False)
    memo: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("positions", "block_ids"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int64 or tensor.ndim != 1 or tensor.numel() == 0:
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; a vector of int64 with at least one "
                    "element is needed"
                )
        if self.first_row < 0:
            raise ValueError(f"first_row is {self.first_row}; it must be at least 0")
        positions, block_ids = self.positions.cpu().contiguous(), self.block_ids.cpu()
        # NumPy takes a fraction of torch's time for so few numbers.
        rising, blocks = positions.numpy(), block_ids.numpy()
        if not (rising[1:] > rising[:-1]).all():
            raise ValueError("positions must rise strictly")
        first, last = int(rising[0]), int(rising[-1])
        lowest = int(blocks.min())
        if first < 0 or lowest < 0:
            raise ValueError(f"positions start at {first} and block_ids at {lowest}; both must be at least 0")
        self.host_positions, self.host_block_ids = positions, block_ids
        self.first_position, self.last_position = first, last

    @property
    def count(self) -> int:
        """Rows of this sequence."""
        return self.positions.shape[0]

    def to(self, device: torch.device | str) -> SequenceRows:
        """Return the same rows with their tensors on `device`, copied without waiting."""
        return self.moved(*all_to_device([self.positions, self.block_ids], device))

    def moved(self, positions: torch.Tensor, block_ids: torch.Tensor) -> SequenceRows:
        """Return the same rows with these copies of their tensors."""
        moved = copy(self)
        moved.positions, moved.block_ids, moved.memo = positions, block_ids, {}
        return moved


def once(sequences: Sequence[SequenceRows], what: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """Return what `make` derives from a batch, under the name `what`; the layers of a stage share it."""
    memo, key = sequences[0].memo, (what, tuple(sequences[1:]))
    if key not in memo:
        memo[key] = make()
    made: T = memo[key]
    return made


def in_chunks(sequences: Sequence[SequenceRows], chunk: int, block_size: int) -> tuple[SequenceRows, ...]:
    """Return the same rows as one sequence for each chunk of `chunk` positions, in which alone their queries see KV.

    Positions count from the chunk's first one, and the blocks begin with the chunk's: rows keep their slots. If a
    sequence has several chunks and blocks of `block_size` do not divide them, raises ValueError."""
    found: list[SequenceRows] = []
    for each in sequences:
        if each.last_position < chunk:
            found.append(each)
            continue
        if chunk % block_size:
            raise ValueError(f"chunk is {chunk}; it must be a multiple of the block size {block_size}")
        positions, blocks = each.host_positions, each.host_block_ids
        chunks, counts = (positions // chunk).unique_consecutive(return_counts=True)
        row = each.first_row
        for index, own in zip(chunks.tolist(), positions.split(counts.tolist()), strict=True):
            held = blocks[index * chunk // block_size : (index + 1) * chunk // block_size]
            found.append(SequenceRows(row, own - index * chunk, held).to(each.positions.device))
            row += len(own)
    return tuple(found)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy `tensor`, contiguous, to `device` without waiting, through pinned memory if it goes from host to card."""
    tensor = tensor.contiguous()
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def all_to_device(vectors: Sequence[torch.Tensor], device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """Copy vectors of one dtype as `to_device` does, in one copy: each costs the host as much as some kernels."""
    return torch.split(to_device(torch.cat(tuple(vectors)), device), [len(each) for each in vectors])


def check_rows(tensors: dict[str, torch.Tensor], heads: int, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Raise ValueError unless `tensors`, each [rows, heads, head_dim], and `sequences` fit the pool and one another.

    The sequences must cover the rows in order and without a gap. They are checked once for a pool, on the host."""
    pool, layer, geometry = kv
    check_pool(pool, geometry)
    if not 0 <= layer < geometry.num_layers:
        raise ValueError(f"layer is {layer}, outside 0..{geometry.num_layers - 1}")
    checked, blocks = ("checked", pool.shape[0], geometry), pool.shape[0]
    rows = once(sequences, checked, lambda: _covered_rows(sequences, blocks, geometry)) if sequences else 0
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != (rows, heads, geometry.head_dim):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; [{rows}, {heads}, {geometry.head_dim}] is needed by the "
                "sequences and the geometry"
            )
        fits = tensor.dtype in (SUPPORTED_DTYPES if pool.dtype == torch.float8_e4m3fn else (pool.dtype,))
        if not fits or tensor.device != pool.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; the pool is {pool.dtype} on {pool.device}")


def check_written(k: torch.Tensor, v: torch.Tensor | None, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Raise ValueError unless K and V, or the latent alone, fit the pool and the sequences as `check_rows` has it."""
    given = {"k": k} if v is None else {"k": k, "v": v}
    if len(given) != kv.geometry.kv_factor:
        raise ValueError(f"{' and '.join(given)} given; KvGeometry.kv_factor is {kv.geometry.kv_factor}")
    check_rows(given, kv.geometry.kv_heads, kv, sequences)


def _covered_rows(sequences: Sequence[SequenceRows], num_blocks: int, geometry: KvGeometry) -> int:
    """Check the sequences; return the rows that they cover."""
    rows = 0
    for index, sequence in enumerate(sequences):
        if sequence.first_row != rows:
            raise ValueError(f"sequences[{index}].first_row is {sequence.first_row}; {rows} is the next free row")
        rows += sequence.count
        if (highest := int(sequence.host_block_ids.numpy().max())) >= num_blocks:
            raise ValueError(
                f"sequences[{index}].block_ids reach {highest}, outside 0..{num_blocks - 1}, the blocks of the pool"
            )
        capacity = sequence.block_ids.shape[0] * geometry.block_size
        if sequence.last_position >= capacity:
            raise ValueError(
                f"sequences[{index}].positions reach {sequence.last_position}; its blocks hold 0..{capacity - 1}"
            )
    return rows
