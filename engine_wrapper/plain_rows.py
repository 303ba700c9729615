"""The active rows of a forward through the model's own layers, whose attention is replaced by one over the pool.

The replacement goes through Transformers' attention interface: K and V of the active rows are written to the pool, then
the queries attend to all of their sequence that lies there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels.sparse_prefill import SequenceRows, sparse_prefill, write_rows

if TYPE_CHECKING:
    from engine_wrapper.layer_schedule import DeviationCheck, LayerSchedule, Stage
    from kernels.layout import KvGeometry
    from semblend_trt.ranks import Ranks

ATTENTION_NAME = "semblend_paged"

# Sees K and V, each [rows, kv_heads, head_dim], before they are written.
Watch = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """What the attention of one stage needs: the pool, the active rows of each sequence, and who watches."""

    pool: torch.Tensor
    geometry: KvGeometry
    sequences: tuple[SequenceRows, ...]
    watch: Watch | None = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedAttention | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface over a paged pool.

    `query`: [1, heads, rows, head_dim]; `key`, `value`: [1, kv_heads, rows, head_dim], rotated. Returns
    [1, rows, heads, head_dim]. Without `paged`, when somebody runs the model itself, it is Transformers' SDPA.
    """
    if paged is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output, None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if paged.watch is not None:
        paged.watch(keys, values)
    write_rows(keys, values, paged.pool, layer, paged.sequences, paged.geometry)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return sparse_prefill(queries, paged.pool, layer, paged.sequences, paged.geometry, scale)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


class PlainRows:
    """Rows between two layers: they enter stages, run layers, are compared by checks, and come out.

    A check's layer runs for all rows when they are compared; those that it drops leave behind it.
    """

    def __init__(self, decoder: Any, schedule: LayerSchedule, pool: torch.Tensor, geometry: KvGeometry) -> None:
        self._decoder = decoder
        self._pool = pool
        self._geometry = geometry
        self._hidden = decoder.embed_tokens(schedule.token_ids[None])
        self._positions = schedule.positions[None]
        # cos, sin: [1, rows, rotary_dim]
        self._cos, self._sin = decoder.rotary_emb(self._hidden, position_ids=self._positions)
        self._compared: int | None = None

    def enter(self, stage: Stage) -> None:
        """Drops the rows that the stage does not keep."""
        self._sequences = stage.sequences
        if stage.keep is not None:
            self._hidden, self._positions, self._cos, self._sin = (
                tensor.index_select(1, stage.keep) for tensor in (self._hidden, self._positions, self._cos, self._sin)
            )

    def run(self, layer: int) -> None:
        """Runs a layer, or what is left of it behind a check."""
        if layer != self._compared:
            self._run(layer, None)

    def compare(self, check: DeviationCheck, ranks: Ranks) -> torch.Tensor:
        """Begins the check's layer; returns deviations, as `DeviationCheck.deviations`. All K and V are written."""
        found: list[torch.Tensor] = []

        def watch(keys: torch.Tensor, values: torch.Tensor) -> None:
            found.append(check.deviations(keys, values, self._pool, self._geometry, ranks))

        self._run(check.layer, watch)
        self._compared = check.layer
        return found[0]

    def output(self, rows: torch.Tensor) -> torch.Tensor:
        """The final norm of some rows, int64; returns [len(rows), hidden]."""
        normed: torch.Tensor = self._decoder.norm(self._hidden[0].index_select(0, rows))
        return normed

    def _run(self, layer: int, watch: Watch | None) -> None:
        self._hidden = self._decoder.layers[layer](
            self._hidden,
            attention_mask=None,
            position_ids=self._positions,
            position_embeddings=(self._cos, self._sin),
            use_cache=False,
            paged=PagedAttention(self._pool, self._geometry, self._sequences, watch),
        )
