"""PoolFacts: the engine's pool of KV as the worker found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.layout import KvGeometry


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The registered pool as the worker found it: `num_blocks` blocks of this geometry and dtype. `scales`: a digest of
    those that `needs_scales` asks for. `chunk`: the tokens of a chunk where some layers attend to no others.
    `holds_saved_blocks`: a request that is being saved keeps its own blocks until its save has ended."""

    geometry: KvGeometry
    num_blocks: int
    dtype: torch.dtype
    scales: str | None = None
    chunk: int | None = None
    holds_saved_blocks: bool = False
