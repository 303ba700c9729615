"""SGLang as the engine of an arm: its scheduler with its own loop, in this process.

SGLang's servers run the scheduler in a process of its own, where logits cannot be read."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        import torch
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
        """Answer the requests together; return SGLang's Req of each, which has ended."""
        self._waiting, self._asked = [self._request(each) for each in asked], []
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
        return list(self._asked)

    def run_idle(self) -> None:
        """Have the scheduler run once without a request: it then checks its pool for leaks."""
        self.ask()

    def close(self) -> None:
        """End the engine; another one may be opened then."""
        from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory

        if (close := getattr(self.cache, "close", None)) is not None:
            close()
        cleanup_dist_env_and_memory()

    def _request(self, asked: Ask) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(**{"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, **asked.sampling})
        sampling.normalize(None)
        given = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0, **asked.options}
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
            **given,
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


def is_installed() -> bool:
    """Return True if SGLang can be imported here."""
    return find_spec("sglang") is not None
