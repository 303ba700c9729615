"""A connector that records every call, engines to run it in, and helpers of their tests."""

from collections import defaultdict
from contextlib import contextmanager

import pytest

from engine_wrapper.embedded.llm import KvCacheConnectorConfig, SamplingParams
from semblend_trt.connector.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker
from tests.builders.engine import evict_prefixes
from tests.engine_wrapper.watching import failing

BLOCK = 8
LAYERS = 3
TWO = SamplingParams(max_tokens=2, ignore_eos=True)
SIX = SamplingParams(max_tokens=6, ignore_eos=True)


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def teach(llm, tokens, **options):
    llm.generate([tokens], TWO, **options)
    llm.settle()
    evict_prefixes(llm)


@contextmanager
def fails_once(owner, name):
    with pytest.MonkeyPatch.context() as patches:
        has_failed = failing(patches, owner, name, RuntimeError, once=True)
        yield
    assert has_failed()


class Calls(list):
    """The calls of both halves, each by its name and arguments."""

    def names(self):
        return [name for name, *_ in self]

    def of(self, name):
        return [given for called, *given in self if called == name]


_calls = defaultdict(Calls)


def recording(base, **answers):
    """A half of a connector that records every call and gives these answers."""

    def method(name, answer):
        def call(self, *given):
            _calls[id(self._llm_args)].append((name, *given))
            return answer

        return call

    return type(f"Recording{base.__name__}", (base,), {name: method(name, answer) for name, answer in answers.items()})


RecordingScheduler = recording(
    KvCacheConnectorScheduler,
    get_num_new_matched_tokens=(0, False),
    **dict.fromkeys(("wait_for_initialization", "update_state_after_alloc", "build_connector_meta")),
    **dict.fromkeys(("update_state_after_alloc_by_layer_group",)),
    **dict.fromkeys(("request_finished", "request_finished_by_layer_group"), False),
)
RecordingWorker = recording(
    KvCacheConnectorWorker,
    get_finished=([], []),
    **dict.fromkeys(("register_kv_caches", "register_kv_cache_layout", "start_load_kv", "wait_for_layer_load")),
    **dict.fromkeys(("save_kv_layer", "wait_for_save")),
)
RecordingWorker.register_forward_pass_callable = lambda self: lambda: _calls[id(self._llm_args)].append(("after",))


@pytest.fixture
def make_llm(engine):
    """Builds engines with small blocks, by default without a connector."""
    small = {"tokens_per_block": BLOCK, "max_tokens": 1024}
    return lambda module=None, cache=None, **options: engine(module, small | (cache or {}), **options)


@pytest.fixture
def make_recorded_llm(make_llm):
    _calls.clear()
    recording = KvCacheConnectorConfig(
        connector_module=__name__,
        connector_scheduler_class="RecordingScheduler",
        connector_worker_class="RecordingWorker",
    )

    def make(contract="embedded", **options):
        llm = make_llm(kv_connector_config=recording, contract=contract, **options)
        return llm, _calls[id(llm.llm_args)]

    return make


@pytest.fixture
def cold(make_llm):
    return lambda prompts, params=SIX: answers(make_llm(cache={"enable_block_reuse": False}).generate(prompts, params))
