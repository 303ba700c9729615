"""The inputs of a captured forward, at fixed addresses: one buffer on the device, one like it on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.layer_ops import slots_of
from kernels.sparse_prefill.captured import ITEM_FIELDS, TILE_FIELDS, LaunchShape, LaunchTables, fill_tables
from kernels.sparse_prefill.rows import check_rows

if TYPE_CHECKING:
    from engine_wrapper.layer_schedule import LayerSchedule
    from kernels.layout import KvGeometry


class StaticInputs:
    """Token ids, positions and slots [rows], output rows [sequences], launch tables and block ids of a forward.

    Rows beyond those of a batch hold token 0 at position 0 and write no slot. `block_room` is the most block ids of all
    sequences together. On a card the host's buffer is pinned and a copy out of it does not wait.
    """

    def __init__(self, shape: LaunchShape, block_room: int, pool: torch.Tensor, geometry: KvGeometry) -> None:
        self._shape = shape
        self._pool = pool
        self._geometry = geometry
        self._sizes = sizes = _sizes(shape, block_room)
        cuda = pool.is_cuda
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=cuda)
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=pool.device)
        self._copied = torch.cuda.Event() if cuda else None
        self.token_ids, positions, self.slots, self.output_rows, items, tiles, block_ids = self._device.split(sizes)
        self.launch = LaunchTables(
            _table(items, shape.items, ITEM_FIELDS), _table(tiles, shape.tiles, TILE_FIELDS), positions, block_ids
        )

    def upload(self, schedule: LayerSchedule, *, writes: bool = True) -> None:
        """Fills the buffer on the device, in the order of its current stream, from a schedule on the host.

        Without `writes` the rows write no slot: a rehearsal. Raises ValueError, before
        anything is copied, when the schedule does not fit the shape or the pool.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the copy before has long ended; the buffer may not change under it
        sequences, rows = schedule.stages[0].sequences, schedule.stages[0].num_rows
        check_rows({}, 0, self._pool, 0, sequences, self._geometry)
        tokens, positions, slots, outputs, items, tiles, block_ids = self._host.split(self._sizes)
        known = len(schedule.token_ids)
        tokens[:known], tokens[known:] = schedule.token_ids, 0
        positions[:rows], positions[rows:] = torch.cat([each.host_positions for each in sequences]), 0
        slots[:rows], slots[rows:] = slots_of(sequences, self._geometry.block_size) if writes else -1, -1
        outputs[: len(sequences)], outputs[len(sequences) :] = schedule.output_rows, 0
        used = torch.cat([sequence.block_ids for sequence in sequences])
        block_ids[: len(used)] = used
        fill_tables(
            self._shape,
            sequences,
            _table(items, self._shape.items, ITEM_FIELDS).numpy(),
            _table(tiles, self._shape.tiles, TILE_FIELDS).numpy(),
        )
        end = sum(self._sizes[:-1]) + len(used)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _sizes(shape: LaunchShape, block_room: int) -> list[int]:
    """Elements (int64) of token ids, positions, slots, output rows, items, tiles and block ids."""
    items, tiles = (-(-count // 2) for count in (shape.items * ITEM_FIELDS, shape.tiles * TILE_FIELDS))
    return [shape.rows, shape.rows, shape.rows, shape.sequences, items, tiles, block_room]


def _table(words: torch.Tensor, count: int, fields: int) -> torch.Tensor:
    """int64 words read as int32 [count, fields]."""
    return words.view(torch.int32)[: count * fields].view(count, fields)
