"""What an engine can take: checked before anything is built or enqueued, each refusal in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semblend_trt.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    import torch

    from engine_wrapper.embedded.block_manager import BlockManager
    from engine_wrapper.embedded.llm_args import LlmArgs
    from engine_wrapper.embedded.request import LlmRequest


def max_seq_len(args: LlmArgs, context: int) -> int:
    """The most tokens of a sequence for a model with `context` positions. Raises ConfigurationError."""
    if args.max_seq_len is not None and args.max_seq_len > context:
        raise ConfigurationError(
            f"max_seq_len {args.max_seq_len} exceeds the model's context of {context} tokens; lower it"
        )
    return args.max_seq_len or context


def check_cache_dtype(asked: str, model_dtype: torch.dtype) -> None:
    """Raises ConfigurationError when the pool would have another dtype than the model."""
    if asked not in ("auto", str(model_dtype).removeprefix("torch.")):
        raise ConfigurationError(
            f"kv_cache_config.dtype {asked} differs from the model's {model_dtype}; use auto or load the model in it"
        )


def check_fits(request: LlmRequest, args: LlmArgs, longest: int, blocks: BlockManager) -> None:
    """Raises CapacityError when the request could not run even on an empty engine."""
    total = request.max_total_tokens
    asked = f"a prompt of {request.prompt_len} tokens with {request.max_new_tokens} new ones"
    if total > longest:
        raise CapacityError(f"{asked} exceeds max_seq_len {longest}; shorten the prompt or lower max_tokens")
    if blocks.blocks_for(total) > blocks.num_blocks:
        raise CapacityError(
            f"{asked} needs {blocks.blocks_for(total)} blocks of {blocks.block_size} tokens, the KV pool has "
            f"{blocks.num_blocks}; raise kv_cache_config.max_tokens"
        )
    if not args.enable_chunked_prefill and request.prompt_len > args.max_num_tokens:
        raise CapacityError(
            f"{asked} exceeds the {args.max_num_tokens} rows of max_num_tokens; raise it or enable chunked prefill"
        )
