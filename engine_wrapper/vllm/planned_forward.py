"""Executes plans in vLLM's own decoder, once its first prompt has come out the same.

Facts: vLLM, `v1/worker/gpu_model_runner.py` (V1) and `v1/worker/gpu/model_runner.py` (V2; 0.28). Both call
the model with the same keywords and keep the layers' attention metadata in the forward context."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from engine_wrapper.batch import Batch, EngineForward, LastSamples
from engine_wrapper.layer_schedule import follow, follow_all
from engine_wrapper.self_check import MAX_TOKENS, MIN_TOKENS, differences, measured, raise_difference, sample_difference
from engine_wrapper.vllm.attention import KEYS_PER_ROW, VllmRows, as_prompts, own_rows_as_stored, takes_whole_graphs
from engine_wrapper.vllm.decoder import check_rotation
from engine_wrapper.vllm.graphs import MOST_ROWS, WholeGraphs
from engine_wrapper.vllm.hooks import StepGraphs, replace_forward
from engine_wrapper.vllm.refusals import sample_refusal
from kernels.device import HostCopy
from kernels.layout import PagedKv
from semblend_trt.errors import LayoutError
from semblend_trt.plan import EngineMode
from semblend_trt.ranks import RanksApartError
from semblend_trt.transfer.load import block_vector

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from engine_wrapper.layer_schedule import EvidenceSink, LayerSchedule
    from engine_wrapper.vllm.decoder import Decoder
    from engine_wrapper.vllm.hooks import ModelRunner
    from engine_wrapper.vllm.scheduler import Scheduled
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)


class PlannedForward:
    """Replaces the model's forward; steps without a plan run as stock.

    Until the self-check has passed the runtime stays in stock mode and nothing is offered; if it fails, the model is
    given back as it was found. If a plan cannot be executed, all that it promised is computed, and nothing is reused
    from then on. If that fails too, the step runs as stock and `failed` is called: vLLM computes it again."""

    def __init__(
        self,
        runner: ModelRunner,
        parts: Decoder,
        runtime: Runtime,
        failed: Callable[[SemanticKvPlan], None],
        max_rows: int,
        *,
        is_timed: bool,
    ) -> None:
        """`max_rows`: of one forward. `is_timed`: what plans cost is measured after the self-check."""
        self._runner, self._parts, self._runtime = runner, parts, runtime
        self._failed, self._max_rows, self._is_timed = failed, max_rows, is_timed
        self._stock = runner.model.forward
        self._sparse, self._last_samples = False, LastSamples()
        self._graphs: StepGraphs  # those of the step that is proven
        known = parts.longest, parts.geometry.blocks_for(parts.longest), runtime.faults
        is_whole = takes_whole_graphs(parts.builder) and not any(parts.chunks)
        self._wholes = WholeGraphs(self._stock, parts.names, parts.attention, *known) if is_whole else None
        # The running step's requests by vLLM's id, set before its forward.
        self.step: Mapping[str, Scheduled] = {}
        self._undo = replace_forward(runner.model, self._forward)

    def remove(self) -> None:
        """Leave the model and its runner as they were found."""
        self._undo()
        self._runner.remove()

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        hidden = self._run_step(arguments, options)
        # With a grammar the V2 runner ends a step only when requests of the one before have ended.
        self._runtime.is_forward_open = False
        return hidden

    def _run_step(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        plans = self._runtime.active_plans.take_all(each.number for each in self.step.values())
        if plans:
            together = partial(self._runtime.ranks.together, reached=lambda: self._parts.calls.reached)
            try:
                return together(partial(self._planned, plans, options))
            except RanksApartError:
                raise
            except Exception:
                logger.exception("KV reuse is off from now on: a plan could not be executed; its request is recomputed")
                self._runtime.faults["planned_forward"] += 1
                self._runtime.refusal = self._runtime.refusal or "planned_forward"
            try:
                self._runtime.failed_loads.extend(plans)
                whole = {number: plan.without_spans("planned_forward") for number, plan in plans.items()}
                return together(partial(self._planned, whole, options))
            except RanksApartError:
                raise
            except Exception:
                logger.exception("nor can its request be computed by our rows; vLLM computes it again")
                for plan in plans.values():
                    self._failed(plan)
        hidden = self._stock(*arguments, **options)
        if self._runtime.mode is EngineMode.STOCK and self.step and not plans:
            self._prove(arguments, options, hidden)
        return hidden

    @torch.inference_mode()
    def _planned(self, plans: Mapping[int, SemanticKvPlan], options: Mapping[str, Any]) -> torch.Tensor:
        batch, blocks = self._batch(options)
        read = HostCopy(options["positions"][: sum(batch.lengths)])  # while the step is computed
        with self._own_rows(logits_follow=True):
            hidden = self._run(batch, blocks, plans, self._max_rows, self._runtime.note_evidence)
            _check_order(batch, read)
        rows = len(options["positions"])  # the engine pads its batches
        return torch.cat([hidden, hidden.new_zeros(rows - len(hidden), hidden.shape[1])])

    def _own_rows(self, *, logits_follow: bool) -> AbstractContextManager[None]:
        """As of the adapters, if vLLM has any."""
        adapters = self._parts.adapters
        return nullcontext() if adapters is None else adapters.own_rows(logits_follow=logits_follow)

    def _run(
        self,
        batch: Batch,
        blocks: list[list[int]],
        plans: Mapping[int, SemanticKvPlan],
        max_rows: int | None = None,
        sink: EvidenceSink | None = None,
    ) -> torch.Tensor:
        ranks, geometry = self._runtime.ranks, self._parts.geometry
        if not self._sparse:
            plans = {number: _without_sample(plan) for number, plan in plans.items()}

        def run(schedule: LayerSchedule, sink: EvidenceSink | None) -> torch.Tensor:
            with VllmRows(self._parts, schedule, self._sparse) as rows:
                if schedule.check is None and len(schedule.stages) == 1:
                    # Costs compare plans with cold prompts as vLLM runs them.
                    return rows.whole(self._stock, self._graphs, self._wholes if plans else None)
                return follow_all(rows, schedule, geometry.num_layers, ranks, sink)

        def lowest(schedule: LayerSchedule) -> Any:
            with VllmRows(self._parts, schedule, self._sparse) as rows:
                return follow(rows, schedule, geometry.num_layers, ranks)

        few_rows = 0 if self._wholes is None else MOST_ROWS
        forward = EngineForward(geometry, ranks, run, lowest, max_rows, KEYS_PER_ROW, few_rows, self._last_samples)
        return batch.run(plans, blocks, forward, sink)

    def _batch(self, options: Mapping[str, Any]) -> tuple[Batch, list[list[int]]]:
        """The step's batch and the blocks of its requests. Raises LayoutError if it cannot be read."""
        if options.get("inputs_embeds") is not None or options.get("intermediate_tensors") is not None:
            raise LayoutError("model_call", "the model was called with embeddings or for a part of its layers")
        told = [self.step[name] for name in self._runner.order()]
        lengths = tuple(each.tokens for each in told)
        ids = options.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 1 or len(ids) < sum(lengths):
            raise LayoutError("model_call", f"input_ids are not the {sum(lengths)} tokens that were scheduled")
        numbers, begins = tuple(each.number for each in told), tuple(each.begin for each in told)
        batch = Batch(numbers, begins, lengths, len(numbers), ids[: sum(lengths)])
        return batch, [list(each.block_ids) for each in told]

    # -- the self-check --------------------------------------------------------------------------------------------

    def _prove(self, arguments: tuple[Any, ...], options: dict[str, Any], hidden: Any) -> None:
        """Computes the engine's first long enough prompt again by planned rows, whole and by plans; never raises. They
        write the prompt's own blocks, and then the engine does once more: its KV stays its own to the bit."""
        try:
            batch, held = self._batch(options)
            fits = [i for i, begin in enumerate(batch.begins) if begin == 0 and batch.lengths[i] >= MIN_TOKENS]
            if not fits:
                return
            _check_order(batch, HostCopy(options["positions"][: sum(batch.lengths)]))
            first = sum(batch.lengths[: fits[0]])
            rows = slice(first, first + min(batch.lengths[fits[0]], MAX_TOKENS))
            padding = get_forward_context().is_padding
            self._graphs = StepGraphs(options["input_ids"], options["positions"], padding)
            try:
                with self._own_rows(logits_follow=False):
                    # A graph's output, which the next replayed graph writes over.
                    blocks, ids = held[fits[0]], batch.input_ids[rows]
                    self._check(ids, hidden[rows].clone(), blocks)
                    if self._is_timed:
                        self._measure(ids, blocks[: self._parts.geometry.blocks_for(len(ids))])
            finally:
                self._stock(*arguments, **options)
        except Exception as error:
            reason = error.reason if isinstance(error, LayoutError) else "self_check"
            logger.warning("plans are not executed on this engine (%s): %s", reason, error)
            self._runtime.faults["self_check"] += 1
            self._runtime.refusal = self._runtime.refusal or reason
            self.remove()
            return
        self._runtime.mode = EngineMode.WRAPPER
        logger.info("plans are executed on this engine: its first prompt came out the same")

    @torch.inference_mode()
    def _measure(self, ids: torch.Tensor, block_ids: list[int]) -> None:
        """Measures what plans cost, by prompts of these tokens over these blocks alone."""
        parts, runtime, longest = self._parts, self._runtime, min(self._parts.longest, self._max_rows)

        def run(tokens: list[int], begin: int, blocks: list[int], plan: SemanticKvPlan | None) -> None:
            own = torch.tensor(tokens[begin:], dtype=ids.dtype, device=ids.device)
            batch = Batch((0,), (begin,), (len(own),), 1, own)
            self._run(batch, [blocks], {} if plan is None else {0: plan}, self._max_rows)

        kv = PagedKv(parts.pool, block_vector(block_ids), parts.geometry)
        known = ids.tolist(), kv, parts.rotation, runtime.ranks, longest
        runtime.costs = measured(run, *known, samples=self._sparse)

    @torch.inference_mode()
    def _check(self, ids: torch.Tensor, engine_rows: torch.Tensor, block_ids: list[int]) -> None:
        """Raises LayoutError with what differs."""

        def run(batch: Batch, plans: Mapping[int, SemanticKvPlan], max_rows: int | None) -> torch.Tensor:
            return self._run(batch, [block_ids], plans, max_rows)

        geometry, kv_dtype = self._parts.geometry, self._parts.pool.dtype
        is_latent = geometry.kv_factor == 1
        as_stored = partial(own_rows_as_stored, self._parts) if is_latent and kv_dtype == torch.float8_e4m3fn else None
        # A latent attention may take runs of this length for decodes, and longer ones for prompts.
        for way in (nullcontext(), as_prompts(self._parts.builder)) if is_latent else (nullcontext(),):
            with way:
                raise_difference(differences(ids, engine_rows, geometry, kv_dtype, run, as_stored), self._runtime.ranks)
        self._runtime.ranks.together(partial(check_rotation, self._parts, ids))
        problem: str | Exception | None = next(filter(None, map(sample_refusal, self._parts.attention)), None)
        if kv_dtype == torch.float8_e4m3fn:
            problem = "kv_cache_dtype"  # SemBlend's kernel reads no scales
        self._sparse = problem is None
        try:
            problem = problem or sample_difference(ids, engine_rows, geometry, kv_dtype, run)
        except Exception as error:
            problem = error
        raised = problem if isinstance(problem, Exception) else None
        told = self._runtime.ranks.gather(None if problem is None else str(problem))
        if (problem := next((each for each in told if each is not None), None)) is not None:
            self._sparse = False
            logger.warning("checks compare every token on this engine, without sample: %s", problem, exc_info=raised)


def _check_order(batch: Batch, positions: HostCopy) -> None:
    """Raises LayoutError if the step's positions, int64, are in another order than its requests."""
    spans = zip(batch.begins, batch.lengths, strict=True)
    wanted = np.concatenate([np.arange(begin, begin + count) for begin, count in spans])
    if not np.array_equal(positions.read(), wanted):
        raise LayoutError("model_call", "the rows of the step stand in another order than its requests")


def _without_sample(plan: SemanticKvPlan) -> SemanticKvPlan:
    check = plan.execution.check
    if check is None or not check.sample_every:
        return plan
    if check.levels:
        # They hold for a sample, and the attention that each token gets.
        return plan.without_spans("levels_need_kernel")
    check = replace(check, sample_every=0)
    return replace(plan, execution=replace(plan.execution, check=check))
