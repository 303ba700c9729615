"""The active rows of a forward through TensorRT-LLM's own layers, handed to them in place of attention metadata.

The layers read only numbers of tokens from their metadata and pass it on to the attention backend. If it is these rows,
their K and V are written to the pool. The queries attend to their whole sequence there (`sparse_forward`).

Facts: NVIDIA/TensorRT-LLM, `Attention.forward` and `Attention._attn_impl` of `_torch/modules/attention.py` (1.1 to 1.3)
and `_torch/attention/attention.py` (main); `_torch/models/modeling_qwen.py`, `modeling_qwen3.py` and
`modeling_llama.py`: a decoder calls its layers with `position_ids`, `hidden_states`, `attn_metadata` and `residual` by
name, and a layer's `self_attn.attn`, which is no module, has `forward(q, k, v, metadata, ...)` (1.1 to main);
`modeling_gemma3.py` asks it for an `attention_window_size`, which counts the token itself
(`attention_backend/vanilla.py`); `cpp/tensorrt_llm/common/attentionOp.cpp` divides scores by `q_scaling` too."""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_wrapper.trtllm.hooks import option_of, scaling_of
from kernels.layout import PoolLayer
from kernels.rope import rotary_factors, rotate
from kernels.sparse_prefill import sparse_prefill, write_rows
from semblend_trt.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine_wrapper.layer_schedule import EvidenceSink, LayerSchedule, Stage
    from kernels.layout import KvGeometry
    from kernels.rope import Rotation
    from semblend_trt.ranks import Ranks

# Options of an attention call that change its result and are not supported; given alone or in `forward_args`.
_UNKNOWN_OPTIONS = (
    *("attention_mask_data", "attention_sinks", "relative_attention_bias", "softmax_stats_tensor"),
    *("mrope_config", "mrope_position_deltas", "mrope_rotary_cos_sin", "out_scale", "out_scale_sf", "output"),
)


class CheckReached(Exception):  # noqa: N818 - an end, not an error
    """Ends the decoder's forward below its last layer."""


class PlannedRows:
    """Rows on their way through the layers: they leave where their stage ends, and checks compare them.

    `schedule` has its tensors on the pool's device. `windows`: each layer's, in tokens, None for full attention.
    `ranks` run the same schedule, each with its heads. The host waits for the device at checks only. `lowest`: the
    forward ends at the check, after its rows' K and V are written. `found` are the check's deviations."""

    # The engine pads rows for graphs only, and counts those of other ranks for attention data parallelism only.
    padded_num_tokens = None
    all_rank_num_tokens = None
    all_rank_max_num_tokens = None

    def __init__(
        self,
        schedule: LayerSchedule,
        pool: torch.Tensor,
        geometry: KvGeometry,
        rotation: Rotation,
        windows: tuple[int | None, ...],
        ranks: Ranks,
        evidence_sink: EvidenceSink | None,
        lowest: bool = False,
    ) -> None:
        self._schedule, self._pool, self._geometry = schedule, pool, geometry
        self._rotation, self._windows, self._ranks = rotation, windows, ranks
        self._evidence_sink, self._lowest = evidence_sink, lowest
        self._next_stage = 0
        self._stage: Stage = schedule.stages[0]
        self.found: torch.Tensor | None = None
        self.positions = schedule.positions
        turning = (kind for kind in rotation.kinds if not kind.is_still)
        self._factors = {kind: rotary_factors(self.positions[:, None], kind).float() for kind in turning}

    @property
    def num_tokens(self) -> int:
        """Active rows; the attention module takes only these of the rows that it is given."""
        return self._stage.num_rows

    def begin(self, layer: int, *rows: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Cut each of `rows`, [active rows, ...] or None, to those that `layer` computes. Call it before the layer."""
        kept = list(rows)
        if self.found is not None:
            self._decide()
        stages = self._schedule.stages
        while self._next_stage < len(stages) and stages[self._next_stage].first_layer <= layer:
            kept = self._enter(stages[self._next_stage], kept)
        return kept

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return, after the last layer, the scheduled rows of `hidden`, [active rows, ...], in the engine's order."""
        (kept,) = self.begin(self._geometry.num_layers, hidden)
        assert kept is not None
        return kept.index_select(0, self._schedule.output_rows)

    def attend(self, attention: Any, layer: int, q: Any, k: Any, v: Any, options: dict[str, Any]) -> torch.Tensor:
        """Return the attention of `layer`, [rows, heads * head_dim].

        `attention` is TensorRT-LLM's module; `q` alone, [rows, (heads + 2 kv_heads) * head_dim], or q, k and v. Queries
        and keys are rotated here if the module leaves that to its kernel. Raises LayoutError for unknown options."""
        self._check_options(layer, options)
        if k is None:
            q, k, v = q.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        queries, keys, values = (part.unflatten(-1, (-1, self._geometry.head_dim)) for part in (q, k, v))
        own = self._rotation.of_layer(layer)
        if attention.rope_fusion and own in self._factors:
            queries, keys = (rotate(each, self._factors[own], own) for each in (queries, keys))
        check = self._schedule.check
        if check is not None and check.layer == layer:
            self.found = check.deviations(keys, values, self._pool, self._geometry, self._ranks)
        kv, sequences = PoolLayer(self._pool, layer, self._geometry), self._stage.sequences
        write_rows(keys, values.contiguous(), kv, sequences)
        if self._lowest and self.found is not None:
            raise CheckReached
        scale = self._geometry.head_dim**-0.5 / (scaling_of(attention) or 1.0)
        mass = self._schedule.mass
        attend = sparse_prefill if mass is None else partial(mass.attend, layer)
        attended = attend(queries.contiguous(), kv, sequences, scale, self._windows[layer])
        return attended.flatten(1)

    def _check_options(self, layer: int, options: dict[str, Any]) -> None:
        asked = partial(option_of, options)
        window, mask, found = self._windows[layer], asked("attention_mask"), asked("attention_window_size")
        unknown = (f"{name}, which is not supported here" for name in _UNKNOWN_OPTIONS if asked(name) is not None)
        problem = next(unknown, "")
        if not problem and mask is not None and (mask.value if isinstance(mask, Enum) else mask) != "causal":
            problem = f"mask {mask!r}; only causal is supported"
        if problem:
            raise LayoutError("attention_call", f"the attention was called with {problem}")
        if found != window:
            raise LayoutError(
                "attention_call",
                f"layer {layer} was called with attention_window_size {found}; by the model's configuration it is "
                f"{window}",
            )

    def _decide(self) -> None:
        assert self._schedule.check is not None
        assert self.found is not None
        schedule, evidence = self._schedule.check.decide(self.found)
        self._schedule, self.found, self._next_stage = schedule.to(self._pool.device), None, 0
        for found in evidence if self._evidence_sink is not None else ():
            self._evidence_sink(found)  # type: ignore[misc]

    def _enter(self, stage: Stage, rows: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        self._stage = stage
        self._next_stage += 1
        if (keep := stage.keep) is None:
            return rows
        self.positions = self.positions.index_select(0, keep)
        self._factors = {kind: factors.index_select(1, keep) for kind, factors in self._factors.items()}
        return [None if each is None else each.index_select(0, keep) for each in rows]


def begin(index: int, _layer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Hand a layer the rows that are active in it. Called before the layer."""
    rows = options.get("attn_metadata")
    if not isinstance(rows, PlannedRows):
        if any(isinstance(each, PlannedRows) for each in arguments):
            raise LayoutError("layer_call", f"layer {index} gets its metadata by position, not by name")
        return None
    hidden, residual = rows.begin(index, options["hidden_states"], options.get("residual"))
    positions = rows.positions.to(options["position_ids"].dtype)[None]
    return arguments, {**options, "hidden_states": hidden, "residual": residual, "position_ids": positions}


def attend(
    attention: Any, index: int, stock: Callable[..., Any], q: Any, k: Any, v: Any, metadata: Any,
    *arguments: Any, **options: Any,
) -> Any:  # fmt: skip
    """Attend for planned rows, in the place of an attention backend's `forward`; leave others to the backend."""
    if not isinstance(metadata, PlannedRows):
        return stock(q, k, v, metadata, *arguments, **options)
    if arguments:
        raise LayoutError(
            "attention_call", f"the attention of layer {index} gets more positional arguments than are supported"
        )
    return metadata.attend(attention, index, q, k, v, options)
