"""Proves on the engine's own first prompt that plans can be executed there, before any plan is made.

What the engine has just computed for a cold prompt is computed again by our rows, over memory of their own: once whole,
and by a plan whose span is that very KV, in one forward and in several. Hidden rows and KV have to agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.batch import Batch
from engine_wrapper.self_check import MAX_TOKENS, MIN_TOKENS, LayoutError, check_plan, difference
from kernels.layout import pool_view

if TYPE_CHECKING:
    from engine_wrapper.trtllm.planned_decoder import PlannedDecoder


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`decoder` is the engine's, over its pool."""

    decoder: PlannedDecoder

    def fits(self, batch: Batch) -> bool:
        """Whether the first sequence of the batch is a prompt that was computed from position 0, and long enough."""
        return batch.contexts > 0 and batch.begins[0] == 0 and batch.lengths[0] >= MIN_TOKENS

    def run(self, batch: Batch, options: dict[str, Any], hidden: torch.Tensor, block_ids: list[int]) -> None:
        """`hidden`: what the engine computed for the batch, [tokens, hidden], in the request's `block_ids`.

        Raises LayoutError `self_check` with what differs, on every rank when it does on one.
        """
        tokens = min(batch.lengths[0], MAX_TOKENS)
        positions = options["position_ids"].flatten()[:tokens]
        if not torch.equal(positions, torch.arange(tokens, dtype=positions.dtype, device=positions.device)):
            raise LayoutError("self_check", "the engine counts positions in another way")
        pool, geometry = self.decoder.pool, self.decoder.geometry
        blocks = list(range(geometry.blocks_for(tokens)))
        scratch = replace(self.decoder, pool=pool.new_zeros(len(blocks), *pool.shape[1:]))
        ids, engine_rows = batch.input_ids[:tokens], hidden[:tokens]
        whole = scratch.run(Batch((0,), (0,), (tokens,), 1, ids), {}, [blocks], options)
        found = [difference("hidden rows", whole, engine_rows)]
        for layer in range(geometry.num_layers):
            theirs = self._kv(pool, block_ids[: len(blocks)], layer, tokens)
            ours = self._kv(scratch.pool, blocks, layer, tokens)
            found.append(difference(f"KV of layer {layer}", ours, theirs))
        self._judge(found)
        plan = check_plan(ids.tolist(), geometry)
        rest = Batch((0,), (plan.prefix_end,), (tokens - plan.prefix_end,), 1, ids[plan.prefix_end :])
        wanted = engine_rows[plan.prefix_end :]
        for max_rows in (None, tokens // 4):  # the span has twice as many
            planned = scratch.run(rest, {0: plan}, [blocks], options, max_rows)
            self._judge([difference("hidden rows of a plan", planned, wanted)])

    def _judge(self, found: list[str | None]) -> None:
        """Raises the first difference of any rank: one that went on alone would wait for the others."""
        own = next((each for each in found if each is not None), None)
        problem = next((each for each in self.decoder.ranks.gather(own) if each is not None), None)
        if problem is not None:
            raise LayoutError("self_check", problem)

    def _kv(self, pool: torch.Tensor, block_ids: list[int], layer: int, tokens: int) -> torch.Tensor:
        """K and V, [2, kv_heads, tokens, head_dim]."""
        chosen = pool_view(pool, self.decoder.geometry)[block_ids, layer]
        return chosen.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
