"""A stand-in for `tensorrt_llm`: names and arguments of its LLM API over the embedded engine, in this process alone."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType
from unittest import mock

from engine_wrapper.embedded import llm as embedded
from engine_wrapper.embedded.llm_args import LlmArgs
from engine_wrapper.embedded.model_runner import ModelRunner

_runners = {}


class TorchLlmArgs(LlmArgs):
    """The engine that a connector sees."""


TorchLlmArgs.__module__ = "tensorrt_llm.llmapi.llm_args"


@dataclass
class SamplingParams:
    """`tensorrt_llm/sampling_params.py`: what the validation gives of it."""

    max_tokens: int = 32
    temperature: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    return_generation_logits: bool = False

    def embedded(self):
        assert self.temperature == 0.0
        assert self.stop_token_ids is None or isinstance(self.stop_token_ids, list)
        return embedded.SamplingParams(**{name: value for name, value in vars(self).items() if name != "temperature"})


class KvCacheConfig:
    """Main's, whose default manager takes host memory unless it is told not to."""

    def __new__(cls, *, free_gpu_memory_fraction, **fields):
        assert 0 < free_gpu_memory_fraction < 1
        return embedded.KvCacheConfig(tokens_per_block=16, **fields)


class RequestOutput:
    """A request on its way: `result` waits for it, `abort` cancels it, and it can be iterated over."""

    def __init__(self, llm, stream, params):
        self._llm, self._stream, self._params, self.output = llm, stream, params, None

    def __iter__(self):
        return self

    def __next__(self):
        self.output = next(self._stream)
        return self

    def result(self, timeout=None):
        while self.output is None or not self.output.finished:
            next(self)
        self._llm.settle()
        self._llm.ended()
        return self

    def abort(self):
        self._llm.abort(self._stream.request_id)

    @property
    def prompt_token_ids(self):
        return self.output.prompt_token_ids

    @property
    def outputs(self):
        [completion] = self.output.outputs
        stops, tokens = self._params.stop_token_ids or [], list(completion.token_ids)
        if completion.finish_reason == "stop" and tokens and tokens[-1] in stops:
            tokens.pop()  # upstream leaves stop words out
        if self._llm.answers_wrongly and self._llm.has_connector:
            tokens = [token + 1 for token in tokens]
        return [replace(completion, token_ids=tokens)]


class LLM(embedded.LLM):
    """The engine. `answers_wrongly` breaks it where it has a connector, and so do the blocks that it `leaks`."""

    answers_wrongly = False
    leaks = 0
    contract = "1.4"

    def __init__(self, model, *, dtype="auto", enable_iter_perf_stats=False, gather_generation_logits=False, **rest):
        key = (str(model), "float32" if dtype == "auto" else dtype)
        if key not in _runners:
            _runners[key] = ModelRunner(*key, "cpu")
        with mock.patch.object(embedded, "LlmArgs", TorchLlmArgs):
            super().__init__(model, runner=_runners[key].share(), contract=self.contract, **rest)
        self.has_connector = self.connector_scheduler is not None
        self._has_stats, self._left_to_leak = enable_iter_perf_stats, self.leaks

    def generate(self, inputs, sampling_params=None, use_tqdm=True, cache_salt=None):
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(inputs)
        salts = cache_salt if isinstance(cache_salt, list) else [cache_salt] * len(inputs)
        asked = [self._ask(*each) for each in zip(inputs, params, salts, strict=True)]
        return [each.result() for each in asked]

    def generate_async(self, inputs, sampling_params=None, streaming=False):
        return self._ask(inputs, sampling_params, None, streaming)

    def get_stats(self, timeout=2):
        if not self._has_stats:
            return []
        return [{"iter": 0}, {"iter": 1, "kvCacheStats": {"freeNumBlocks": self.block_manager.num_free_blocks}}]

    def ended(self):
        if self._left_to_leak and self.has_connector and self._live and self.block_manager._free:
            self._left_to_leak -= 1
            self.block_manager._free.popleft()

    def _ask(self, inputs, params, salt, streaming=False):
        stream = super().generate_async(inputs, params.embedded(), streaming, salt)
        return RequestOutput(self, stream, params)


def install(monkeypatch):
    """Makes `tensorrt_llm` importable, and waits for no other process."""
    package, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi.llm_args")
    package.LLM, package.SamplingParams = LLM, SamplingParams
    api.KvCacheConfig, api.TorchLlmArgs = KvCacheConfig, TorchLlmArgs
    api.KvCacheConnectorConfig = embedded.KvCacheConnectorConfig
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi.llm_args", api)
    monkeypatch.setattr("validation.trtllm_engine.QUIET_SECONDS", 0.0)
