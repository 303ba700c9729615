"""Inputs of the sparse_prefill benchmark, the check of its outputs, and torch's attention on the same inputs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.benchmarks.ceilings import time_ms
from kernels.layout import KvGeometry, pool_view
from kernels.sparse_prefill import SequenceRows
from kernels.sparse_prefill.triton_attention import sparse_prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.sparse_prefill.tiles import TileConfig

HEADS = 28
GEOMETRY = KvGeometry(num_layers=28, kv_heads=4, head_dim=128, block_size=32)
LAYER = 14
MAX_ERROR = 1e-2


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one or more sequences of random KV in a pool, on the card."""

    q: torch.Tensor
    pool: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    geometry: KvGeometry

    @property
    def scale(self) -> float:
        return float(self.geometry.head_dim**-0.5)

    @property
    def layer(self) -> int:
        return LAYER % self.geometry.num_layers

    @property
    def attended(self) -> int:
        """Pairs of a row and a token that it attends to, of one head."""
        return sum(int(sequence.host_positions.sum()) + sequence.count for sequence in self.sequences)

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products, of all heads."""
        return 4.0 * self.attended * self.q.shape[1] * self.geometry.head_dim

    def run(self, config: TileConfig | None = None, piece: int | None = None) -> torch.Tensor:
        """One launch, by the default tile and piece or by those given."""
        return sparse_prefill(self.q, self.pool, self.layer, self.sequences, self.geometry, self.scale, config, piece)

    def check(self, output: torch.Tensor) -> float:
        """Relative error of some rows of each sequence against float64 attention; ends the program if it is large."""
        worst = 0.0
        for sequence in self.sequences:
            own = torch.linspace(0, sequence.count - 1, min(sequence.count, 16)).long()
            # keys, values: [kv_heads, tokens, head_dim]
            keys, values = self.dense_kv(sequence).double()
            rows = (sequence.first_row + own).to(self.q.device)
            group = self.q.shape[1] // self.geometry.kv_heads
            queries = self.q[rows].double().unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
            positions = sequence.host_positions[own].to(self.q.device).repeat(group)
            beyond = torch.arange(keys.shape[1], device=keys.device) > positions[:, None]
            scores = (queries @ keys.transpose(1, 2) * self.scale).masked_fill(beyond, -torch.inf)
            expected = (scores.softmax(-1) @ values).unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
            worst = max(worst, float((output[rows].double() - expected).norm() / expected.norm()))
        if not worst <= MAX_ERROR:
            sys.exit(f"sparse_prefill is wrong: relative error {worst:g}, above {MAX_ERROR:g}")
        return worst

    def dense_kv(self, sequence: SequenceRows) -> torch.Tensor:
        """[2, kv_heads, tokens, head_dim] of one sequence, gathered."""
        blocks = pool_view(self.pool, self.geometry)[sequence.block_ids, self.layer]
        return blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : sequence.last_position + 1]


def make_case(positions: Sequence[torch.Tensor], geometry: KvGeometry = GEOMETRY, heads: int = HEADS) -> Case:
    """A case with the given positions of each sequence, in blocks of its own, shuffled."""
    generator = torch.Generator().manual_seed(7)
    needed = [geometry.blocks_for(int(own[-1]) + 1) for own in positions]
    blocks = torch.randperm(sum(needed), generator=generator).split(needed)
    pool = torch.randn(
        (sum(needed), geometry.num_layers, 2, geometry.row_elements), device="cuda", dtype=torch.bfloat16
    )
    sequences, rows = [], 0
    for own, ids in zip(positions, blocks, strict=True):
        sequences.append(SequenceRows(rows, own, ids).to("cuda"))
        rows += len(own)
    q = torch.randn(rows, heads, geometry.head_dim, device="cuda", dtype=torch.bfloat16)
    return Case(q, pool, tuple(sequences), geometry)


def random_rows(tokens: int, percent: int) -> torch.Tensor:
    """Sorted positions of `percent` per cent of `tokens`, the last token always among them."""
    chosen = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(percent))
    return torch.cat((chosen[: tokens * percent // 100 - 1].sort().values, torch.tensor([tokens - 1])))


def sdpa_ms(case: Case, backend: SDPBackend = SDPBackend.FLASH_ATTENTION) -> float:
    """Milliseconds of torch's causal attention on the same queries, K and V, gathered beforehand."""
    # keys, values: [1, kv_heads, tokens, head_dim]
    keys, values = (kind[None].contiguous() for kind in case.dense_kv(case.sequences[0]))
    queries = case.q.transpose(0, 1)[None].contiguous()
    causal = queries.shape[2] > 1

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                queries, keys, values, is_causal=causal, scale=case.scale, enable_gqa=True
            )

    return time_ms(attend, repeats=10)
