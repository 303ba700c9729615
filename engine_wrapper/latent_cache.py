"""Latent attention (MLA) of Transformers' layers over a paged pool: in the place of their cache, rows go to the pool
and come back as a forward without one would hold them, rounded where the pool is in fp8.

Facts: Transformers, `models/deepseek_v3/modeling_deepseek_v3.py`: a layer hands its cache the channels that are free of
position and those that turn, of which the first of each pair stand in front, and expands what it gets back to K and V
of every head. Older versions cache these.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.layout import indexable, layer_view
from semblend_trt.errors import ConfigurationError

_OLD = "Transformers {} caches K and V of every head, where the model has one latent row a token; install a newer one"

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.layout import KvGeometry
    from kernels.sparse_prefill import SequenceRows


def check_latent_cache(model: Any) -> None:
    """Raises ConfigurationError where the layers of `model`, if its attention is latent, cache K and V of every head:
    those of older versions do, and have no `expand_kv`."""
    if getattr(model.config, "kv_lora_rank", None) and not hasattr(model.model.layers[0].self_attn, "expand_kv"):
        raise ConfigurationError(_OLD.format(metadata.version("transformers")))


def latent_rows(free: torch.Tensor, turning: torch.Tensor) -> torch.Tensor:
    """Rows as engines keep them, [texts, 1, tokens, channels], from what Transformers caches in the place of K and V.

    Raises ConfigurationError for a version that caches K and V of every head instead.
    """
    if free.shape[1] != 1 or turning.shape[1] != 1:
        raise ConfigurationError(_OLD.format(metadata.version("transformers")))
    return torch.cat([free, torch.stack(turning.chunk(2, dim=-1), dim=-1).flatten(-2)], dim=-1)


class LatentCache:
    """What a layer takes for its cache in one stage of a forward. `write` puts a layer's active rows into `pool`."""

    def __init__(
        self,
        pool: torch.Tensor,
        geometry: KvGeometry,
        sequences: Sequence[SequenceRows],
        write: Callable[[int, torch.Tensor, torch.Tensor | None], None],
    ) -> None:
        self._pool, self._geometry, self._sequences, self._write = pool, geometry, sequences, write

    def update(
        self, free: torch.Tensor, turning: torch.Tensor, layer: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the active rows, [1, 1, rows, channels] in two parts, and returns those of all tokens up to the last
        row of each sequence, one sequence after the other: what is stored, in the rows' dtype. Raises
        ConfigurationError as `latent_rows` does."""
        rows = latent_rows(free, turning)[0].transpose(0, 1)
        self._write(layer, rows, None)
        pool = indexable(layer_view(self._pool, self._geometry, layer, 0))  # [blocks, 1, block_size, channels]
        held = torch.cat([pool[each.block_ids].flatten(0, 2)[: each.last_position + 1] for each in self._sequences])
        held = held.view(self._pool.dtype).to(rows.dtype)  # [tokens, channels]
        kept, turned = held[None, None].split([free.shape[-1], turning.shape[-1]], dim=-1)
        return kept, turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def latent_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequence[SequenceRows], scale: float | None
) -> torch.Tensor:
    """Attends each row to its own sequence's tokens up to itself. `query`: [1, heads, rows, channels]; `key`, `value`:
    [1, heads, tokens, channels], the tokens as LatentCache returns them. Returns [1, rows, heads, channels of V]."""
    found, begin = [], 0
    for each in sequences:
        end = begin + each.last_position + 1
        own = query[:, :, each.first_row : each.first_row + each.count]
        seen = torch.arange(end - begin, device=query.device) <= each.positions[:, None]
        parts = own, key[:, :, begin:end], value[:, :, begin:end]
        found.append(scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale))
        begin = end
    return torch.cat(found, dim=2).transpose(1, 2)
