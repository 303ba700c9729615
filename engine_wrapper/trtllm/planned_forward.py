"""Executes plans in TensorRT-LLM's own decoder, once a self-check on its first prompt has passed.

The self-check computes a cold prompt of the engine again by our rows, over memory of their own. Hidden rows and KV have
to agree (`engine_wrapper.self_check`).

The blocks of a forward's requests are read from the cache manager at every plan, as rows of the pool. V1's
`get_batch_cache_indices` gives rows. V2's gives a row times the number of layers, so V2 is asked by layer group. V2
exchanges a request's block for an equal one as it commits it. Rows that it gave before may then be another request's.

Facts: NVIDIA/TensorRT-LLM, `_torch/attention_backend/interface.py`, `AttentionMetadata` (1.1 to 1.3), and
`_torch/attention/backends/interface.py` (main): sequences are in one row of tokens, those in context first;
`_torch/pyexecutor/resource_manager.py` (V1) and `kv_cache/kv_cache_manager_v2.py` (V2, main):
`get_page_indices_by_layer_group` reads the request's id alone, and gives -1 for a block without a page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from engine_wrapper.batch import Batch, EngineForward, LastSamples
from engine_wrapper.self_check import MAX_TOKENS, MIN_TOKENS, difference, differences, raise_difference
from engine_wrapper.trtllm.hooks import hook_decoder, hooked_layers, shown_by
from engine_wrapper.trtllm.planned_rows import CheckReached, PlannedRows, attend, begin
from kernels.layout import pool_view
from semblend_trt.errors import LayoutError
from semblend_trt.plan import EngineMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine_wrapper.layer_schedule import EvidenceSink, LayerSchedule
    from engine_wrapper.patches import Undo
    from kernels.layout import KvGeometry
    from kernels.rope import Rotation
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.ranks import Ranks
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

Options = dict[str, Any]
# Returns the rows of each of these requests, by position.
BlockTable = Callable[[Sequence[int]], list[list[int]]]


def table_for(manager: Any) -> BlockTable | None:
    """Return the table of a cache manager; None for one that is neither V1 nor V2, or lacks the method."""
    kind = type(manager).__name__
    if kind == "KVCacheManager" and callable(shown_by(manager, "get_batch_cache_indices")):
        return lambda ids: [list(map(int, own)) for own in manager.get_batch_cache_indices(list(ids))]
    if kind != "KVCacheManagerV2" or not callable(shown_by(manager, "get_page_indices_by_layer_group")):
        return None

    def rows(request_id: int) -> list[int]:
        # All that V2 reads of a request is its id.
        groups = manager.get_page_indices_by_layer_group(SimpleNamespace(py_request_id=request_id))
        if len(groups) != 1:
            raise LayoutError("layer_groups", f"request {request_id} has blocks of {len(groups)} layer groups, not one")
        return list(map(int, groups[0]))

    return lambda request_ids: list(map(rows, request_ids))


def batch_of_call(options: Mapping[str, Any]) -> Batch:
    """Return the batch of a call of the decoder's forward. Raises LayoutError if it is unreadable or not supported."""
    for name in ("inputs_embeds", "lora_params", "spec_metadata", "mrope_config"):
        value = options.get(name)
        if value is not None and value != {}:
            raise LayoutError("model_call", f"the model was called with {name}, which plans do not support")
    metadata, input_ids = options.get("attn_metadata"), options.get("input_ids")
    try:
        lengths = tuple(map(int, metadata.seq_lens.tolist()))  # type: ignore[union-attr]
        begins = tuple(map(int, metadata.kv_cache_params.num_cached_tokens_per_seq))  # type: ignore[union-attr]
        ids = tuple(map(int, metadata.request_ids))  # type: ignore[union-attr]
        contexts = int(metadata.num_contexts)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError) as error:
        raise LayoutError("model_call", f"the attention metadata cannot be read: {error}") from error
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 1 or len(input_ids) != sum(lengths):
        raise LayoutError("model_call", f"input_ids are not the {sum(lengths)} tokens that the metadata names")
    if not len(ids) == len(begins) == len(lengths) or contexts > len(ids):
        raise LayoutError("model_call", "the fields of the metadata name different numbers of sequences")
    return Batch(ids, begins, lengths, contexts, input_ids)


def _contexts_of(options: Mapping[str, Any]) -> list[int] | None:
    """Return the ids of the batch's contexts; None if the metadata is not given by name."""
    metadata = options.get("attn_metadata")
    return None if metadata is None else list(metadata.request_ids)[: metadata.num_contexts]


@dataclass(frozen=True, slots=True)
class PlannedDecoder:
    """`forward` is the decoder's own, hooked; its KV goes into `pool`. `windows`, `ranks`: as in PlannedRows."""

    forward: Callable[..., torch.Tensor]
    pool: torch.Tensor
    geometry: KvGeometry
    rotation: Rotation
    windows: tuple[int | None, ...]
    ranks: Ranks
    last_samples: LastSamples = field(default_factory=LastSamples)

    def run(
        self,
        batch: Batch,
        plans: Mapping[int, SemanticKvPlan],
        blocks: list[list[int]],
        options: Options,
        max_rows: int | None = None,
        evidence_sink: EvidenceSink | None = None,
    ) -> torch.Tensor:
        """Run a batch; return the hidden rows that the engine scheduled, [tokens, hidden], in its order.

        `options` are those of the engine's call, `blocks` the block ids of every request. No forward has more than
        `max_rows` rows. Raises PlanError if a plan does not fit its request, and ValueError if a block is missing.
        Raises LayoutError if the decoder calls its layers in another way."""

        def call(schedule: LayerSchedule, rows: PlannedRows) -> torch.Tensor:
            token_ids = schedule.token_ids.to(options["input_ids"].dtype)
            positions = rows.positions.to(options["position_ids"].dtype)[None]
            return self.forward(**{**options, "input_ids": token_ids, "position_ids": positions, "attn_metadata": rows})

        layers = self.pool, self.geometry, self.rotation, self.windows, self.ranks

        def run(schedule: LayerSchedule, sink: EvidenceSink | None) -> torch.Tensor:
            rows = PlannedRows(schedule, *layers, sink)
            return rows.finish(call(schedule, rows))

        def lowest(schedule: LayerSchedule) -> torch.Tensor:
            rows = PlannedRows(schedule, *layers, None, True)
            with suppress(CheckReached):
                call(schedule, rows)
            if rows.found is None:
                raise LayoutError("model_call", "the decoder ended before the layer in which its rows are compared")
            return rows.found

        forward = EngineForward(self.geometry, self.ranks, run, lowest, max_rows, last_samples=self.last_samples)
        return batch.run(plans, blocks, forward, evidence_sink)

    def prove(self, batch: Batch, options: Options, hidden: torch.Tensor, block_ids: list[int]) -> None:
        """Run the self-check on the batch's first sequence, a prompt from position 0.

        `hidden`: the engine's own rows of the batch, [tokens, hidden]; the request's KV is in `block_ids`. Raises
        LayoutError `self_check` with what differs, on every rank if it does on one."""
        tokens = min(batch.lengths[0], MAX_TOKENS)
        positions = options["position_ids"].flatten()[:tokens]
        if not torch.equal(positions, torch.arange(tokens, dtype=positions.dtype, device=positions.device)):
            raise LayoutError("self_check", "the engine counts positions in another way")
        blocks = list(range(self.geometry.blocks_for(tokens)))
        scratch = replace(self, pool=self.pool.new_zeros(len(blocks), *self.pool.shape[1:]))

        def run(batch: Batch, plans: Mapping[int, SemanticKvPlan], max_rows: int | None) -> torch.Tensor:
            return scratch.run(batch, plans, [blocks], options, max_rows)

        def kv() -> Iterator[str | None]:
            for layer in range(self.geometry.num_layers):
                theirs = self._kv(block_ids[: len(blocks)], layer, tokens)
                yield difference(f"KV of layer {layer}", scratch._kv(blocks, layer, tokens), theirs, self.pool.dtype)

        rows = differences(batch.input_ids[:tokens], hidden[:tokens].clone(), self.geometry, self.pool.dtype, run)
        # The KV is compared when the whole prompt has run, before plans write it again.
        raise_difference([next(rows), *kv(), *rows], self.ranks)

    def _kv(self, block_ids: list[int], layer: int, tokens: int) -> torch.Tensor:
        """Return K and V, [2, kv_heads, tokens, head_dim]."""
        chosen = pool_view(self.pool, self.geometry)[block_ids, layer]
        return chosen.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]


class PlannedForward:
    """Replaces the decoder's forward, which still gets batches without a plan.

    The runtime stays in stock mode until the self-check has passed, so that no plan is made before. If it fails, the
    decoder is left as it was found. Nothing is raised into a forward of one rank: under the overlap scheduler that ends
    the engine. If a plan cannot be executed, its matched tokens are computed, and the decoder's own forward runs then.
    Nothing is reused after that. If that fails too, the request is `failed` in the runtime."""

    def __init__(
        self, decoder: Any, table: BlockTable, runtime: Runtime, pool: torch.Tensor, facts: ModelFacts,
        max_rows: int | None,
    ) -> None:  # fmt: skip
        """Hook nothing yet. `table` gives the blocks of the engine's requests; `max_rows`: most tokens of a forward."""
        assert runtime.pool is not None
        self._table, self._runtime, self._max_rows = table, runtime, max_rows
        self._hooked, self._stock = decoder, decoder.forward
        self._undo: Undo = lambda: None
        self._decoder = PlannedDecoder(
            self._stock, pool, runtime.pool.geometry, facts.rotation, facts.windows, runtime.ranks
        )
        self._is_judged = False

    def install(self) -> None:
        """Hook the decoder. Raises, with the decoder untouched, if that is not possible."""
        self._undo = hook_decoder(self._hooked, self._forward)

    def remove(self) -> None:
        """Leave the decoder as it was found."""
        self._undo()
        self._is_judged = True

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        if len(self._runtime.active_plans) and (contexts := _contexts_of(options)):
            plans = self._runtime.active_plans.take_all(contexts)
            hidden = self._planned(plans, options) if plans else None
            return self._stock(*arguments, **options) if hidden is None else hidden
        hidden = self._stock(*arguments, **options)
        if not self._is_judged and _contexts_of(options) != []:
            self._prove(options, hidden)
        return hidden

    def _planned(self, plans: dict[int, SemanticKvPlan], options: Options) -> torch.Tensor | None:
        """Return the batch's hidden rows, [tokens, hidden]; None if the decoder's own forward has to compute them."""
        try:
            batch = batch_of_call(options)
            blocks = self._table(batch.request_ids)
            found = dict(zip(batch.request_ids, blocks, strict=True))
            plans = {each: self._in_its_blocks(plan, found[each]) for each, plan in plans.items()}
            with hooked_layers(self._hooked, begin, attend):
                return self._decoder.run(batch, plans, blocks, options, self._max_rows, self._runtime.note_evidence)
        except Exception:
            logger.exception("KV reuse is off from now on: a plan could not be executed")
            self._runtime.faults["planned_forward"] += 1
            self._runtime.refusal = self._runtime.refusal or "planned_forward"
            if self._runtime.ranks.size > 1:
                raise  # the other ranks run on, and would wait for this one
        for plan in plans.values():
            self._compute(plan, options)
        return None

    def _in_its_blocks(self, plan: SemanticKvPlan, blocks: list[int]) -> SemanticKvPlan:
        """Return the plan, or one that computes all if the request has other blocks than those that were loaded.

        Raises LayoutError for a block without a page."""
        if min(blocks[: self._decoder.geometry.blocks_for(plan.prompt_length)], default=0) < 0:
            raise LayoutError("page_missing", f"request {plan.request_id} has a block without a page")
        loaded = plan.target_block_ids or ()
        if loaded == tuple(blocks[: len(loaded)]) or not plan.spans:
            return plan
        logger.warning("request %d: its blocks are not those that were loaded; all is computed", plan.request_id)
        self._computes_whole(plan)
        return plan.without_spans("target_blocks")

    def _compute(self, plan: SemanticKvPlan, options: Options) -> None:
        """Compute what the engine skips of a request with a plan, in a forward of its own. Never raises."""
        try:
            batch = batch_of_call(options)
            start, end = plan.num_computed_tokens, batch.begins[batch.request_ids.index(plan.request_id)]
            if start < end:
                input_ids = torch.from_numpy(plan.prompt_token_ids[start:end].copy()).to(batch.input_ids)
                skipped = Batch((plan.request_id,), (start,), (end - start,), 1, input_ids)
                with hooked_layers(self._hooked, begin, attend):
                    self._decoder.run(skipped, {}, self._table(skipped.request_ids), options, self._max_rows)
        except Exception:
            logger.exception("request %d fails: what it was promised cannot be computed either", plan.request_id)
            self._runtime.active_plans.withhold(plan)
            self._runtime.failed_loads.append(plan.request_id)
            self._runtime.failed.add(plan.request_id)
        else:
            self._computes_whole(plan)

    def _computes_whole(self, plan: SemanticKvPlan) -> None:
        self._runtime.active_plans.lift_limit(plan.request_id)
        self._runtime.failed_loads.append(plan.request_id)

    def _prove(self, options: Options, hidden: torch.Tensor) -> None:
        """Run the self-check on the first batch that allows it. Never raises."""
        try:
            batch = batch_of_call(options)
            if not batch.contexts or batch.begins[0] != 0 or batch.lengths[0] < MIN_TOKENS:
                return
            with hooked_layers(self._hooked, begin, attend):
                self._decoder.prove(batch, options, hidden, self._table(batch.request_ids)[0])
        except Exception as error:
            reason = error.reason if isinstance(error, LayoutError) else "self_check"
            logger.warning("plans are not executed on this engine (%s): %s", reason, error)
            self._runtime.faults["self_check"] += 1
            self.remove()
            return
        self._is_judged = True
        # A context of one token may run as a decode step, and a replayed one runs no Python.
        self._runtime.tokens_left = 2
        self._runtime.mode = EngineMode.WRAPPER
        logger.info("plans are executed on this engine: the self-check has passed")
