"""Which query rows belong to which sequence, and the checks that every path makes on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kernels.layout import SUPPORTED_DTYPES, KvGeometry, PoolLayer, check_pool

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """Rows `first_row .. first_row + n - 1` of the batch, at `positions` of one sequence.

    `positions`: int64 [n], strictly rising; `block_ids`: int64, the sequence's blocks in the pool. Build it from host
    tensors: it reads their bounds once, and `to` moves the tensors without reading them again. Raises ValueError.
    `host_positions` and `host_block_ids` are the same on the host, even after `to`. `memo` caches what the kernels
    derive from a batch whose first rows are these; the layers of a stage share it."""

    first_row: int
    positions: torch.Tensor
    block_ids: torch.Tensor
    first_position: int = field(init=False, repr=False)
    last_position: int = field(init=False, repr=False)
    highest_block: int = field(init=False, repr=False)
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
        lowest, highest = int(blocks.min()), int(blocks.max())
        if first < 0 or lowest < 0:
            raise ValueError(f"positions start at {first} and block_ids at {lowest}; both must be at least 0")
        self._set(
            host_positions=positions,
            host_block_ids=block_ids,
            first_position=first,
            last_position=last,
            highest_block=highest,
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int:
        """Rows of this sequence."""
        return self.positions.shape[0]

    @property
    def contiguous(self) -> bool:
        """True when the positions have no gap."""
        return self.last_position - self.first_position + 1 == self.count

    def to(self, device: torch.device | str) -> SequenceRows:
        """Return the same rows with their tensors on `device`, copied without waiting."""
        return self.moved(*all_to_device([self.positions, self.block_ids], device))

    def moved(self, positions: torch.Tensor, block_ids: torch.Tensor) -> SequenceRows:
        """Return the same rows with these copies of their tensors."""
        moved = object.__new__(SequenceRows)
        moved._set(
            first_row=self.first_row,
            positions=positions,
            block_ids=block_ids,
            first_position=self.first_position,
            last_position=self.last_position,
            highest_block=self.highest_block,
            host_positions=self.host_positions,
            host_block_ids=self.host_block_ids,
            memo={},
        )
        return moved


def in_chunks(sequences: Sequence[SequenceRows], chunk: int, block_size: int) -> tuple[SequenceRows, ...]:
    """Return the same rows as one sequence for each chunk of `chunk` positions, in which alone their queries see KV.

    A row's position counts from its chunk's first one, and the blocks begin with that of the chunk: what is written
    goes to the same slots. On the sequences' device. If a sequence has several chunks and blocks of `block_size` do not
    divide them, raises ValueError."""
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
    joined = to_device(torch.cat(tuple(vectors)), device)
    return torch.split(joined, [len(each) for each in vectors])


def check_rows(tensors: dict[str, torch.Tensor], heads: int, kv: PoolLayer, sequences: Sequence[SequenceRows]) -> None:
    """Raise ValueError unless `tensors`, each [rows, heads, head_dim], and `sequences` fit the pool and one another.

    The sequences must cover the rows in order and without a gap. They are checked once for a pool, on the host, so that
    nothing waits for a device."""
    pool, layer, geometry = kv
    check_pool(pool, geometry)
    if not 0 <= layer < geometry.num_layers:
        raise ValueError(f"layer is {layer}, outside 0..{geometry.num_layers - 1}")
    rows = _covered_rows(tuple(sequences), pool.shape[0], geometry)
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


def _covered_rows(sequences: tuple[SequenceRows, ...], num_blocks: int, geometry: KvGeometry) -> int:
    """Check the sequences; return the rows that they cover."""
    memo, key = sequences[0].memo if sequences else {}, ("checked", sequences[1:], num_blocks, geometry)
    rows: int = memo.get(key, 0)
    if rows:
        return rows
    for index, sequence in enumerate(sequences):
        if sequence.first_row != rows:
            raise ValueError(f"sequences[{index}].first_row is {sequence.first_row}; {rows} is the next free row")
        rows += sequence.count
        if sequence.highest_block >= num_blocks:
            raise ValueError(
                f"sequences[{index}].block_ids reach {sequence.highest_block}, outside 0..{num_blocks - 1}, "
                "the blocks of the pool"
            )
        capacity = sequence.block_ids.shape[0] * geometry.block_size
        if sequence.last_position >= capacity:
            raise ValueError(
                f"sequences[{index}].positions reach {sequence.last_position}; its blocks hold 0..{capacity - 1}"
            )
    memo[key] = rows
    return rows
