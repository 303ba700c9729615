"""How a decoder's layers are called one by one, read once from the signature of their `forward`.

Facts: vLLM, the decoders under `model_executor/models/` (0.25.1 to 0.32). Most layers take and give hidden rows and
what is still to be added to them (`llama.py`), some hidden rows alone (`granite.py`, `olmo3.py`). Models that vLLM has
no layers for run those of Transformers (`transformers/base.py`), whose rows have a first dimension of 1.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from engine_wrapper.self_check import LayoutError

if TYPE_CHECKING:
    import torch

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
