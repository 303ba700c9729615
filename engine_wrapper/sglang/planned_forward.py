"""Executes plans before SGLang's own forward, once its first prompt has come out the same.

SGLang computes what it scheduled, unchanged. What a plan promised is computed before, in the slots that SGLang then
reads as the request's prefix."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.batch import Batch, EngineForward, micro_batches
from engine_wrapper.layer_schedule import follow, follow_all, schedule_of
from engine_wrapper.self_check import MAX_TOKENS, MIN_TOKENS, differences, measured, raise_difference, sample_difference
from engine_wrapper.sglang.rows import SglangRows, check_rotation, in_forward, rows_batch
from kernels.layout import PagedKv
from semblend_trt.errors import LayoutError
from semblend_trt.plan import EngineMode
from semblend_trt.transfer.load import block_vector

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_wrapper.layer_schedule import EvidenceSink, LayerSchedule
    from engine_wrapper.sglang.requests import Scheduled
    from engine_wrapper.sglang.rows import Decoder
    from engine_wrapper.token_schedule import SequenceWork
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import Runtime

# Below SGLang's own loggers, so that it shows what is on.
logger = logging.getLogger("sglang.semblend")


class _PromisedForward(EngineForward):
    """Runs what plans promised, and of the rows that SGLang scheduled the first alone: a schedule needs a row in every
    layer. Only a look at attention runs the others too."""

    def outputs(self, works: Sequence[SequenceWork], device: Any, sink: EvidenceSink | None, input_ids: Any) -> Any:
        layers = self.geometry.num_layers
        counts = (len(work.positions) - work.outputs for work in works)
        own = [work.part(0, count + 1, 1) for work, count in zip(works, counts, strict=True) if count]
        for parts in micro_batches(own, layers, self.max_rows) if own else ():
            self.run(schedule_of([part.work for part in parts], layers).to(device), sink)
        return input_ids


class PlannedForward:
    """Until the self-check has passed the runtime stays in stock mode and nothing is offered.

    If a plan cannot be executed, SGLang's own decoder computes all that it promised, and nothing is reused from then
    on. `max_rows`: of one forward. `is_timed`: what plans cost is measured after the self-check."""

    def __init__(self, parts: Decoder, runtime: Runtime, max_rows: int, *, is_timed: bool = False) -> None:
        self._parts, self._runtime, self._max_rows, self._is_timed = parts, runtime, max_rows, is_timed

    def run(self, plans: Mapping[int, SemanticKvPlan], step: Sequence[Scheduled], batch: Any) -> list[str]:
        """Compute what `plans` promised to requests of this step, before SGLang's forward of `batch`. Return the ids of
        requests that have it; raises nothing."""
        own = [each for each in step if each.number in plans]
        try:
            self._planned(plans, own, batch)
            return [each.rid for each in own]
        except Exception:
            logger.exception("KV reuse is off from now on: a plan could not be executed; its tokens are computed")
            self._runtime.faults["planned_forward"] += 1
            self._runtime.refusal = self._runtime.refusal or "planned_forward"
        done = []
        for each in own:
            self._runtime.failed_loads.append(each.number)
            try:
                self._whole(plans[each.number], each, batch)
                done.append(each.rid)
            except Exception:
                logger.exception("nor can SGLang's decoder compute them now; the request begins again")
        return done

    @torch.inference_mode()
    def _planned(self, plans: Mapping[int, SemanticKvPlan], own: Sequence[Scheduled], batch: Any) -> None:
        slots, nothing = [self._slots(batch, each) for each in own], batch.input_ids.new_empty(0)
        numbers, begins = tuple(each.number for each in own), tuple(each.begin for each in own)
        promised = Batch(numbers, begins, tuple(each.tokens for each in own), len(own), nothing)
        forward = self._forward(batch, self._max_rows, _PromisedForward)
        promised.run(plans, slots, forward, self._runtime.note_evidence)

    def _whole(self, plan: SemanticKvPlan, request: Scheduled, batch: Any) -> None:
        """Have SGLang's decoder compute all that the plan promised, part by part."""
        begin, end = plan.num_computed_tokens, plan.prefix_end
        device = batch.input_ids.device
        slots = torch.tensor(self._slots(batch, request), device=device)
        tokens = torch.from_numpy(plan.prompt_token_ids).to(device)
        for start in range(begin, end, self._max_rows):
            part = slice(start, min(end, start + self._max_rows))
            stock_rows(self._parts.runner, range_batch(batch, request.row, tokens[part].long(), start, slots[part]))

    def _slots(self, batch: Any, request: Scheduled) -> list[int]:
        """The slots of the request's tokens, this step's among them."""
        held = self._parts.runner.req_to_token_pool.req_to_token
        found: list[int] = held[batch.req_pool_indices[request.row], : request.begin + request.tokens].tolist()
        return found

    def _forward(self, batch: Any, max_rows: int | None, kind: type[EngineForward] = EngineForward) -> EngineForward:
        parts, ranks, layers = self._parts, self._runtime.ranks, self._parts.geometry.num_layers

        def run(schedule: LayerSchedule, sink: EvidenceSink | None) -> torch.Tensor:
            with SglangRows(parts, schedule, batch) as rows:
                return follow_all(rows, schedule, layers, ranks, sink)

        def lowest(schedule: LayerSchedule) -> Any:
            with SglangRows(parts, schedule, batch) as rows:
                return follow(rows, schedule, layers, ranks)

        return kind(parts.geometry, ranks, run, lowest, max_rows)

    def prove(self, step: Sequence[Scheduled], batch: Any) -> None:
        """Compute the engine's first long enough prompt again, by SGLang's decoder and by planned rows; never raises.
        They write the prompt's own slots, whose KV is put back as it was."""
        fits = [each for each in step if each.begin == 0 and each.tokens >= MIN_TOKENS]
        if not fits:
            return
        try:
            self._prove(fits[0], batch)
        except Exception as error:
            reason = error.reason if isinstance(error, LayoutError) else "self_check"
            logger.warning("plans are not executed on this engine (%s): %s", reason, error, exc_info=True)
            self._runtime.faults["self_check"] += 1
            self._runtime.refusal = self._runtime.refusal or reason
            return
        self._runtime.mode = EngineMode.WRAPPER
        logger.info("plans are executed on this engine: its first prompt came out the same")

    @torch.inference_mode()
    def _prove(self, request: Scheduled, batch: Any) -> None:
        """Raises LayoutError with what differs."""
        parts, tokens = self._parts, min(request.tokens, MAX_TOKENS)
        slots = self._slots(batch, request)[:tokens]
        first = sum(map(int, batch.extend_seq_lens_cpu[: request.row]))
        ids = batch.input_ids[first : first + tokens].long()
        held = torch.tensor(slots, device=ids.device)

        def run(own: Batch, plans: Mapping[int, SemanticKvPlan], max_rows: int | None) -> torch.Tensor:
            return own.run(plans, [slots], self._forward(batch, max_rows))

        planes = parts.pool.planes
        kept = [plane.index_select(0, held) for plane in planes]
        try:
            stock = stock_rows(parts.runner, range_batch(batch, request.row, ids, 0, held))
            given = ids, stock, parts.geometry, parts.pool.dtype, run
            raise_difference([*differences(*given), sample_difference(*given)], self._runtime.ranks)
            check_rotation(parts, batch, ids)
            if self._is_timed:
                self._measure(ids, slots, batch)
        finally:
            for plane, own in zip(planes, kept, strict=True):
                plane.index_copy_(0, held, own)

    def _measure(self, ids: torch.Tensor, slots: list[int], batch: Any) -> None:
        """Measures what plans cost, by prompts of these tokens over these slots alone."""
        parts, runtime, longest = self._parts, self._runtime, min(self._parts.longest, self._max_rows)
        forward = self._forward(batch, self._max_rows)

        def run(tokens: list[int], begin: int, own: list[int], plan: SemanticKvPlan | None) -> None:
            given = torch.tensor(tokens[begin:], device=ids.device)
            Batch((0,), (begin,), (len(given),), 1, given).run({} if plan is None else {0: plan}, [own], forward)

        kv = PagedKv(parts.pool, block_vector(slots), parts.geometry)
        runtime.costs = measured(run, ids.tolist(), kv, parts.rotation, runtime.ranks, longest)


def range_batch(batch: Any, row: int, token_ids: torch.Tensor, begin: int, slots: torch.Tensor) -> Any:
    """Return a batch of one request, SGLang's in `row`: its tokens from position `begin` on.

    `token_ids`, int64 [tokens]; `slots`, where their KV goes, of the same length."""
    end = begin + len(token_ids)
    own = rows_batch(batch, token_ids, torch.arange(begin, end, device=token_ids.device))

    def one(value: int, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor([value], dtype=like.dtype, device=like.device)

    own.req_pool_indices = batch.req_pool_indices[row : row + 1]
    own.seq_lens, own.seq_lens_cpu = one(end, batch.seq_lens), torch.tensor([end], dtype=torch.int64)
    own.seq_lens_sum = end
    own.out_cache_loc = slots.to(batch.out_cache_loc.dtype)
    own.extend_seq_lens, own.extend_seq_lens_cpu = one(end - begin, batch.extend_seq_lens), [end - begin]
    own.extend_prefix_lens, own.extend_prefix_lens_cpu = one(begin, batch.extend_prefix_lens), [begin]
    if batch.extend_start_loc is not None:
        own.extend_start_loc = one(0, batch.extend_start_loc)
    own.forward_metadata_ready = False
    return own


def stock_rows(runner: Any, batch: Any) -> torch.Tensor:
    """Have SGLang's own decoder compute `batch`, as `range_batch` makes it; return its rows, [tokens, hidden].

    It needs the attention backend's metadata, which SGLang makes again for its own forward after this one."""
    with in_forward(runner, batch):
        runner.attn_backend.init_forward_metadata(batch)
        hidden: torch.Tensor = runner.model.model(batch.input_ids, batch.positions, batch)
    return hidden
