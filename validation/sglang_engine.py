"""SGLang as the engine of an arm: its scheduler with its own loop, in this process.

SGLang's servers run the scheduler in a process of its own, where logits cannot be read."""

import gc
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine_wrapper.embedded.request import RequestOutput
from semblend_trt.errors import SemBlendError
from validation.arms import Arm
from validation.engines import Asked, EngineSettings, LoadingEngines, ServingEngine, connector_variables, environment

# Options of every engine here: the CPU's own attention, if there is no card.
_ON_CPU = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
_OPTIONS = {"sampling_backend": "pytorch", "grammar_backend": "none", "mem_fraction_static": 0.3, "log_level": "error"}


@dataclass(slots=True)
class Ask:
    """One request: token ids, SGLang's sampling parameters, and a salt."""

    prompt: Sequence[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    salt: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class LocalSglang:
    """SGLang's scheduler over one model, one engine a time in a process. `scheduler` is SGLang's own."""

    def __init__(self, model: str, **options: Any) -> None:
        """Start the engine; `options` are ServerArgs'. Raises what SGLang raises."""
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        machine = {} if torch.cuda.is_available() else _ON_CPU
        arguments = ServerArgs(model_path=model, **{**_OPTIONS, **machine, **options})
        resolved = getattr(arguments, "resolve", None)
        if callable(resolved):
            resolved()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = Scheduler(arguments, PortArgs.init_new(arguments))
        self._waiting, self._asked, self._numbers = list[Any](), list[Any](), itertools.count(1)
        self.scheduler.ingest_requests = self._ingest
        self.on_step: Callable[[], None] = lambda: None

    @property
    def cache(self) -> Any:
        """The prefix cache."""
        return self.scheduler.tree_cache

    def ask(self, *asked: Ask) -> list[Any]:
        """Return SGLang's Req of each request, which has ended. Asked nothing, it checks its pool for leaks."""
        self._waiting, self._asked = [self._request(each) for each in asked], []
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        return list(self._asked)

    def settle(self) -> None:
        """Wait until what has ended is saved."""
        if (worker := getattr(self.cache, "_worker", None)) is not None:
            worker.drain()

    def close(self) -> None:
        """End the engine; another one may be opened then."""
        from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory

        if (close := getattr(self.cache, "close", None)) is not None:
            close()
        cleanup_dist_env_and_memory()
        # SGLang keeps its scheduler alive, so that the next engine's weights and KV would lie beside this one's.
        runner = self.scheduler.tp_worker.model_runner
        pools = (getattr(runner.token_to_kv_pool, name, ()) for name in ("k_buffer", "v_buffer"))
        for held in itertools.chain(runner.model.parameters(), runner.model.buffers(), *pools):
            held.untyped_storage().resize_(0)

    def _request(self, asked: Ask) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(**{"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, **asked.sampling})
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            rid=f"local{next(self._numbers)}",
            input_text="",
            input_ids=array("q", asked.prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            token_ids_logprob=None,
            stream=False,
            cache_salt=asked.salt,
            **{"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0, **asked.options},
        )

    def _ingest(self, *_: Any) -> list[Any]:
        self.on_step()
        scheduler, waiting = self.scheduler, self._waiting
        self._waiting = []
        for each in waiting:
            before = len(scheduler.waiting_queue)
            scheduler.process_input_requests([each])
            self._asked.extend(scheduler.waiting_queue[before:])
        is_busy = scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.last_batch
        scheduler.gracefully_exit = not is_busy and scheduler.chunked_req is None
        return waiting


class SglangEngines(LoadingEngines):
    """Engines of SGLang."""

    package = "sglang"
    notes = (
        "SGLang holds one engine a process here: arms are served one after the other, and a change of the machine's "
        "speed shows as a difference between them (cold_again beside cold tells how much).",
        "SGLang runs without overlap and without CUDA graphs here, in every arm: logits are read between its steps.",
        "SGLang chooses its device itself; --device is not read.",
    )

    def open(self, arm: Arm, settings: EngineSettings, audit_path: Path) -> "SglangEngine":
        """Return the arm's engine, with our prefix cache if it has variables. Raises SemBlendError."""
        options: dict[str, Any] = {} if arm.variables is None else {"radix_cache_backend": "semblend"}
        if arm.chunk_tokens is not None:
            options["chunked_prefill_size"] = arm.chunk_tokens
        try:
            with environment(connector_variables(arm, settings, str(audit_path))):
                served = LocalSglang(
                    self._model,
                    dtype=self._dtype,
                    max_total_tokens=max(settings.pool_tokens, self.facts.max_positions),
                    max_running_requests=settings.batch_size,
                    disable_overlap_schedule=True,
                    **{"disable_cuda_graph": True, **options},
                )
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise SemBlendError(f"SGLang does not start: {error}") from error
        return SglangEngine(served)


class SglangEngine(ServingEngine):
    """One engine. It reads logits before the sampler does; to force an answer, it leaves the sampler one token."""

    title = "SGLang"

    def __init__(self, served: LocalSglang) -> None:
        self._served = served
        self._readings: dict[str, Asked] = {}
        self._runner = served.scheduler.tp_worker.model_runner
        self._stock = self._runner.sample
        self._runner.sample = self._sample

    def _answers(self, asked: Sequence[Asked]) -> list[RequestOutput]:
        self._readings = {f"local{each.number}": each for each in asked}
        asks, found = list[Ask](), list[Any]()
        for each in asked:
            own = {"max_new_tokens": each.params.max_tokens, "ignore_eos": each.params.ignore_eos}
            asks.append(Ask(each.prompt, own | {"stop_token_ids": each.stops}, each.salt, {"return_logprob": False}))
        for ended in self._served.ask(*asks):
            reason = ended.finished_reason.to_json()["type"]
            found.append(self._readings[ended.rid].answered(ended.output_ids, reason, ended.cached_tokens))
        return found

    def settle(self) -> None:
        self._served.settle()

    def shutdown(self) -> None:
        self._runner.sample = self._stock
        self._served.close()
        del self._served, self._runner, self._stock
        gc.collect()

    def _sample(self, output: Any, batch: Any) -> Any:
        """The sampler's own tokens; keep the logits, [requests of the step, vocabulary], that it uses."""
        scheduler, logits = self._served.scheduler, output.next_token_logits
        running = {each.rid: each for each in scheduler.cur_batch_for_debug.reqs}
        for row, name in enumerate(batch.rids):
            reading, request = self._readings.get(name), running[name]
            # SGLang drops what it samples after a part of the prompt.
            if reading is None or (batch.forward_mode.is_extend() and request is scheduler.chunked_req):
                continue
            reading.take(logits[row], len(request.output_ids))
        sampled = self._stock(output, batch)
        for name in batch.rids:
            reading = self._readings.get(name)
            if reading is not None and reading.rows:
                reading.has_token()
        return sampled
