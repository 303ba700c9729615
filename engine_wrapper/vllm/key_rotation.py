"""Whether keys turn with their positions as the model's configuration says.

vLLM may rotate by another file than the one that is read here, or by its own reading of it. A wrong rotation shows in
no prompt that keeps its place, so every layer computes the K of a few rows at two places, of which one has to be the
other one moved.

Facts: vLLM, `transformers_utils/config.py`: of a folder with `params.json` and `consolidated*.safetensors` it reads the
former rather than `config.json`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_wrapper.self_check import LayoutError, difference
from engine_wrapper.vllm.rows import own_kernels, take_fresh
from kernels.rope import rotate_keys

if TYPE_CHECKING:
    from engine_wrapper.vllm.rows import Decoder

ROWS = 16
# From about there on engines lose what is behind the point of a position times a frequency, in float32.
FARTHEST = 1 << 15


def check_rotation(parts: Decoder, token_ids: torch.Tensor) -> None:
    """Moves K of the first rows, int64 [tokens], as far as the longest sequence reaches, in every layer.

    Raises LayoutError `rope_unknown` for the first layer that has another K there itself.
    """
    ids = token_ids[:ROWS]
    shift = min(parts.longest, FARTHEST) - len(ids)
    here = torch.arange(len(ids), device=ids.device)
    positions, hidden = torch.cat([here, here + shift]), parts.calls.embed(torch.cat([ids, ids]))
    with own_kernels(parts.unfused):
        for layer in range(parts.geometry.num_layers):
            keys = take_fresh(parts, layer, positions, (hidden.clone(), None), lambda keys, _: keys)
            before, after = keys.chunk(2)
            moved = rotate_keys(before, shift, parts.rotation.of_layer(layer))
            what = f"keys that turn as the model's configuration says, by {shift} positions in layer {layer},"
            if (problem := difference(what, moved, after, keys.dtype)) is not None:
                raise LayoutError("rope_unknown", problem)
