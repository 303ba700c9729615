"""Does the wrapper compute what the plain model computes? Without a plan, and with every layer computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.layer_schedule import SequenceSlice
from kernels.layout import KvGeometry
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import (
    AttentionMode,
    EngineExecution,
    PlanKind,
    PlanSpan,
    PublicationPolicy,
    SemanticKvPlan,
)
from semblend_trt.runtime import EngineMode
from semblend_trt.token_ids import TokenIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.model_runner import ModelRunner

_BLOCK_SIZE = 32
# Rows of float32 logits over a large vocabulary are big; this many are enough to meet every position of a block.
MAX_TOKENS = 512
# Two chunks, and a span with a token before and behind it.
MIN_TOKENS = 4


def max_logit_difference(runner: ModelRunner, token_ids: Sequence[int]) -> float:
    """Largest absolute difference between the logits of the wrapper and of the plain Hugging Face forward.

    Measured on the first MAX_TOKENS of `token_ids`: all rows without a plan, at once and in two chunks, and the rows
    behind a span of garbage donor KV under a plan whose boundary is the number of layers, so that nothing of the
    garbage may be read.
    Raises ConfigurationError for fewer than MIN_TOKENS.
    """
    tokens = [int(token) for token in token_ids[:MAX_TOKENS]]
    if len(tokens) < MIN_TOKENS:
        raise ConfigurationError(
            f"The longest prompt has {len(tokens)} tokens; the wrapper is compared with the plain model on at least "
            f"{MIN_TOKENS}, so bring a longer one."
        )
    geometry = _geometry(runner)
    plain = _plain_logits(runner.model, tokens)  # [tokens, vocab]
    blocks = -(-len(tokens) // geometry.block_size)
    shape = (blocks, geometry.num_layers, 2, geometry.row_elements)
    # Whatever is read without having been written shows: NaN without a plan, large values under one.
    pool = torch.full(shape, float("nan"), dtype=runner.dtype, device=runner.device)
    wrapped = runner.share()
    wrapped.attach_pool(pool, geometry)
    block_ids = tuple(range(blocks))
    [without_plan] = wrapped.forward([SequenceSlice(0, 0, tuple(tokens), block_ids)], all_rows=True)
    pool.fill_(float("nan"))
    cut = len(tokens) // 3
    chunks = [
        wrapped.forward([SequenceSlice(0, begin, tuple(tokens[begin:end]), block_ids)], all_rows=True)[0]
        for begin, end in ((0, cut), (cut, len(tokens)))
    ]
    pool.fill_(100.0)
    plan = _recompute_everything(tokens, geometry, block_ids)
    begin = plan.prefix_end
    [recomputed] = wrapped.forward([SequenceSlice(0, begin, tuple(tokens[begin:]), block_ids, plan)], all_rows=True)
    differences = (without_plan - plain, torch.cat(chunks) - plain, recomputed - plain[begin:])
    return max(float(difference.abs().nan_to_num(float("inf")).max()) for difference in differences)


@torch.inference_mode()
def _plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        ids = torch.tensor([tokens], device=model.device)
        logits: torch.Tensor = model(ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)
    return logits


def _geometry(runner: ModelRunner) -> KvGeometry:
    facts = runner.facts
    return KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, _BLOCK_SIZE)


def _recompute_everything(tokens: list[int], geometry: KvGeometry, block_ids: tuple[int, ...]) -> SemanticKvPlan:
    prefix_end = 3 * len(tokens) // 4
    span = PlanSpan("garbage", donor_start=0, target_start=prefix_end // 2, length=prefix_end - prefix_end // 2)
    execution = EngineExecution(
        mode=EngineMode.WRAPPER,
        attention=AttentionMode.HOLES_AND_SUFFIX,
        num_layers=geometry.num_layers,
        suffix_start=prefix_end,
        recompute_boundary_layer=geometry.num_layers,
    )
    return SemanticKvPlan(
        request_id=0,
        namespace_key="exactness",
        kind=PlanKind.REQUEST_LOCAL_SEGMENTED,
        publication=PublicationPolicy.REQUEST_LOCAL,
        spans=(span,),
        prompt_token_ids=TokenIds(tokens),
        num_computed_tokens=0,
        matched_tokens=prefix_end,
        block_size=geometry.block_size,
        execution=execution,
        target_block_ids=block_ids,
    )
