"""ForwardBatches of our own, copied from SGLang's running one, and SGLang's own forward over a part of a request.

Facts: SGLang 0.5.23, `srt/model_executor/forward_batch_info.py`, `forward_context.py` beside it, and
`srt/layers/layer_boundary/residual/batch.py` (what goes on beside the hidden rows is kept in the batch)."""

from __future__ import annotations

from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def in_forward(runner: Any, batch: Any) -> Iterator[None]:
    """Run what is inside as SGLang runs a forward of `batch`."""
    with forward_context(ForwardContext(attn_backend=runner.attn_backend), forward_batch=batch), torch.no_grad():
        yield


def rows_batch(batch: Any, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """Return a batch of these rows, int64 [rows], for layers whose attention is ours: it names no slots."""
    own, rows = copy(batch), len(token_ids)
    own.forward_mode, own.batch_size = ForwardMode.EXTEND, 1
    own.input_ids, own.positions = token_ids.to(batch.input_ids.dtype), positions.to(batch.positions.dtype)
    own.extend_num_tokens = own.seq_lens_sum = own.global_num_token_non_padded_cpu = rows
    own.rids = own.residual_stream = own.orig_seq_lens = own.kv_loc_plan = own.kv_loc_cols = own.spec_info = None
    for name in ("global_num_token_non_padded", "num_token_non_padded"):
        if (held := getattr(batch, name, None)) is not None:
            setattr(own, name, torch.full_like(held, rows))
    return own


def range_batch(batch: Any, row: int, token_ids: torch.Tensor, begin: int, slots: torch.Tensor) -> Any:
    """Return a batch of one request, SGLang's in `row`: its tokens from position `begin` on.

    `token_ids`, int64 [tokens]; `slots`, where their KV goes, of the same length."""
    end = begin + len(token_ids)
    own = rows_batch(batch, token_ids, torch.arange(begin, end, device=token_ids.device))

    def one(value: int, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor([value], dtype=like.dtype, device=like.device)

    own.req_pool_indices = batch.req_pool_indices[row : row + 1]
    own.seq_lens, own.seq_lens_cpu = one(end, batch.seq_lens), torch.tensor([end], dtype=torch.int64)
    own.seq_lens_sum = end
    own.out_cache_loc = slots.to(batch.out_cache_loc.dtype)
    own.extend_seq_lens, own.extend_seq_lens_cpu = one(end - begin, batch.extend_seq_lens), [end - begin]
    own.extend_prefix_lens, own.extend_prefix_lens_cpu = one(begin, batch.extend_prefix_lens), [begin]
    if batch.extend_start_loc is not None:
        own.extend_start_loc = one(0, batch.extend_start_loc)
    own.forward_metadata_ready = False
    return own


def stock_rows(runner: Any, batch: Any) -> torch.Tensor:
    """Have SGLang's own decoder compute `batch`, as `range_batch` makes it; return its rows, [tokens, hidden].

    It needs the attention backend's metadata, which SGLang makes again for its own forward after this one."""
    with in_forward(runner, batch):
        runner.attn_backend.init_forward_metadata(batch)
        hidden: torch.Tensor = runner.model.model(batch.input_ids, batch.positions, batch)
    return hidden
