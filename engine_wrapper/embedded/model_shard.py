"""One rank's part of a decoder: some of the query and KV heads, and some of each MLP's channels.

As Megatron-LM splits a layer (arXiv 1909.08053, section 3): projections into heads and channels by their outputs, the
projections out of them by their inputs, whose results are added up. Embeddings, norms and the head are on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from engine_wrapper.shared_linear import SharedLinear
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from semblend_trt.ranks import Ranks


def keep_shard(model: Any, ranks: Ranks) -> None:
    """Leaves this rank's part of the layers in `model`, and the part's sizes in its configuration.

    Raises ConfigurationError when the ranks do not divide KV heads or channels; nothing is changed then.
    """
    if ranks.size == 1:
        return
    config = model.config
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % ranks.size:
            raise ConfigurationError(
                f"the model's {name} is {getattr(config, name)}, which {ranks.size} ranks do not divide; use fewer"
            )
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _keep_outputs(linear, ranks)
        attention.o_proj = _shared(attention.o_proj, ranks)
        mlp.down_proj = _shared(mlp.down_proj, ranks)
    config.num_attention_heads //= ranks.size
    config.num_key_value_heads //= ranks.size


def _keep_outputs(linear: nn.Linear, ranks: Ranks) -> None:
    kept = _part(linear.out_features, ranks)
    linear.weight = nn.Parameter(linear.weight[kept].clone(), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[kept].clone(), requires_grad=False)
    linear.out_features //= ranks.size


def _shared(linear: nn.Linear, ranks: Ranks) -> SharedLinear:
    return SharedLinear(linear, _part(linear.in_features, ranks), ranks)


def _part(count: int, ranks: Ranks) -> slice:
    """This rank's share of `count` heads' or MLP channels, one run of them."""
    share = count // ranks.size
    return slice(ranks.rank * share, (ranks.rank + 1) * share)
