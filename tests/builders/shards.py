"""A rank's part of a small dense model, as tensor parallelism divides it (Megatron-LM, arXiv 1909.08053, section 3)."""

from torch import nn


class SharedLinear(nn.Linear):
    """This rank's part of a linear layer's inputs. The ranks add up their results; rank 0 alone adds the bias."""

    def __init__(self, linear, ranks):
        nn.Module.__init__(self)
        self.weight = _part(linear.weight, 1, ranks)
        self.bias = linear.bias if ranks.rank == 0 else None
        self.ranks = ranks

    def forward(self, rows):
        return self.ranks.total(super().forward(rows))


def keep_shard(model, ranks):
    """Cuts `model` to this rank's heads and channels, and its configuration to their numbers."""
    if ranks.size == 1:
        return
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight = _part(linear.weight, 0, ranks)
            linear.bias = None if linear.bias is None else _part(linear.bias, 0, ranks)
            linear.out_features //= ranks.size
        attention.o_proj, mlp.down_proj = (SharedLinear(each, ranks) for each in (attention.o_proj, mlp.down_proj))
    config = model.config
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.num_attention_heads //= ranks.size
    config.num_key_value_heads //= ranks.size


def _part(weight, dimension, ranks):
    return nn.Parameter(weight.chunk(ranks.size, dimension)[ranks.rank].clone(), requires_grad=False)
