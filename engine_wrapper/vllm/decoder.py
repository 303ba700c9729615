"""vLLM's decoder as our rows run it: how its layers are called one by one, and what its attention needs.

How a layer is called is read once from the signature of its `forward`. Most layers take and give hidden rows and what
is still to be added to them (`llama.py`), some hidden rows alone (`granite.py`, `olmo3.py`). Models that vLLM has no
layers for run those of Transformers (`transformers/base.py`), whose rows have a first dimension of 1.

vLLM may rotate keys by another file than the one that is read here, or by its own reading of it. A wrong rotation shows
in no prompt that keeps its place. So every layer computes the K of a few rows at two places, of which one has to be the
other one moved.

Facts: vLLM, the decoders under `model_executor/models/` (0.25.1 to 0.32), and `transformers_utils/config.py`: of a
folder with `params.json` and `consolidated*.safetensors` it reads the former rather than `config.json`.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.custom_op import CustomOp

from engine_wrapper.self_check import LayoutError, difference
from engine_wrapper.vllm.hooks import own_kernels, replaced_attention
from engine_wrapper.vllm.layers import fresh_rows, write
from kernels.layout import PoolLayer
from kernels.rope import rotate_keys
from kernels.sparse_prefill import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_wrapper.vllm.layers import CacheLayout
    from kernels.layout import KvGeometry, LayeredPool
    from kernels.rope import Rotation
    from kernels.sparse_prefill import SequenceRows
    from semblend_trt.connector.model_facts import ModelFacts

_ROWS = 16
# From about there on engines lose what is behind the point of a position times a frequency, in float32.
_FARTHEST = 1 << 15


# Hidden rows and what is still to be added to them, both [rows, hidden].
Rows = tuple["torch.Tensor", "torch.Tensor | None"]


class LayerCalls:
    """The calls of a decoder whose layers take `positions`, `hidden_states` and `residual`, all [rows, ...]."""

    def __init__(self, model: Any) -> None:
        """`model`: the one that the runner calls, whose `model` is the decoder."""
        self._model, self._decoder = model, model.model

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows that enter the lowest layer, [rows, hidden]; Granite's decoder multiplies its embeddings."""
        rows: torch.Tensor = self._model.embed_input_ids(token_ids)
        factor = getattr(getattr(self._decoder, "config", None), "embedding_multiplier", None)
        return rows if factor is None else rows * factor

    def run(self, layer: int, positions: torch.Tensor, rows: Rows) -> Rows:
        """The rows behind a layer; it may write into what it is given."""
        hidden, residual = self._decoder.layers[layer](positions=positions, hidden_states=rows[0], residual=rows[1])
        return hidden, residual

    def norm(self, rows: Rows) -> torch.Tensor:
        """The final norm, [rows, hidden]."""
        normed: torch.Tensor = self._decoder.norm(*rows)[0]
        return normed


class _HiddenOnly(LayerCalls):
    """Layers that take `positions` and `hidden_states`, and give hidden rows."""

    def run(self, layer: int, positions: torch.Tensor, rows: Rows) -> Rows:
        return self._decoder.layers[layer](positions=positions, hidden_states=rows[0]), None

    def norm(self, rows: Rows) -> torch.Tensor:
        normed: torch.Tensor = self._decoder.norm(rows[0])
        return normed


class _OfTransformers(_HiddenOnly):
    """Layers of Transformers over vLLM's attention; one rotation serves all layers that the same rows pass."""

    _positions: torch.Tensor | None = None
    _rotation: Any = None

    def run(self, layer: int, positions: torch.Tensor, rows: Rows) -> Rows:
        if positions is not self._positions:
            self._positions, self._rotation = positions, self._decoder.rotary_emb(rows[0][None], positions[None])
        found = self._decoder.layers[layer](
            rows[0][None],
            attention_mask=None,
            position_ids=positions[None],
            use_cache=False,
            position_embeddings=self._rotation,
            attention_instances=self._model.attention_instances,
        )
        return found[0], None


# By the names of what a layer has to be given, or may be.
_KINDS: tuple[tuple[set[str], type[LayerCalls]], ...] = (
    ({"positions", "hidden_states", "residual"}, LayerCalls),
    ({"positions", "hidden_states"}, _HiddenOnly),
    ({"hidden_states", "position_embeddings", "position_ids", "attention_mask", "use_cache"}, _OfTransformers),
)


def layer_calls_of(model: Any) -> LayerCalls:
    """The calls of the layers of `model`, the one that the runner calls.

    Raises LayoutError `layer_call` for a layer that takes something else, or less.
    """
    parameters = inspect.signature(model.model.layers[0].forward).parameters.values()
    named = {each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    required = {each.name for each in parameters if each.name in named and each.default is each.empty}
    for wanted, kind in _KINDS:
        if required <= wanted <= named:
            return kind(model)
    raise LayoutError("layer_call", f"a layer takes {', '.join(sorted(named))}, which is not known here")


@dataclass(frozen=True, slots=True)
class Decoder:
    """What our rows need of vLLM's decoder and of its attention.

    Of each layer: the cache's name, the attention module, the cache itself, and in `chunks` the tokens of a chunk if
    its attention has chunks, else None. `layout` is that of the caches, which are one `pool` together. `builder` makes
    the backend's metadata (`own_builder`). `rotation` is how keys move, as the model's configuration says; `longest`
    the tokens of the longest sequence. `head_scales`: of each layer, where heads have their own, float32 [K and V,
    kv_heads]. `unfused`: modules that vLLM leaves to its compiler (`unfused_of`).
    """

    calls: LayerCalls
    names: tuple[str, ...]
    attention: tuple[Any, ...]
    caches: tuple[torch.Tensor, ...]
    layout: CacheLayout
    builder: Any
    pool: LayeredPool
    geometry: KvGeometry
    chunks: tuple[int | None, ...]
    rotation: Rotation
    longest: int
    head_scales: tuple[torch.Tensor, ...] = ()
    unfused: tuple[CustomOp, ...] = ()

    def cache(self, layer: int) -> PoolLayer:
        """The cache of one layer."""
        return PoolLayer(self.pool.layers(layer, layer + 1), 0, replace(self.geometry, num_layers=1))

    def stored(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of K and V, [rows, kv_heads, head_dim], or latent rows and None, as the cache would hold them: in e4m3
        the backend itself has rounded them, so that the same row of a donor does not deviate at all."""
        if keys.dtype == self.pool.dtype:
            return keys, values
        stored, *rest = self.layout.stored(self.attention[layer], self.caches[layer], keys, values)
        return stored, rest[0] if rest else None

    def write(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        sequences: tuple[SequenceRows, ...],
        slots: torch.Tensor,
    ) -> None:
        """Writes rows of K and V, or latent rows, into the cache; `slots` are those of the sequences' rows."""
        if keys.dtype == self.pool.dtype:
            write_rows(keys, values, self.cache(layer), sequences)
            return
        write(self.attention[layer], self.caches[layer], keys, values, slots)


def unfused_of(decoder: torch.nn.Module) -> tuple[CustomOp, ...]:
    """The modules that run as plain torch where vLLM compiles, some in a graph of their own, and have a kernel of its
    own for a card."""
    found = (each for each in decoder.modules() if isinstance(each, CustomOp))
    return tuple(each for each in found if each._forward_method not in (each.forward_cuda, each.forward_hip))


class _TakenError(Exception):
    """Leaves a layer whose K and V have been taken."""


def take_fresh(
    parts: Decoder,
    layer: int,
    positions: torch.Tensor,
    rows: Rows,
    take: Callable[[torch.Tensor, torch.Tensor | None], Any],
) -> Any:
    """Runs a layer up to its attention; returns what `take` makes of K and V of all rows, each [rows, kv_heads,
    head_dim], V None where a row is both. The layer may write into `rows`. Raises LayoutError `model_call`."""
    found = list[Any]()

    def leave(_: torch.Tensor, *kv: torch.Tensor, **__: Any) -> None:
        found.append(take(*fresh_rows(kv, parts.geometry)))
        raise _TakenError

    with suppress(_TakenError), replaced_attention(parts.attention[layer], leave):
        parts.calls.run(layer, positions, rows)
    if found:
        return found[0]
    raise LayoutError("model_call", f"layer {layer} has not called its attention")


def check_rotation(parts: Decoder, token_ids: torch.Tensor) -> None:
    """Moves K of the first rows, int64 [tokens], as far as the longest sequence reaches, in every layer.

    Raises LayoutError `rope_unknown` for the first layer that has another K there itself.
    """
    ids = token_ids[:_ROWS]
    shift = min(parts.longest, _FARTHEST) - len(ids)
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


def compare_windows(attention: Sequence[Any], facts: ModelFacts, longest: int) -> None:
    """Raises LayoutError for layers that see other tokens of a sequence of `longest` tokens than the model's
    configuration says; what reaches over all of it hides nothing."""
    longest = max(longest, facts.max_positions)
    told = {"windows": ("sliding_window", facts.windows), "chunks": ("attention_chunk_size", facts.chunks)}
    for what, (name, wanted) in told.items():
        found = [getattr(each, name, None) for each in attention]
        shown = [None if each is None or each >= longest else each for each in found]
        if shown != list(wanted):
            raise LayoutError("sliding_window", f"layers have {what} {shown}, and the model {list(wanted)}")
