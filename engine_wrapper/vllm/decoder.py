"""vLLM's decoder as planned rows run it: its layers' calls, its caches as one pool, and what its attention needs.

A cache's layout depends on version, backend and processor. So the attention backend writes random tokens into a small
cache, and the layout's views must read them.

Facts: vLLM, the decoders under `model_executor/models/` (0.28 to 0.32), and `transformers_utils/config.py`: it
prefers `params.json` with `consolidated*.safetensors` to `config.json`."""

from __future__ import annotations

import inspect
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.custom_op import CustomOp

from engine_wrapper.kv_scales import head_scales
from engine_wrapper.self_check import compare_rotation
from engine_wrapper.vllm.hooks import (
    attentions_of,
    chunk_of,
    embedding_factor,
    is_latent,
    own_kernels,
    replaced_attention,
    writes_rows,
)
from kernels.layout import LayeredPool, PoolLayer, indexable
from semblend_trt.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from engine_wrapper.kv_scales import Scale
    from engine_wrapper.vllm.adapters import LoadedAdapters
    from kernels.layout import KvGeometry
    from kernels.rope import Rotation
    from semblend_trt.connector.model_facts import ModelFacts

# Hidden rows and their residual, both [rows, hidden].
Rows = tuple["torch.Tensor", "torch.Tensor | None"]
# K and V, or the latent rows alone.
Views = tuple[torch.Tensor, ...]

# Over the layers of Transformers vLLM names an attention by its number alone.
_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.|^(\d+)\.attn$")
_PROBE_BLOCKS = 2


# -- layers ------------------------------------------------------------------------------------------------------------


class LayerCalls:
    """The calls of layers that take `positions`, `hidden_states` and `residual`, all [rows, ...], as in `llama.py`."""

    def __init__(self, model: Any) -> None:
        """`model`: what the runner calls; its `model` is the decoder."""
        self._model, self._decoder = model, model.model
        # Counts layers that rows began and ended, the parts by which ranks compare how far they came.
        self.reached = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one part when it begins, and once more when it ends."""
        self.reached += 1
        yield
        self.reached += 1

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows that enter the lowest layer, [rows, hidden]; Granite's decoder multiplies its embeddings."""
        rows: torch.Tensor = self._model.embed_input_ids(token_ids)
        factor = embedding_factor(self._decoder)
        return rows if factor is None else rows * factor

    def run(self, layer: int, positions: torch.Tensor, rows: Rows) -> Rows:
        """Return the rows after a layer, which may write into `rows`."""
        hidden, residual = self._decoder.layers[layer](positions=positions, hidden_states=rows[0], residual=rows[1])
        return hidden, residual

    def norm(self, rows: Rows) -> torch.Tensor:
        """Apply the final norm; return [rows, hidden]."""
        hidden, residual = rows
        normed: torch.Tensor = self._decoder.norm(hidden) if residual is None else self._decoder.norm(*rows)[0]
        return normed


class _HiddenOnly(LayerCalls):
    """As in `granite.py` and `olmo3.py`."""

    def run(self, layer: int, positions: torch.Tensor, rows: Rows) -> Rows:
        return self._decoder.layers[layer](positions=positions, hidden_states=rows[0]), None


class _OfTransformers(LayerCalls):
    """Layers of Transformers (`transformers/base.py`), [1, rows, ...]; one rotation serves all layers of the rows."""

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
            attention_instances=attentions_of(self._model),
        )
        return found[0], None


# By the names of a layer's required and optional arguments.
_KINDS: tuple[tuple[set[str], type[LayerCalls]], ...] = (
    ({"positions", "hidden_states", "residual"}, LayerCalls),
    ({"positions", "hidden_states"}, _HiddenOnly),
    ({"hidden_states", "position_embeddings", "position_ids", "attention_mask", "use_cache"}, _OfTransformers),
)


def layer_calls_of(model: Any) -> LayerCalls:
    """Return the calls for the model that the runner calls. Raises LayoutError `layer_call` for unknown ones."""
    parameters = inspect.signature(model.model.layers[0].forward).parameters.values()
    named = {each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    required = {each.name for each in parameters if each.name in named and each.default is each.empty}
    for wanted, kind in _KINDS:
        if required <= wanted <= named:
            return kind(model)
    raise LayoutError("layer_call", f"a layer takes {', '.join(sorted(named))}, which is not known here")


# -- caches ------------------------------------------------------------------------------------------------------------


def in_order(caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the caches, lowest layer first; none if they do not count layers from 0 without a gap."""
    found = {int(match[1] or match[2]): name for name in caches if (match := _INDEX.search(name))}
    return {found[at]: caches[found[at]] for at in sorted(found)} if {*found} == {*range(len(caches))} else {}


@dataclass(frozen=True, slots=True, eq=False)
class CacheLayout:
    """Where a cache holds K and V, or latent rows (MLA). `shape`: kv_heads, block_size, head_dim. `dtype`: that of the
    stored numbers; vLLM's own tensor of e4m3 has bytes."""

    view: Callable[[torch.Tensor], Views]
    shape: tuple[int, int, int]
    dtype: torch.dtype

    def views(self, cache: torch.Tensor) -> Views | None:
        """Return K and V, or latent rows, each [blocks, kv_heads, block_size, head_dim]; None for another form."""
        cache = cache.unsqueeze(1) if cache.ndim == 3 else cache  # latent rows before vLLM 0.32
        kv_heads, block_size, channels = self.shape
        wanted = kv_heads, block_size, channels * (1 if self.view is _latent else 2)
        if cache.shape[1:] != wanted or (self.view in (_halves, _transposed_keys) and not cache.is_contiguous()):
            return None
        return self.view(cache.view(self.dtype))

    def stored(self, attention: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None) -> Views:
        """Return rows, as `write` takes them, as the backend stores them, each in `dtype`. It writes them one after the
        other into a small cache of their own, in which the last ones come first."""
        slots, blocks = torch.arange(len(keys) - 1, -1, -1, device=cache.device), -(-len(keys) // self.shape[1])
        small = torch.zeros_like(cache[:blocks], memory_format=torch.preserve_format)
        write(attention, small, keys, values, slots)
        read = self.views(small)
        assert read is not None
        return tuple(indexable(each).transpose(1, 2).flatten(0, 1)[slots].view(self.dtype) for each in read)


def write(
    attention: Any, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """Have the backend write rows, [rows, kv_heads, head_dim], into `cache` at `slots`, int64 [rows]. Without values
    `keys` are latent rows (MLA), which it takes in two parts: channels free of position, and those that turn."""
    update = attention.impl.do_kv_cache_update
    if values is not None:
        update(attention, keys, values, cache, slots)
        return
    parts = keys.flatten(1).split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=1)
    latent, turning = (each.contiguous() for each in parts)
    # Kernels take the cache without the head that vLLM 0.32 gives it.
    rows = cache.squeeze(1) if cache.ndim == 4 else cache
    update(latent, turning.unsqueeze(1), rows, slots, attention.kv_cache_dtype, attention._k_scale)


def fresh_rows(kv: Sequence[torch.Tensor], geometry: KvGeometry) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return K and V, [rows, kv_heads, head_dim], from an attention's arguments after the queries; latent rows as K."""
    if geometry.kv_factor == 2:
        keys, values = (each.view(-1, geometry.kv_heads, geometry.head_dim) for each in kv)
        return keys, values
    latent, turning, *_ = kv
    return torch.cat([latent, turning.flatten(1)], dim=1).unsqueeze(1), None


def layout_of(
    cache: torch.Tensor,
    attention: Any,
    shape: tuple[int, int, int],
    rows: torch.dtype | None = None,
    scales: tuple[Scale, Scale] | None = None,
) -> CacheLayout | None:
    """Return the layout of `cache`, of `shape` (kv_heads, block_size, head_dim); None if it is not known. With `scales`
    of K and V the backend stores rows of dtype `rows` in e4m3, latent ones by that of K."""
    if not writes_rows(attention):
        return None
    kv_heads, block_size, head_dim = shape
    dtype, tokens = cache.dtype if scales is None else torch.float8_e4m3fn, _PROBE_BLOCKS * block_size
    # In e4m3 a little more than what is stored without rounding: vLLM's CPU backend (0.28) rounds towards 0.
    more = 1.0 if dtype != torch.float8_e4m3fn else 1 + 2**-6
    factors = head_scales(scales or (1.0, 1.0), kv_heads)[..., None] * more
    for view in (_latent,) if is_latent(attention) else _LAYOUTS:
        layout = CacheLayout(view, shape, dtype)
        if (views := layout.views(cache)) is None:
            continue
        generator = torch.Generator().manual_seed(0)
        wanted = [torch.randn(tokens, kv_heads, head_dim, generator=generator).to(dtype).float() for _ in views]
        given = ((each * own).to(cache.device, rows or cache.dtype) for each, own in zip(wanted, factors, strict=False))
        found = layout.stored(attention, cache, next(given), next(given, None))
        if all(torch.equal(each.float().cpu(), own) for each, own in zip(found, wanted, strict=True)):
            return layout
    return None


def layered_pool(caches: Sequence[torch.Tensor], layout: CacheLayout) -> LayeredPool | None:
    """Return the caches, lowest layer first, as a pool; None if one has another form."""
    kinds = [views for cache in caches if (views := layout.views(cache)) is not None]
    return LayeredPool(*zip(*kinds, strict=True)) if len(kinds) == len(caches) else None


def _latent(cache: torch.Tensor) -> Views:
    """One row that is K and V (MLA)."""
    return (cache,)


def _channels(cache: torch.Tensor) -> Views:
    """K and V of a token side by side."""
    return cache.chunk(2, dim=-1)


def _halves(cache: torch.Tensor) -> Views:
    """K of all tokens of a block, then V; the cache is contiguous."""
    blocks, kv_heads, block_size, both = cache.shape
    return cache.view(blocks, kv_heads, 2 * block_size, both // 2).chunk(2, dim=2)


def _transposed_keys(cache: torch.Tensor) -> Views:
    """As `_halves`, with the tokens of K side by side."""
    keys, values = _halves(cache)
    return keys.as_strided(keys.shape, (*keys.stride()[:2], 1, keys.shape[2])), values


_LAYOUTS = (_channels, _halves, _transposed_keys)
# A step asks for it in every layer.
_of_one_layer: Callable[[KvGeometry], KvGeometry] = cache(partial(replace, num_layers=1))


# -- the decoder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoder:
    """What planned rows need of vLLM's decoder and of its attention.

    `chunks`: tokens of each layer's chunk, or None. `head_scales`: by layer, float32 [K and V, kv_heads], if heads have
    their own. `builder` makes the backend's metadata (`own_builder`). `rotation`: how keys move by the model's
    configuration. `longest`: tokens of the longest sequence. `unfused`: what vLLM leaves to its compiler. `adapters`:
    LoRA's, or None."""

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
    adapters: LoadedAdapters | None = None

    def cache(self, layer: int) -> PoolLayer:
        """Return the cache of one layer."""
        return PoolLayer(self.pool.layers(layer, layer + 1), 0, _of_one_layer(self.geometry))

    def stored(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and V, [rows, kv_heads, head_dim], or latent rows and None, as the cache would hold them. In e4m3
        the backend itself rounds them, so that a donor's own row does not deviate."""
        if keys.dtype == self.pool.dtype:
            return keys, values
        stored, *rest = self.layout.stored(self.attention[layer], self.caches[layer], keys, values)
        return stored, rest[0] if rest else None


def unfused_of(decoder: torch.nn.Module) -> tuple[CustomOp, ...]:
    """Return modules with a card's kernel that run as plain torch if vLLM compiles, some in a graph of their own."""
    found = (each for each in decoder.modules() if isinstance(each, CustomOp))
    return tuple(each for each in found if each._forward_method not in (each.forward_cuda, each.forward_hip))


class _TakenError(Exception):
    """Leaves a layer with what was made of its K and V."""


def take_fresh(
    parts: Decoder,
    layer: int,
    positions: torch.Tensor,
    rows: Rows,
    take: Callable[[torch.Tensor, torch.Tensor | None], Any],
) -> Any:
    """Run a layer up to its attention; return what `take` makes of K and V of all rows, each [rows, kv_heads,
    head_dim], or of latent rows and None. The layer may write into `rows`. Raises LayoutError `model_call`."""

    def leave(_: torch.Tensor, *kv: torch.Tensor, **__: Any) -> None:
        raise _TakenError(take(*fresh_rows(kv, parts.geometry)))

    try:
        with replaced_attention(parts.attention[layer], leave):
            parts.calls.run(layer, positions, rows)
    except _TakenError as taken:
        return taken.args[0]
    raise LayoutError("model_call", f"layer {layer} has not called its attention")


def check_rotation(parts: Decoder, token_ids: torch.Tensor) -> None:
    """Do as `self_check.compare_rotation` for the decoder, int64 [tokens]."""

    def keys_of(layer: int, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        if parts.adapters is not None:
            parts.adapters.map_none(len(ids))
        return take_fresh(parts, layer, positions, (parts.calls.embed(ids), None), lambda keys, _: keys)

    with own_kernels(parts.unfused):
        compare_rotation(token_ids, parts.longest, parts.rotation, parts.geometry.num_layers, keys_of)


def compare_windows(attention: Sequence[Any], facts: ModelFacts, longest: int) -> None:
    """Raise LayoutError for layers that, of `longest` tokens, see others than the configuration says. A window over the
    whole sequence hides nothing."""
    longest = max(longest, facts.max_positions)
    windows, chunks = [each.sliding_window for each in attention], list(map(chunk_of, attention))
    for what, found, wanted in (("windows", windows, facts.windows), ("chunks", chunks, facts.chunks)):
        shown = [None if each is None or each >= longest else each for each in found]
        if shown != list(wanted):
            raise LayoutError("sliding_window", f"layers have {what} {shown}, and the model {list(wanted)}")
