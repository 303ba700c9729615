"""TensorRT-LLM 1.4 as it starts by default: the embedded engine's loops over the stand-ins' decoder and V2 manager.

The wrapper attaches to it as to TensorRT-LLM's executor."""

import sys
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import engine_wrapper
import semblend_trt
from engine_wrapper import embedded
from engine_wrapper.embedded.executor import Executor
from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig
from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.runtime import runtime_for
from tests.engine_wrapper.trtllm.stand_ins import (
    BLOCK,
    AttentionMetadata,
    CausalModel,
    KVCacheManagerV2,
    PyTorchModelEngine,
)

OURS = tuple(str(package.__path__[0]) for package in (engine_wrapper, semblend_trt))
ENGINE = str(embedded.__path__[0])
# All that may run of us in a decode step: the replaced method, and one look at the pending plans.
SILENT = {"call", "_forward", "__len__"}
RECORDED_SIZES = (1, 2, 4)


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) not in ("aten.slice.Tensor", "aten.alias.default"):  # a slice of all is an alias
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class TrtllmRunner(ModelRunner):
    """Runs slices in TensorRT-LLM's decoder, and decode steps as replays of those that were recorded at the start.

    Steps of other sizes run eagerly. `hook_calls` counts our functions that run in decode steps, beyond SILENT."""

    hook_calls, kinds, watches = 0, Counter(), True

    def attach_pool(self, pool, geometry, max_rows=None):
        self.engine = PyTorchModelEngine(CausalModel(self.model, fused=True, style="main"), is_main=True)
        self.manager, self.geometry, self.recorded = None, geometry, {}

    @torch.inference_mode()
    def record(self, largest):
        self.manager.rows_of = lambda ids: [[0]] * len(ids)
        for size in range(1, largest + 1) if self.watches else ():
            slices = [SimpleNamespace(request_id=each, begin=1, token_ids=(0,)) for each in range(size)]
            with Operations() as operations:
                self._run(slices, 0)
            self.recorded[size] = operations.names
        del self.manager.rows_of
        self.manager.pool[0] = 0

    def forward(self, slices, all_rows=False):
        contexts = sum(not self.is_generating(each.request_id) for each in slices)
        if contexts:
            self.kinds["eager contexts"] += 1
            return self._run(slices, contexts)
        self.kinds["eager decode"] += 1
        return self._decode(slices)

    def replay(self, slices):
        if len(slices) not in RECORDED_SIZES:
            return self.forward(slices)
        self.kinds["replayed"] += 1
        decoder = self.engine.model.model
        hooked = vars(decoder).pop("forward", None)
        try:
            return self._decode(slices)
        finally:
            if hooked is not None:
                decoder.forward = hooked

    def _decode(self, slices):
        if not self.watches:
            return self._run(slices, 0)

        def watch(frame, event, _):
            code = frame.f_code
            is_ours = code.co_filename.startswith(OURS) and not code.co_filename.startswith(ENGINE)
            self.hook_calls += event == "call" and is_ours and code.co_name not in SILENT

        with Operations() as operations:
            sys.setprofile(watch)
            try:
                logits = self._run(slices, 0)
            finally:
                sys.setprofile(None)
        if operations.names != self.recorded[len(slices)]:
            raise RuntimeError("something ran in a decode step that was not recorded")
        return logits

    @torch.inference_mode()
    def _run(self, slices, contexts):
        metadata = AttentionMetadata(
            self.manager, [(each.request_id, each.begin, len(each.token_ids)) for each in slices], contexts
        )
        positions = [position for each in slices for position in range(each.begin, each.begin + len(each.token_ids))]
        return self.engine.model.forward(
            attn_metadata=metadata,
            input_ids=torch.tensor([token for each in slices for token in each.token_ids], dtype=torch.int),
            position_ids=torch.tensor([positions], dtype=torch.int),
            inputs_embeds=None,
        )


class PyExecutor(Executor):
    """`_torch/pyexecutor/py_executor.py`, PyExecutor (main @0b892cbf): what a connector's worker finds of it."""

    kv_cache_transceiver = drafter = None
    active_requests = property(lambda self: list(self._active.values()))

    def _register(self, connector):
        blocks, runner = self.block_manager, self.model_runner
        manager = runner.manager = KVCacheManagerV2(self.pool.tensor, runner.geometry, blocks)
        runner.is_generating = lambda request_id: not self._active[request_id].is_in_context
        runner.record(self.llm_args.max_batch_size)
        self.kv_connector_manager, self.kv_cache_manager, self.model_engine = connector, manager, runner.engine
        add = blocks.add_sequence

        def add_sequence(request_id, key, match, total_tokens):
            manager.add(request_id, [token for node in match.nodes for token in node.tokens])
            return add(request_id, key, match, total_tokens)

        def publish(request_id, _tokens):
            manager.update_context_resources(SimpleNamespace(context_requests=[self._active[request_id]]))

        blocks.add_sequence, blocks.publish = add_sequence, publish
        blocks.release = lambda request_id: manager.free_resources(SimpleNamespace(py_request_id=request_id))
        runtime_for(self.llm_args).engine = None  # as in TensorRT-LLM
        super()._register(connector)

    def _handle_errors(self, error_msg=None, *, requests=None):
        for request in requests:
            request.error = error_msg
            self._cut_short(request, "error")


class TrtllmLLM(LLM):
    executor_type = PyExecutor


def runner_of(path):
    """A runner of the tiny model of a folder, which engines may share."""
    return TrtllmRunner(path, device="cpu")


@contextmanager
def engine_of(path, runner, *, connector="engine_wrapper.connector", overlap=True, cache=None, **options):
    """An engine with our connector."""
    fields = {"tokens_per_block": BLOCK, "max_tokens": 1200, "host_cache_size": 0} | (cache or {})
    with TrtllmLLM(
        path,
        runner=runner,
        contract="1.4",
        max_seq_len=512,
        disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(**fields),
        kv_connector_config=KvCacheConnectorConfig.ours(connector),
        **options,
    ) as llm:
        yield llm
