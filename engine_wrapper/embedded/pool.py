"""The KV pool: one tensor for all blocks of all layers, laid out as TensorRT-LLM's primary pool."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kernels.layout import pool_view
from semblend_trt.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_wrapper.embedded.llm_args import LlmArgs
    from kernels.layout import KvGeometry

DEFAULT_POOL_BYTES = 1 << 30


class KvPool:
    """`tensor`: [blocks, layers, 2, kv_heads * block_size * head_dim], K then V, in `layout` inside a block: "HND" or
    "NHD". `computed` is what a model runs on, always HND: `tensor` itself, or a copy of it for a forward.

    It starts as zeros: rows that no request has written are masked, and a masked NaN would still spread. Raises
    CapacityError when there is no memory for it.
    """

    def __init__(
        self,
        num_blocks: int,
        geometry: KvGeometry,
        dtype: torch.dtype,
        device: torch.device,
        layout: str = "HND",
    ) -> None:
        self.geometry = geometry
        shape = (num_blocks, geometry.num_layers, 2, geometry.row_elements)
        try:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            self.computed = self.tensor if layout == "HND" else torch.zeros_like(self.tensor)
        except RuntimeError as error:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks of {geometry.block_size} tokens does not fit into the memory of "
                f"{device}; lower kv_cache_config.max_tokens"
            ) from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A forward over `computed`: it sees what is in `tensor`, which has what was computed when the block is left
        without an error."""
        if self.computed is self.tensor:
            yield
            return
        sizes, rows = self.geometry, pool_view(self.computed, self.geometry)
        inside = (sizes.block_size, sizes.kv_heads, sizes.head_dim)
        registered = self.tensor.view(*self.tensor.shape[:3], *inside).transpose(3, 4)
        rows.copy_(registered)
        yield
        registered.copy_(rows)

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0]

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block's KV of all layers."""
        self.tensor[target].copy_(self.tensor[source])


def pool_blocks(args: LlmArgs, max_seq_len: int, geometry: KvGeometry, dtype: torch.dtype) -> int:
    """Blocks of the pool that `args` asks for.

    `kv_cache_config.max_tokens` is rounded down to whole blocks. Without it the pool holds `max_batch_size` sequences
    of `max_seq_len` tokens, or what fits into DEFAULT_POOL_BYTES (1 GiB) when that is less. Raises CapacityError when
    not even one block results.
    """
    block_size = geometry.block_size
    wanted = args.kv_cache_config.max_tokens
    if wanted is not None:
        if wanted < block_size:
            raise CapacityError(
                f"kv_cache_config.max_tokens {wanted} holds no block of {block_size} tokens; give at least {block_size}"
            )
        return wanted // block_size
    affordable = DEFAULT_POOL_BYTES // (geometry.bytes_per_token(dtype) * block_size)
    if affordable < 1:
        raise CapacityError(
            f"one block of this model needs more than the default pool of {DEFAULT_POOL_BYTES} bytes; "
            "set kv_cache_config.max_tokens"
        )
    return min(args.max_batch_size * geometry.blocks_for(max_seq_len), affordable)
