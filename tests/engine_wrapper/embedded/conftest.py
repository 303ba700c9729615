"""A connector that records every call, engines to run it in, and helpers of their tests."""

import random
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.connector.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker
from tests.builders.engine import evict_prefixes

BLOCK = 8
LAYERS = 3
TWO = SamplingParams(max_tokens=2, ignore_eos=True)
SIX = SamplingParams(max_tokens=6, ignore_eos=True)


def prompt(length, seed=0):
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def teach(llm, tokens, **options):
    llm.generate([tokens], TWO, **options)
    llm.settle()
    evict_prefixes(llm)


@contextmanager
def fails_once(owner, name):
    sound, calls = getattr(owner, name), []

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("injected")
        return sound(*arguments)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(owner, name, broken)
        yield
    assert calls


@contextmanager
def saves_wait(llm):
    opened = threading.Event()
    llm.connector_worker.saver._thread.submit(opened.wait)
    try:
        yield
    finally:
        opened.set()
        llm.connector_worker.saver.drain()


@dataclass
class Record:
    """What both halves share; with `saves` ended requests are saved, and no save comes to its end."""

    calls: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    saves: bool = False

    def names(self):
        return [name for name, *_ in self.calls]

    def count(self, name):
        return self.names().count(name)


_records = {}


def record_of(llm_args):
    return _records.setdefault(id(llm_args), Record())


class RecordingScheduler(KvCacheConnectorScheduler):
    """Offers nothing; saves finished requests when told to."""

    def __init__(self, llm_args):
        super().__init__(llm_args)
        self.record = record_of(llm_args)
        self.asked = []

    def wait_for_initialization(self):
        self.record.calls.append(("wait_for_initialization",))

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.asked.append(request)
        self.record.calls.append(("get_num_new_matched_tokens", request.request_id, num_computed_tokens))
        return 0, False

    def update_state_after_alloc(self, request, block_ids):
        self.record.calls.append(("update_state_after_alloc", request.request_id, tuple(block_ids)))

    def build_connector_meta(self, scheduler_output):
        self.record.calls.append(("build_connector_meta",))
        self.record.outputs.append(scheduler_output)

    def request_finished(self, request, cache_block_ids):
        self.record.calls.append(("request_finished", request.request_id, tuple(cache_block_ids)))
        return self.record.saves

    def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
        self.record.calls.append(("by_layer_group", "update_state_after_alloc", len(block_ids_by_layer_group)))
        self.update_state_after_alloc(request, block_ids_by_layer_group[0])

    def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
        self.record.calls.append(("by_layer_group", "request_finished", len(cache_block_ids_by_layer_group)))
        return self.request_finished(request, cache_block_ids_by_layer_group[0])


class RecordingWorker(KvCacheConnectorWorker):
    def __init__(self, llm_args):
        super().__init__(llm_args)
        self.record = record_of(llm_args)

    def register_forward_pass_callable(self):
        return lambda: self.record.calls.append(("forward_pass_callable",))

    def register_kv_caches(self, kv_cache_tensor):
        self.record.calls.append(("register_kv_caches", tuple(kv_cache_tensor.shape)))

    def register_kv_cache_layout(self, layout):
        self.register_kv_caches(layout.pool)
        self.record.calls[-1] = ("register_kv_cache_layout", len(layout.groups), layout.tokens_per_block)

    def start_load_kv(self, stream):
        self.record.calls.append(("start_load_kv",))

    def wait_for_layer_load(self, layer_idx, stream):
        self.record.calls.append(("wait_for_layer_load", layer_idx))

    def save_kv_layer(self, layer_idx, stream):
        self.record.calls.append(("save_kv_layer", layer_idx))

    def wait_for_save(self, stream):
        self.record.calls.append(("wait_for_save",))

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self.record.calls.append(("get_finished",))
        return [], []


@pytest.fixture(scope="session")
def runner(tiny_qwen2_path):
    return ModelRunner(tiny_qwen2_path, device="cpu")


@pytest.fixture
def make_llm(tiny_qwen2_path, runner):
    engines = []

    def make(scheduler=None, worker="RecordingWorker", *, module=__name__, cache=None, **fields):
        if scheduler is not None:
            fields["kv_connector_config"] = KvCacheConnectorConfig(
                connector_module=module, connector_scheduler_class=scheduler, connector_worker_class=worker
            )
        fields["kv_cache_config"] = KvCacheConfig(**({"tokens_per_block": BLOCK, "max_tokens": 1024} | (cache or {})))
        engines.append(LLM(model=tiny_qwen2_path, runner=runner, **fields))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
    _records.clear()


@pytest.fixture
def make_recorded_llm(make_llm):
    def make(**fields):
        llm = make_llm("RecordingScheduler", **fields)
        return llm, record_of(llm.llm_args)

    return make


@pytest.fixture
def cold(make_llm):
    return lambda prompts, params=SIX: answers(make_llm(cache={"enable_block_reuse": False}).generate(prompts, params))
