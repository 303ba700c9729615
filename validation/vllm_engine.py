"""vLLM as the engine of an arm, through its LLM class in this process."""

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine_wrapper.embedded.request import RequestOutput, SamplingParams
from engine_wrapper.vllm.doctor import TRANSFER
from semblend_trt.errors import SemBlendError
from validation.arms import Arm
from validation.engines import Asked, EngineSettings, LoadingEngines, ServingEngine, connector_variables, environment

_SETTLING_STEPS = 1_000  # a save begins in one step and is reported in a later one


class VllmEngines(LoadingEngines):
    """Engines of vLLM."""

    package = "vllm"
    notes = (
        "vLLM holds one engine a process: arms are served one after the other, and a change of the machine's speed "
        "shows as a difference between them (cold_again beside cold shows how much).",
        "vLLM runs eager, without async scheduling and with its V1 model runner here, in every arm: logits are read "
        "between its steps.",
        "vLLM chooses its device itself; --device is not read.",
        "vLLM's times hold the reading of the logits, which is the same in every arm.",
    )

    def __init__(self, model: str, dtype: str = "auto", kv_dtype: str = "auto") -> None:
        super().__init__(model, dtype)
        # Logits are read and answers forced in this process, through the V1 runner, which holds the step's batch.
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0")
        self._kv_dtype = kv_dtype
        # Tokens of a block. On a card vLLM 0.28 gives layers with a window blocks of 16; all are to be alike.
        self.prefix_unit = 16 if any(self.facts.windows) and torch.cuda.is_available() else 32

    def open(self, arm: Arm, settings: EngineSettings, audit_path: Path) -> "VllmEngine":
        """Return the arm's engine with our connector. Raises SemBlendError when it does not start."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = {"language_model_only": True} if self.facts.takes_images else {}
        if any(self.facts.windows) or self.facts.chunk:
            # As vLLM does with a connector; the blocks are counted for one group of layers.
            options["disable_hybrid_kv_cache_manager"] = True
        blocks = max(settings.pool_tokens, self.facts.max_positions) // self.prefix_unit + 2
        if torch.cuda.is_available():
            # By default vLLM asks for nearly all of the card, which others may use as well.
            options["kv_cache_memory_bytes"] = blocks * self.prefix_unit * self.token_bytes
            options["gpu_memory_utilization"] = 0.1  # what has to be free when an engine starts
        if arm.chunk_tokens is not None:
            options["long_prefill_token_threshold"] = min(arm.chunk_tokens, self.facts.max_positions)
        if arm.variables is not None:
            variables = connector_variables(arm, settings, str(audit_path))
            options["kv_transfer_config"] = KVTransferConfig(**TRANSFER, kv_connector_extra_config=variables)
        try:
            with environment({}):
                llm = LLM(
                    model=self._model,
                    dtype=self._dtype,
                    kv_cache_dtype=self._kv_dtype,
                    enforce_eager=True,
                    async_scheduling=False,
                    block_size=self.prefix_unit,
                    max_num_seqs=settings.batch_size,
                    num_gpu_blocks_override=blocks,
                    **options,
                )
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise SemBlendError(f"vLLM does not start: {error}") from error
        return VllmEngine(llm)


class VllmEngine(ServingEngine):
    """One engine. It reads logits before the sampler does; to force an answer, it leaves the sampler one token."""

    title = "vLLM"

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._model = self._runner.get_model()
        self._readings: dict[str, Asked] = {}
        self._compute = self._model.compute_logits
        self._model.compute_logits = self._logits

    def _answers(self, asked: Sequence[Asked]) -> list[RequestOutput]:
        from vllm import SamplingParams as Params

        engine, ended = self._llm.llm_engine, dict[str, Any]()
        names = [f"validation{each.number}" for each in asked]
        for name, each in zip(names, asked, strict=True):
            salted = {} if each.salt is None else {"cache_salt": each.salt}
            self._readings[name] = each
            sampling = Params(
                max_tokens=each.params.max_tokens,
                temperature=0.0,
                stop_token_ids=each.stops,
                ignore_eos=each.params.ignore_eos,
                detokenize=False,
            )
            engine.add_request(name, {"prompt_token_ids": each.prompt, **salted}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                self._readings[output.request_id].has_token()
                if output.finished:
                    ended[output.request_id] = output
        found = []
        for output in map(ended.__getitem__, names):
            [completion] = output.outputs
            reading = self._readings.pop(output.request_id)
            found.append(reading.answered(completion.token_ids, completion.finish_reason, output.num_cached_tokens))
        return found

    def settle(self) -> None:
        settle(self._core, lambda: self.generate([[0]], SamplingParams(max_tokens=1)))

    def shutdown(self) -> None:
        vars(self._model).pop("compute_logits", None)
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._core, self._runner, self._model, self._compute
        gc.collect()

    def _logits(self, *arguments: Any, **options: Any) -> Any:
        """Return the model's own, [requests of the step, vocabulary]; keep those that the sampler uses."""
        logits = self._compute(*arguments, **options)
        for row, name in enumerate(self._runner.input_batch.req_ids):
            # vLLM adds its own mark to our ids.
            reading, request = self._readings.get(name.partition("-")[0]), self._core.scheduler.requests[name]
            if reading is None or request.num_computed_tokens < request.num_tokens:
                continue  # vLLM samples nothing after a part of the prompt
            reading.take(logits[row], request.num_output_tokens)
        return logits


def settle(core: Any, ask_shortly: Callable[[], object]) -> None:
    """Wait until what has ended is saved and in its tier: copies slow the next prompt down. Raises SemBlendError."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    # The core holds requests until they are saved. Several ranks have their savers elsewhere, a refused engine none.
    saver: Any = get_kv_transfer_group()._worker._worker.saver if has_kv_transfer_group() else None
    for _ in range(_SETTLING_STEPS):
        if not core.scheduler.requests and (saver is None or saver._newest.done()):
            return
        ask_shortly()
    raise SemBlendError(f"saves have not ended after {_SETTLING_STEPS} steps")
