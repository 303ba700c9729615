"""The places in a TensorRT-LLM decoder at which planned rows are met, and their restoration.

Facts: NVIDIA/TensorRT-LLM, `_torch/models/modeling_qwen.py` and `modeling_llama.py`: a decoder calls its layers with
`position_ids`, `hidden_states`, `attn_metadata` and `residual` by name, and a layer's `self_attn.attn`, which is no
module, has `forward(q, k, v, metadata, ...)` (1.1 to main).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from engine_wrapper.self_check import LayoutError
from engine_wrapper.trtllm.planned_rows import PlannedRows

if TYPE_CHECKING:
    from collections.abc import Callable


class DecoderHooks:
    """`forward` stands before the decoder's own, which stays callable as `stock`. Where no planned rows are met, every
    layer and every attention does what it did."""

    def __init__(self, decoder: Any, forward: Callable[..., Any]) -> None:
        self._decoder = decoder
        self._forward = forward
        self._undo: list[Callable[[], None]] = []
        self.stock: Callable[..., Any] = decoder.forward

    def install(self) -> None:
        """Sets all of them, or none when one cannot be set, which is raised."""
        try:
            for index, layer in enumerate(self._decoder.layers):
                handle = layer.register_forward_pre_hook(partial(_begin, index), with_kwargs=True)
                self._undo.append(handle.remove)
                attention = layer.self_attn
                self._shadow(attention.attn, "forward", partial(_attend, attention, index, attention.attn.forward))
            self._shadow(self._decoder, "forward", self._forward)
        except Exception:
            self.remove()
            raise

    def remove(self) -> None:
        """Leaves the decoder as it was found."""
        while self._undo:
            self._undo.pop()()

    def _shadow(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        setattr(owner, name, replacement)
        self._undo.append(partial(delattr, owner, name))


def _begin(index: int, _layer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Before a layer: hands it the rows that are active in it."""
    rows = options.get("attn_metadata")
    if not isinstance(rows, PlannedRows):
        if any(isinstance(each, PlannedRows) for each in arguments):
            raise LayoutError("layer_call", f"layer {index} is called with its metadata by place, not by name")
        return None
    hidden, residual = rows.begin(index, options["hidden_states"], options.get("residual"))
    positions = rows.positions.to(options["position_ids"].dtype)[None]
    return arguments, {**options, "hidden_states": hidden, "residual": residual, "position_ids": positions}


def _attend(
    attention: Any, index: int, stock: Callable[..., Any], q: Any, k: Any, v: Any, metadata: Any,
    *arguments: Any, **options: Any,
) -> Any:  # fmt: skip
    if not isinstance(metadata, PlannedRows):
        return stock(q, k, v, metadata, *arguments, **options)
    if arguments:
        raise LayoutError(
            "attention_call", f"the attention of layer {index} is called with more by place than is known"
        )
    return metadata.attend(attention, index, q, k, v, options)
