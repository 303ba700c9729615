"""Executes plans in vLLM's own decoder, once its first prompt has come out the same."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_wrapper.batch import Batch
from engine_wrapper.layer_loop import follow
from engine_wrapper.layout_error import LayoutError
from engine_wrapper.self_check import MAX_TOKENS, MIN_TOKENS, check_plan, difference
from engine_wrapper.vllm.rows import VllmRows
from semblend_trt.runtime import EngineMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine_wrapper.course import Course
    from engine_wrapper.layer_loop import EvidenceSink
    from engine_wrapper.layer_schedule import LayerSchedule
    from engine_wrapper.vllm.metadata import Scheduled
    from engine_wrapper.vllm.rows import Decoder
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import Runtime

# Below vLLM's own loggers, so that it shows what is on.
logger = logging.getLogger("vllm.semblend")


class PlannedForward:
    """In the place of the model's forward. Steps without a plan go on to it untouched.

    Until the self-check has passed the runtime stays in stock mode, in which nothing is offered; when it fails, the
    model is given back as it was found. When a plan cannot be executed, all that it promised is computed, and nothing
    is reused from then on. When that fails too, the step runs as stock and `failed` is told: vLLM computes it again.
    """

    def __init__(
        self,
        model: Any,
        order: Callable[[], list[str]],
        parts: Decoder,
        runtime: Runtime,
        failed: Callable[[SemanticKvPlan], None],
        max_rows: int | None,
        sink: EvidenceSink,
    ) -> None:
        """`order` gives the requests of the running step in the order of their rows; no forward has more than
        `max_rows` rows."""
        self._model, self._order, self._parts, self._runtime = model, order, parts, runtime
        self._failed, self._max_rows, self._sink = failed, max_rows, sink
        self._stock = model.forward
        self._is_proven = False
        # What the scheduler told of the running step, set before its forward.
        self.step: Mapping[str, Scheduled] = {}
        model.forward = self._forward

    def remove(self) -> None:
        """Leaves the model as it was found."""
        vars(self._model).pop("forward", None)

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        plans = self._runtime.active_plans.take_all(each.number for each in self.step.values())
        if plans:
            try:
                return self._planned(plans, options)
            except Exception:
                logger.exception("KV reuse is off from now on: a plan could not be executed; its request is recomputed")
                self._runtime.faults["planned_forward"] += 1
                self._runtime.refusal = self._runtime.refusal or "planned_forward"
            # vLLM's own recovery is wrong under async scheduling (vllm#45138) and in the V2 runner (#49250).
            try:
                self._runtime.failed_loads.extend(plans)
                whole = {number: plan.without_spans("planned_forward") for number, plan in plans.items()}
                return self._planned(whole, options)
            except Exception:
                logger.exception("nor can its request be computed by our rows; vLLM computes it again")
                for plan in plans.values():
                    self._failed(plan)
        hidden = self._stock(*arguments, **options)
        if not self._is_proven and self.step and not plans:
            self._prove(arguments, options, hidden)
        return hidden

    @torch.inference_mode()
    def _planned(self, plans: Mapping[int, SemanticKvPlan], options: Mapping[str, Any]) -> torch.Tensor:
        hidden = self._run(self._batch(options), self._blocks(), plans, self._max_rows, self._sink)
        rows = len(options["positions"])  # the engine pads its batches
        return torch.cat([hidden, hidden.new_zeros(rows - len(hidden), hidden.shape[1])])

    def _run(
        self,
        batch: Batch,
        blocks: list[list[int]],
        plans: Mapping[int, SemanticKvPlan],
        max_rows: int | None = None,
        sink: EvidenceSink | None = None,
    ) -> torch.Tensor:
        ranks, layers = self._runtime.ranks, self._parts.geometry.num_layers

        def run(schedule: LayerSchedule) -> torch.Tensor:
            rows = VllmRows(self._parts, schedule)
            try:
                return self._through(rows, schedule, sink)
            finally:
                rows.restore()

        def lowest(schedule: LayerSchedule) -> torch.Tensor:
            rows = VllmRows(self._parts, schedule)
            try:
                found = follow(rows, schedule, layers, ranks)
            finally:
                rows.restore()
            assert found is not None
            return found

        return batch.run(plans, blocks, self._parts.geometry, run, lowest, max_rows, sink)

    def _through(self, rows: VllmRows, course: Course, sink: EvidenceSink | None) -> torch.Tensor:
        """All layers, from check to check."""
        begun: int | None = None
        while True:
            found = follow(rows, course, self._parts.geometry.num_layers, self._runtime.ranks, begun)
            if found is None or course.checkpoint is None:
                return rows.output(course.output_rows)
            begun = course.checkpoint.layer
            decided, evidence = course.checkpoint.decide(found)
            course = decided.to(found.device)
            for each in evidence if sink is not None else ():
                sink(each)  # type: ignore[misc]

    def _batch(self, options: Mapping[str, Any]) -> Batch:
        """Raises LayoutError for a step that cannot be read."""
        if options.get("inputs_embeds") is not None or options.get("intermediate_tensors") is not None:
            raise LayoutError("model_call", "the model was called with embeddings or for a part of its layers")
        told = [self.step[name] for name in self._order()]
        lengths = tuple(each.tokens for each in told)
        ids = options.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 1 or len(ids) < sum(lengths):
            raise LayoutError("model_call", f"input_ids are not the {sum(lengths)} tokens that were scheduled")
        numbers, begins = tuple(each.number for each in told), tuple(each.begin for each in told)
        positions = options["positions"][: sum(lengths)].cpu().numpy()
        wanted = np.concatenate([np.arange(begin, begin + count) for begin, count in zip(begins, lengths, strict=True)])
        if not np.array_equal(positions, wanted):
            raise LayoutError("model_call", "the rows of the step stand in another order than its requests")
        return Batch(numbers, begins, lengths, len(numbers), ids[: sum(lengths)])

    def _blocks(self) -> list[list[int]]:
        return [list(self.step[name].block_ids) for name in self._order()]

    # -- the self-check --------------------------------------------------------------------------------------------

    def _prove(self, arguments: tuple[Any, ...], options: dict[str, Any], hidden: Any) -> None:
        """Computes the engine's first long enough prompt again by our rows, whole and by plans; never raises.

        Its own blocks are written, and then once more by the engine: its KV stays its own to the bit.
        """
        try:
            batch = self._batch(options)
            fits = [i for i, begin in enumerate(batch.begins) if begin == 0 and batch.lengths[i] >= MIN_TOKENS]
            if not fits:
                return
            first = sum(batch.lengths[: fits[0]])
            rows = slice(first, first + min(batch.lengths[fits[0]], MAX_TOKENS))
            try:
                self._check(batch.input_ids[rows], hidden[rows], self._blocks()[fits[0]])
            finally:
                self._stock(*arguments, **options)
        except Exception as error:
            reason = error.reason if isinstance(error, LayoutError) else "self_check"
            logger.warning("plans are not executed on this engine (%s): %s", reason, error)
            self._runtime.faults["self_check"] += 1
            self.remove()
            return
        self._is_proven = True
        self._runtime.mode = EngineMode.WRAPPER
        logger.info("plans are executed on this engine: its first prompt came out the same")

    @torch.inference_mode()
    def _check(self, ids: torch.Tensor, engine_rows: torch.Tensor, block_ids: list[int]) -> None:
        """Raises LayoutError with what differs."""
        tokens, blocks = len(ids), [block_ids]
        whole = self._run(Batch((0,), (0,), (tokens,), 1, ids), blocks, {})
        found = [difference("hidden rows", whole, engine_rows)]
        plan = check_plan(ids.tolist(), self._parts.geometry)
        rest = Batch((0,), (plan.prefix_end,), (tokens - plan.prefix_end,), 1, ids[plan.prefix_end :])
        for max_rows in (None, tokens // 4):  # the span has twice as many
            planned = self._run(rest, blocks, {0: plan}, max_rows)
            found.append(difference("hidden rows of a plan", planned, engine_rows[plan.prefix_end :]))
        problem = next((each for each in found if each is not None), None)
        if problem is not None:
            raise LayoutError("self_check", problem)
