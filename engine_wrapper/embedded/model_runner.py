"""Runs the slices that the executor schedules, and the reuse plans that are pending for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.batch import EngineForward
from engine_wrapper.embedded.models import adopt_model, load_model
from engine_wrapper.self_check import measured
from engine_wrapper.sparse_forward import SparseForward
from engine_wrapper.token_schedule import SequenceSlice, works_of
from kernels.device import current_stream
from kernels.layout import indexable
from semblend_trt.errors import ConfigurationError
from semblend_trt.ranks import Ranks

if TYPE_CHECKING:
    from pathlib import Path

    from engine_wrapper.embedded.models import ModelSource
    from engine_wrapper.layer_schedule import EvidenceSink, LayerSchedule
    from engine_wrapper.sparse_forward import LayerHook
    from kernels.layout import KvGeometry, PagedKv
    from kernels.rope import Rotation
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.cost import CostModel
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan
    from semblend_trt.transfer.load import LayerReadiness

PlanSource = Callable[[int], "SemanticKvPlan | None"]


class ModelRunner:
    """One model over one pool.

    The engine wrapper sets three attributes. `forward` asks `plan_source` once for each slice that has no plan yet.
    With `readiness`, while KV is on its way into the pool, every layer waits for its own. `evidence_sink` gets what the
    checks of a forward found. Every layer of every forward calls `before_layer` and `after_layer` with its index."""

    def __init__(
        self,
        model_path: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
    ) -> None:
        """Load the model; see `load_model` for the settings and errors."""
        self._own(*load_model(model_path, dtype, device, tokenizer, revision))

    @classmethod
    def from_model(cls, model: Any, config_path: str | Path, tokenizer: Any = None) -> ModelRunner:
        """Return a runner of a model in memory, as it is: on its device, in its dtype.

        `config_path` is a folder with the model's config.json, which engine and connector read again. Without a
        `tokenizer`, prompts are token ids. No file identifies the weights, so no other engine shares their KV unless
        SEMBLEND_MODEL_REVISION names them. Raises UnsupportedModelError and ConfigurationError as loading does."""
        runner = cls.__new__(cls)
        runner._own(*adopt_model(model, config_path, tokenizer))
        return runner

    def _own(self, model: Any, tokenizer: Any, facts: ModelFacts, source: ModelSource) -> None:
        # The Transformers model; called directly, it runs plain SDPA and touches no pool.
        self.model, self.config, self.tokenizer = model, model.config, tokenizer
        self.facts, self.source = facts, source
        # Of weights and hidden rows, and of the pool unless it is in fp8.
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._detach()

    def _detach(self) -> None:
        self._forward: SparseForward | None = None
        self._max_rows: int | None = None
        self.plan_source: PlanSource | None = None
        self.readiness: LayerReadiness | None = None
        self.evidence_sink: EvidenceSink | None = None
        self.before_layer: LayerHook | None = None
        self.after_layer: LayerHook | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a generation by the model's generation settings or its tokenizer."""
        found: set[int] = set()
        sources = (self.model.generation_config, self.config, self.tokenizer)
        for ids in (getattr(source, "eos_token_id", None) for source in sources):
            found.update(ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,))
        return frozenset(found)

    def share(self) -> ModelRunner:
        """Return a runner with the same weights for another engine: without pool, plan source and hooks."""
        runner = copy.copy(self)
        runner._detach()
        return runner

    def attach_pool(self, pool: torch.Tensor, geometry: KvGeometry, max_rows: int | None = None) -> None:
        """Set the pool, [blocks, layers, 2, kv_heads * block_size * head_dim], and the most rows of one forward.

        Plans that add more rows run in several (see `engine_wrapper.batch`)."""
        self._forward = SparseForward(self.model, pool, geometry)
        self._max_rows = max_rows

    def forward(self, slices: Sequence[SequenceSlice], all_rows: bool = False) -> torch.Tensor:
        """Run one iteration; return logits, float32 [len(slices), vocabulary], of each slice's last row.

        With `all_rows`, returns those of all slices' tokens. Raises PlanError when a plan does not fit its slice,
        ConfigurationError without a pool."""
        if self._forward is None:
            raise ConfigurationError("the model runner has no pool; call attach_pool before forward")
        decoder = self._forward
        if (source := self.plan_source) is not None:
            slices = [replace(each, plan=source(each.request_id)) if each.plan is None else each for each in slices]
        works = works_of(slices, self.facts.num_layers)
        if not all_rows:
            works = [replace(work, outputs=1) for work in works]

        def run(schedule: LayerSchedule, sink: EvidenceSink | None) -> torch.Tensor:
            found: list[CheckEvidence] = []
            hidden = decoder(schedule, self._before_layer(), self.after_layer, found.append)
            if sink is not None:
                for evidence in found:
                    sink(evidence)
            return hidden

        def lowest(schedule: LayerSchedule) -> torch.Tensor:
            return decoder.lowest(schedule, self._before_layer(), self.after_layer)

        forward = EngineForward(decoder.geometry, Ranks(), run, lowest, self._max_rows)
        return decoder.logits(forward.hidden(works, self.device, self.evidence_sink))

    def replay(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run a recorded decode step, in which no hook runs; return logits as `forward` does.

        Raises RuntimeError if a plan waits for one of the slices: what was recorded asks for no plan."""
        source = self.plan_source
        if source is not None and any(source(each.request_id) is not None for each in slices):
            raise RuntimeError("a plan waits for a decode step, which is replayed; at least two tokens must be left")
        if self.readiness is not None:
            self.readiness.join(current_stream(self.device))
        hooks = source, self.before_layer, self.after_layer
        self.plan_source = self.before_layer = self.after_layer = None
        try:
            return self.forward(slices)
        finally:
            self.plan_source, self.before_layer, self.after_layer = hooks

    def measured_costs(self, kv: PagedKv, rotation: Rotation, longest: int) -> CostModel | None:
        """Measure what plans cost, over blocks that are zero before and after it (`engine_wrapper.self_check`)."""

        def run(tokens: list[int], begin: int, blocks: list[int], plan: SemanticKvPlan | None) -> None:
            self.forward([SequenceSlice(0, begin, tuple(tokens[begin:]), tuple(blocks), plan)])

        with torch.inference_mode():
            some = range(min(997, self.config.get_text_config().vocab_size))
            found = measured(run, some, kv, rotation, Ranks(), min(longest, self._max_rows or longest))
            indexable(kv.memory)[kv.block_ids] = 0
        return found

    def _before_layer(self) -> LayerHook | None:
        """Return this forward's hook before each layer: wait for the layer's KV, then call `before_layer`."""
        readiness, hook = self.readiness, self.before_layer
        if readiness is None or not readiness.is_arriving:
            return hook
        stream = current_stream(self.device)

        def wait_and_call(layer: int) -> None:
            readiness.wait(layer, stream)
            if hook is not None:
                hook(layer)

        return wait_and_call
