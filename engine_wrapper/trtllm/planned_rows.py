"""The active rows of a forward through TensorRT-LLM's own layers, given to them in the place of attention metadata.

The layers pass their metadata on to the attention backend and read nothing of it but numbers of tokens. Where it is
these rows, K and V of the active rows are written to the pool, and the queries attend to all of their sequence that
lies there: the same as in `engine_wrapper.sparse_forward`, over other layers.

Facts: NVIDIA/TensorRT-LLM, `Attention.forward` and `Attention._attn_impl` of `_torch/modules/attention.py` (1.1 to 1.3)
and `_torch/attention/attention.py` (main); `_torch/models/modeling_qwen3.py`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from engine_wrapper.self_check import LayoutError
from engine_wrapper.trtllm.rope_angles import RopeAngles
from kernels.sparse_prefill import sparse_prefill, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine_wrapper.layer_schedule import EvidenceSink, LayerSchedule, Stage
    from kernels.layout import KvGeometry
    from kernels.rope import RopeRotation
    from semblend_trt.ranks import Ranks

# Wishes of a call that the attention here does not grant; each stands among its options or its `forward_args`.
_UNKNOWN_WISHES = (
    "attention_mask_data",
    "attention_sinks",
    "attention_window_size",
    "mrope_config",
    "mrope_position_deltas",
    "mrope_rotary_cos_sin",
    "out_scale",
    "out_scale_sf",
    "output",
    "relative_attention_bias",
    "softmax_stats_tensor",
)


class _CheckReached(Exception):  # noqa: N818 - an end, not an error
    """Leaves the decoder, which has no other way out below its last layer."""


class PlannedRows:
    """Rows on their way through the layers: they leave where their stage ends, and are compared by checks.

    `schedule` has its tensors on the pool's device. `ranks` run the same schedule, each with its heads. `evidence_sink`
    is told what each check found; the host waits for the device by checks only. With `lowest` the rows end at the
    check, once their K and V are written there, and `found` are its deviations.
    """

    # The engine pads rows for graphs only, and counts those of other ranks for attention data parallelism only.
    padded_num_tokens = None
    all_rank_num_tokens = None
    all_rank_max_num_tokens = None

    def __init__(
        self,
        schedule: LayerSchedule,
        pool: torch.Tensor,
        geometry: KvGeometry,
        rotation: RopeRotation,
        ranks: Ranks,
        evidence_sink: EvidenceSink | None = None,
        lowest: bool = False,
    ) -> None:
        self._schedule = schedule
        self._pool = pool
        self._geometry = geometry
        self._ranks = ranks
        self._evidence_sink = evidence_sink
        self._lowest = lowest
        self._next_stage = 0
        self._stage: Stage = schedule.stages[0]
        self.found: torch.Tensor | None = None
        self.positions = schedule.positions
        self._angles = RopeAngles.at(schedule.positions, rotation)

    @property
    def num_tokens(self) -> int:
        """Active rows: as many as the attention module takes of what it is given."""
        return self._stage.num_rows

    def begin(self, layer: int, *rows: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Before `layer`: each of `rows`, [active rows, ...] or None, without those that are not computed in it."""
        kept = list(rows)
        if self.found is not None:
            self._decide()
        stages = self._schedule.stages
        while self._next_stage < len(stages) and stages[self._next_stage].first_layer <= layer:
            kept = self._enter(stages[self._next_stage], kept)
        return kept

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Behind the last layer: of `hidden`, [active rows, ...], the rows that the engine scheduled, in its order."""
        kept: list[torch.Tensor | None] = [hidden]
        if self.found is not None:
            self._decide()
            kept = self._enter(self._schedule.stages[0], kept)
        assert kept[0] is not None
        return kept[0].index_select(0, self._schedule.output_rows)

    def attend(self, attention: Any, layer: int, q: Any, k: Any, v: Any, options: dict[str, Any]) -> torch.Tensor:
        """The attention of `layer`, [rows, heads * head_dim].

        `attention` is TensorRT-LLM's module; `q` [rows, (heads + 2 kv_heads) * head_dim] alone, or q, k and v. They
        are rotated here when the module leaves that to its kernel. Raises LayoutError when the call asks for more.
        """
        _check_wishes(options)
        if k is None:
            q, k, v = q.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        queries, keys, values = (part.unflatten(-1, (-1, self._geometry.head_dim)) for part in (q, k, v))
        if attention.rope_fusion:
            queries, keys = self._angles.rotate(queries), self._angles.rotate(keys)
        check = self._schedule.check
        if check is not None and check.layer == layer:
            self.found = check.deviations(keys, values, self._pool, self._geometry, self._ranks)
        sequences = self._stage.sequences
        write_rows(keys, values.contiguous(), self._pool, layer, sequences, self._geometry)
        if self._lowest and self.found is not None:
            raise _CheckReached
        scale = self._geometry.head_dim**-0.5
        attended = sparse_prefill(queries.contiguous(), self._pool, layer, sequences, self._geometry, scale)
        return attended.flatten(1)

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
        keep = stage.keep
        if keep is None:
            return rows
        self.positions, self._angles = self.positions.index_select(0, keep), self._angles.keep(keep)
        return [None if each is None else each.index_select(0, keep) for each in rows]


def _check_wishes(options: dict[str, Any]) -> None:
    asked = options.get("forward_args")
    for name in _UNKNOWN_WISHES:
        if options.get(name) is not None or getattr(asked, name, None) is not None:
            raise LayoutError("attention_call", f"the attention was called with {name}, which is not known here")
    for mask in (options.get("attention_mask"), getattr(asked, "attention_mask", None)):
        if mask is not None and str(getattr(mask, "value", mask)) != "causal":
            raise LayoutError("attention_call", f"the attention was called with mask {mask!r}; causal is known here")


def run_rows(
    forward: Callable[..., torch.Tensor], options: dict[str, Any], schedule: LayerSchedule, rows: PlannedRows
) -> torch.Tensor:
    """`forward`, the decoder's own, over the schedule's rows; `options` are those that the engine called it with.

    Returns the hidden rows that the engine scheduled, [tokens, hidden]. The layers must call `rows` (see
    `engine_wrapper.trtllm.planned_forward`).
    """
    return rows.finish(_run(forward, options, schedule, rows))


def run_lowest(
    forward: Callable[..., torch.Tensor], options: dict[str, Any], schedule: LayerSchedule, rows: PlannedRows
) -> torch.Tensor:
    """As `run_rows`, for `rows` that end at their check; returns its deviations, float32 [checked tokens]."""
    with suppress(_CheckReached):
        _run(forward, options, schedule, rows)
    if rows.found is None:
        raise LayoutError("model_call", "the decoder ended before the layer in which its rows are compared")
    return rows.found


def _run(
    forward: Callable[..., torch.Tensor], options: dict[str, Any], schedule: LayerSchedule, rows: PlannedRows
) -> torch.Tensor:
    token_ids = schedule.token_ids.to(options["input_ids"].dtype)
    positions = schedule.positions.to(options["position_ids"].dtype)[None]
    return forward(**{**options, "input_ids": token_ids, "position_ids": positions, "attn_metadata": rows})
