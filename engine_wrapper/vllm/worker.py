"""The worker half inside vLLM: the worker half for every engine, over vLLM's caches and its model runner."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from engine_wrapper.kv_scales import E4M3, are_of_heads, head_scales
from engine_wrapper.vllm.attention import own_builder
from engine_wrapper.vllm.decoder import (
    Decoder,
    compare_windows,
    in_order,
    layer_calls_of,
    layered_pool,
    layout_of,
    unfused_of,
)
from engine_wrapper.vllm.engine_spec import scales_of
from engine_wrapper.vllm.hooks import chunk_of, find_runner, watch_worker_calls
from engine_wrapper.vllm.planned_forward import PlannedForward
from engine_wrapper.vllm.refusals import are_workers_apart
from engine_wrapper.vllm.report import Reporter, StartReport
from engine_wrapper.vllm.scheduler import StepMetadata, recovery_for
from engine_wrapper.vllm.stats import tell_used
from semblend_trt.config import load_settings
from semblend_trt.connector import SemBlendKvConnectorWorker
from semblend_trt.connector.contract import never_raises
from semblend_trt.errors import ConfigurationError, LayoutError
from semblend_trt.plan import EngineMode
from semblend_trt.runtime import Weights, runtime_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_wrapper.kv_scales import Scale
    from engine_wrapper.vllm.adapters import LoadedAdapters
    from engine_wrapper.vllm.decoder import CacheLayout
    from engine_wrapper.vllm.hooks import ModelRunner
    from engine_wrapper.vllm.report import StepReport
    from engine_wrapper.vllm.scheduler import Scheduled
    from kernels.layout import LayeredPool
    from semblend_trt.connector.engine_spec import EngineSpec
    from semblend_trt.plan import SemanticKvPlan

logger = logging.getLogger(__name__)


class _Worker(SemBlendKvConnectorWorker):
    attention: Sequence[Any] = ()
    scales: Sequence[tuple[Scale, Scale]] = ()

    def register_nothing(self, refusal: str) -> None:
        """Refuse the caches, together with the other ranks."""
        self._register(None, refusal)

    def _have_scales_changed(self) -> bool:
        return [scales_of(each) for each in self.attention[: len(self.scales)]] != list(self.scales)


class VllmWorker:
    """Serves the worker's role as vLLM calls it; no method raises into the engine. If promised KV cannot be had,
    planned rows compute it in the same step. If they cannot, vLLM computes it again."""

    def __init__(self, arguments: EngineSpec, vllm_config: Any) -> None:
        self._runtime = runtime_for(arguments)
        self._worker = _Worker(arguments)
        self._settings = load_settings(**arguments.settings)
        self._config = vllm_config
        self._max_rows = int(vllm_config.scheduler_config.max_num_batched_tokens)  # of one forward
        self._forward: PlannedForward | None = None
        self._replayed = 0  # see `ModelRunner`
        self._undo = ExitStack()
        self.recovery = recovery_for(arguments)
        self._layout: CacheLayout | None = None
        self._caches: Mapping[str, torch.Tensor] = {}  # by layer
        self._adapters: LoadedAdapters | None = None
        self._saving: dict[int, str] = {}
        self._arguments, self._suspicions = arguments, 0
        self._reporter = Reporter(self._runtime) if are_workers_apart(vllm_config) else None
        self._step: Mapping[str, Scheduled] = {}

    def register_kv_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take vLLM's caches as a pool and hook its model, or have vLLM serve as stock. Never raises."""
        pool = None if self._runtime.refusal is not None else self._pool_of(caches)
        if pool is None:
            self._runtime.refusal = reason = self._runtime.refusal or "pool_layout"
            if self._arguments.ranks > 1 and self._arguments.refusal is None:
                self._worker.register_nothing(reason)
            from semblend_trt.reasons import Scope, advice  # not for an engine that is served

            logger.warning("KV is not reused (%s); vLLM serves as without us. %s", reason, advice(reason, Scope.VLLM))
            return
        try:
            self._worker.register_kv_caches(pool)  # type: ignore[arg-type]
        except ConfigurationError as error:
            logger.error("KV reuse is off: %s", error)
            self._runtime.refusal = "settings_invalid"
        if self._runtime.pool is not None and self._runtime.refusal is None:
            self._hook(pool)
            # What any rank refuses, all refuse: one that went on alone would wait for the others.
            refusals = self._runtime.ranks.gather(self._runtime.refusal)
            if (refusal := next((each for each in refusals if each is not None), None)) is not None:
                self._runtime.refusal, self._forward = refusal, None
                self._undo.close()
        if self._runtime.refusal is None:
            settings = self._settings
            on = [f"policy {settings.policy.value}" if settings.enabled else "off, since SEMBLEND_ENABLED is 0"]
            for name in ("profile_path", "device_bytes", "host_bytes", "disk_bytes"):
                on += [f"{name} {value}"] if (value := getattr(settings, name)) else []
            logger.info("KV reuse, once the engine's first prompt has come out the same: %s", ", ".join(on))

    def start_report(self) -> StartReport | None:
        """Return what the scheduler's process has to know of this rank; None if it is this process."""
        if self._reporter is None:
            return None
        return StartReport(self._runtime.refusal, self._runtime.pool, self._arguments.read_caches())

    @never_raises(lambda: None)
    def step_report(self) -> StepReport | None:
        """Return what is new on this rank, for the scheduler of another process; None if nothing is."""
        if self._reporter is None:
            return None
        return self._reporter.report(begins_again=self.recovery.takes_begin_again())

    @staticmethod
    def step_of(metadata: object) -> StepMetadata:
        """Return the bound metadata; that of an empty step for any other object."""
        return metadata if isinstance(metadata, StepMetadata) else StepMetadata()

    @never_raises(lambda: None)
    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Apply the step's metadata: place plans' spans, on the current stream of the model runner."""
        self._begin(metadata.step)
        if metadata.is_unread:
            self.recovery.compute_again(self.recovery.all_blocks)
        self._saving.update(metadata.saving)
        if metadata.suspicions != self._suspicions and self._runtime.weights is not None:
            self._suspicions = metadata.suspicions
            self._runtime.weights.suspect()
        self._worker.bind_connector_meta(metadata.told)
        try:
            self._worker.start_load_kv(torch.cuda.current_stream() if torch.cuda.is_available() else None)
            stale = self._stale_adapters(metadata)
        except Exception:
            logger.exception("donors cannot be placed; what was promised is computed")
            self._runtime.faults["start_load_kv"] += 1
            for plan in metadata.told.plans:
                # To compute one request again, vLLM begins all that run again, so planned rows come first.
                if self._forward is None or plan.execution.mode is not EngineMode.WRAPPER:
                    self._fail(plan)
                    continue
                self._compute(plan)
            stale = set()
        for plan in metadata.told.plans:
            if plan.request_id in stale:
                self._compute(plan)
        # The forward ends what has begun here, and it does not run.
        self._runtime.is_forward_open &= not self._is_replayed(metadata.step)

    @never_raises(lambda: None)
    def wait_for_save(self, metadata: StepMetadata) -> None:
        """End the step. A plan that its forward has not executed would leave holes: vLLM computes it again."""
        for plan in self._runtime.active_plans.take_all(each.number for each in metadata.step.values()).values():
            self._runtime.faults["plan_not_executed"] += 1
            # A small budget may leave a prompt so few tokens of a step that a full graph replays it.
            if not self._is_replayed(metadata.step):
                self._runtime.refusal = self._runtime.refusal or "plan_not_executed"
            self._fail(plan)
        names = {each.number: name for name, each in metadata.step.items()}
        for plan in metadata.told.plans if self._reporter is None else ():
            tell_used(self.recovery.scheduler, names.get(plan.request_id), plan, self._runtime.scheduler)
        self._begin({})
        self._worker.wait_for_save(None)

    @never_raises(lambda: None)
    def get_finished(self, metadata: StepMetadata) -> set[str] | None:
        """Begin to save requests that have ended; return vLLM's ids of those whose blocks may go now."""
        ended, _ = self._worker.get_finished(list(metadata.saving), [])
        return {self._saving.pop(number) for number in ended if number in self._saving} or None

    def close(self) -> None:
        """End what is being saved, and leave the model as it was found."""
        self._undo.close()
        self._worker.close()

    def _begin(self, step: Mapping[str, Scheduled]) -> None:
        self._step = step
        if self._forward is not None:
            self._forward.step = step

    def _is_replayed(self, step: Mapping[str, Scheduled]) -> bool:
        """Return whether a full graph may replay the step, so that the model's forward does not run."""
        return all(each.tokens <= self._replayed for each in step.values())

    def _stale_adapters(self, metadata: StepMetadata) -> set[int]:
        """Requests whose plans were made for other weights of their adapter than are loaded by now."""
        if self._adapters is None:
            return set()
        self._adapters.begin(metadata.step)
        self._adapters.read()
        of = {each.number: each.adapter for each in metadata.step.values()}
        known = self._runtime.adapters
        return {number for number, weights in metadata.adapters.items() if known.get(of.get(number, 0)) != weights}

    def _compute(self, plan: SemanticKvPlan) -> None:
        """Have our rows compute all that a plan promised."""
        self._runtime.failed_loads.append(plan.request_id)
        self._runtime.active_plans.put(plan.without_spans("load_failed"))

    def _fail(self, plan: SemanticKvPlan) -> None:
        blocks = next((each.block_ids for each in self._step.values() if each.number == plan.request_id), ())
        first, last = plan.num_computed_tokens // plan.block_size, -(-plan.prefix_end // plan.block_size)
        self._runtime.active_plans.take(plan.request_id)
        self._runtime.failed_loads.append(plan.request_id)
        self.recovery.compute_again(blocks[first:last])

    def _pool_of(self, caches: Mapping[str, torch.Tensor]) -> LayeredPool | None:
        try:
            modules = self._config.compilation_config.static_forward_context
            self._caches = caches = in_order(caches)
            if not caches:
                return None
            self._worker.attention = attention = [modules[name] for name in caches]
            held = list(caches.values())
            self._layout = self._layout_of(held[0], attention)
            return None if self._layout is None else layered_pool(held, self._layout)
        except LayoutError as error:
            logger.warning("vLLM's caches are of a kind that is not taken: %s", error)
            self._runtime.refusal = error.reason
            return None
        except Exception:
            logger.exception("vLLM's caches cannot be examined")
            return None

    def _layout_of(self, cache: torch.Tensor, attention: list[Any]) -> CacheLayout | None:
        """Raises LayoutError if KV is stored by scales that are not known, or in another fp8 than e4m3fn."""
        own = self._config.cache_config
        if own.cache_dtype in E4M3:
            if current_platform.is_fp8_fnuz():
                raise LayoutError("kv_cache_dtype", "this machine's fp8 is e4m3fnuz; e4m3fn is taken")
            self._worker.scales = [scales_of(each) for each in attention]
        first, of_heads = attention[0], are_of_heads(self._worker.scales)
        shape = int(first.num_kv_heads), int(own.block_size), int(first.head_size)
        pairs: list[tuple[Scale, Scale] | None] = [*self._worker.scales] or [None]
        # A backend that stores by one scale shows it only if heads differ in theirs.
        probed = zip(attention if of_heads else attention[:1], pairs, strict=False)
        layouts = [layout_of(cache, each, shape, self._config.model_config.dtype, pair) for each, pair in probed]
        if of_heads and None in layouts:
            raise LayoutError(
                "kv_scales", "there are scales for each head, by which this attention backend stores none"
            )
        return layouts[0]

    def _hook(self, pool: LayeredPool) -> None:
        """Have the model execute plans once its first prompt comes out the same, else reuse nothing. Never raises."""
        with ExitStack() as undo:
            try:
                runner = find_runner()
                undo.callback(runner.remove)
                self._runtime.weights = weights = Weights(runner.model)
                if self._reporter is None:
                    undo.callback(watch_worker_calls(weights))
                else:
                    assert self._runtime.pool is not None
                    self.recovery.bind_apart(self._config, self._runtime.pool.num_blocks)
                if runner.adapters is not None:
                    from engine_wrapper.vllm.adapters import LoadedAdapters

                    self._adapters = LoadedAdapters(runner.adapters, self._runtime.adapters)
                decoder, is_timed = self._decoder(runner, pool), self._settings.min_saving > 0
                self._replayed = runner.replayed
                self._runtime.tokens_left = 1 + runner.replayed
                given = runner, decoder, self._runtime, self._fail, self._max_rows
                self._forward = PlannedForward(*given, is_timed=is_timed)
                undo.callback(self._forward.remove)
                self._undo = undo.pop_all()
            except Exception as error:
                logger.warning("KV is not reused: plans cannot be executed in this model: %s", error)
                self._runtime.faults["hook"] += 1
                reason = error.reason if isinstance(error, LayoutError) else "model_runner"
                self._runtime.refusal = self._runtime.refusal or reason

    def _decoder(self, runner: ModelRunner, pool: LayeredPool) -> Decoder:
        """The runner's decoder. Raises LayoutError or TypeError if planned rows cannot run it."""
        attention, facts, layout = tuple(self._worker.attention), self._worker.facts, self._layout
        assert self._runtime.pool is not None
        assert layout is not None
        assert facts is not None
        longest = int(self._config.model_config.max_model_len)
        compare_windows(attention, facts, longest)
        model, names = runner.text_model, tuple(self._caches)
        if len(model.model.layers) != len(names):
            raise TypeError(f"the decoder {type(model.model).__name__} is laid out in another way")
        chunks = tuple(map(chunk_of, attention))
        # The builder of an attention without chunks takes sequences as they are.
        whole = {name for name, chunk in zip(names, chunks, strict=True) if chunk is None}
        group = next((each for each in runner.groups if each.layer_names[0] in whole), runner.groups[0])
        scales = self._worker.scales if are_of_heads(self._worker.scales) else ()
        return Decoder(
            calls=layer_calls_of(model),
            names=names,
            attention=attention,
            builder=own_builder(group, self._max_rows),
            caches=tuple(self._caches.values()),
            layout=layout,
            pool=pool,
            geometry=self._runtime.pool.geometry,
            chunks=chunks,
            rotation=facts.rotation,
            longest=longest,
            head_scales=tuple(head_scales(each, layout.shape[0]).to(pool.device) for each in scales),
            unfused=unfused_of(model.model) if pool.device.type == "cuda" else (),
            adapters=self._adapters,
        )
