"""Engines over the shipped model and tiny ones, on the card where there is one. The folder is left out without vLLM."""

import os
from importlib.util import find_spec

import numba
import numpy as np
import pytest
from torch.cuda import is_available

from semblend_trt.plan import SpanCheck
from semblend_trt.reuse_profile import ReuseProfile
from tests.builders.vllm import (
    CHUNK,
    DONOR,
    LONG,
    MOVED,
    NEW,
    PLACE,
    TINY_LAYERS,
    WINDOW,
    cold_answers,
    serving,
    transfer,
)
from tests.engine_wrapper.watching import watched
from tests.random_models import save_tiny_model
from validation.models import profile_of

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# vLLM's n-gram drafts start numba's threads, and torch uses as many from then on: later answers round in another way.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
numba.core.config.reload_config()  # numba may be loaded already


@pytest.fixture(scope="session", autouse=True)
def _on_cpu():
    """vLLM 0.28's attention on a CPU reads sinks as bfloat16, whatever the model's type is, and float32 ones fail. It
    looks at the code of each kind of model in a process of its own, so as not to begin CUDA: here it looks in this one,
    which spares seconds for each."""
    if is_available() or not find_spec("vllm"):
        yield
        return
    from vllm import _custom_ops
    from vllm.model_executor.models import registry

    stock = _custom_ops.cpu_attention_with_kv_cache

    def attend(*, s_aux=None, **options):
        if s_aux is not None:
            s_aux.data.copy_(s_aux.bfloat16())  # so that our attention reads the same
        stock(s_aux=None if s_aux is None else s_aux.bfloat16(), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_custom_ops, "cpu_attention_with_kv_cache", attend)
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="session")
def cold():
    """Answers of vLLM without a connector."""
    return cold_answers(DONOR, MOVED, NEW, LONG)


_BY_TRANSFORMERS = ("granite", "olmo2", "smollm3", "qwen3")
_OWN = {
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": None},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": None},
    "llama4_text": {"attention_chunk_size": CHUNK, "no_rope_layers": [1, 0, 1]},
    "smollm3": {"no_rope_layers": [0, 1, 0]},  # its lowest layer has no RoPE
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Makes a random model of a family and a number of layers, once; `own` are fields of its configuration."""
    made = {}

    def model(family, layers=TINY_LAYERS, **own):
        key = repr((family, layers, own))
        if key not in made:
            # Heads as wide as vLLM's attention on a CPU needs them, and room for the prompts.
            sizes = {"vocab_size": 2000, "max_position_embeddings": 2048, "num_hidden_layers": layers}
            sizes |= {"hidden_size": 128} if family in _BY_TRANSFORMERS else {"head_dim": 32}
            sizes |= {"head_dim": 32} if family == "qwen3" else {}
            fields = {**_OWN.get(family, {}), **own}
            if "no_rope_layers" in fields:
                fields["no_rope_layers"] = fields["no_rope_layers"][:layers]
            if layers == 1:  # vLLM wants experts in a GLM, and one layer of a gpt-oss would have a window
                fields |= {"first_k_dense_replace": 0} if family == "glm4_moe" else {}
                fields |= {"sliding_window": None} if family == "gpt_oss" else {}
            made[key] = save_tiny_model(family, tmp_path_factory.mktemp(family), **sizes | fields)
        return made[key]

    # Before an engine runs them: vLLM changes the classes of Transformers that it uses.
    for family in _BY_TRANSFORMERS:
        for layers in (1, TINY_LAYERS):
            model(family, layers)
    model("qwen3", head_dim=64)
    return model


@pytest.fixture(scope="session")
def profile(tmp_path_factory):
    """The shipped model's profile, in this vLLM among its engines."""
    path = tmp_path_factory.mktemp("profile") / "reuse-profile.json"
    served = serving(kv_transfer_config=transfer("position_fix"))
    try:
        shipped = ReuseProfile.read(profile_of(None, None))
        shipped.confirmed_in(served.scheduler.namespace.backend_cache_layout).write(path)
    finally:
        served.close()
    return path


class _Engines:
    """At most one engine at a time. One that is kept serves the next test that asks for the same."""

    def __init__(self):
        self._served = self._key = self.mode = None

    def close(self):
        served, self._served, self._key = self._served, None, None
        if served is not None:
            served.close()

    def get(self, key, start):
        if key is None or key != self._key:
            self.end_test()
            self.close()
            self._served, self._key = start(), key
        elif self._served.scheduler is not None:
            self._served.renew()
        return self._served

    def end_test(self):
        served = self._served
        unread = served and served.scheduler and not served.are_faults_read and dict(served.runtime.faults)
        if self._key is None:
            self.close()
        assert not unread


@pytest.fixture(scope="module")
def _engines():
    engines = _Engines()
    yield engines
    engines.close()


@pytest.fixture
def engine(profile, _engines):
    """Makes an engine with our connector under a policy; `settings` are those of its extra config. With `kept` it may
    be one that an earlier test of the module has used, without its donors."""

    def make(policy, settings=None, *, kept=False, **options):
        def start():
            if policy is None:
                return serving(**options)
            own = {**(settings or {}), **({"profile": str(profile)} if policy == "verified" else {})}
            return serving(**options, kv_transfer_config=transfer(policy, own))

        return _engines.get(repr((policy, settings, options, PLACE, _engines.mode)) if kept else None, start)

    yield make
    _engines.end_test()


@pytest.fixture
def blocks(monkeypatch):
    """Of all requests whose rows we computed alone; those of the last one are the last."""
    from engine_wrapper.vllm.planned_forward import PlannedForward

    return watched(monkeypatch, PlannedForward, "_batch", lambda found, *_: found[1][0])


@pytest.fixture
def built(monkeypatch):
    """Of all metadata built for latent rows, how many sequences count as decodes and how many as prompts."""
    from engine_wrapper.vllm.attention import VllmRows

    return watched(monkeypatch, VllmRows, "_metadata", lambda found, *_: (found.num_decodes, found.num_prefills))


@pytest.fixture
def many_runs(monkeypatch):
    """Checks find tokens to deviate that stand alone, and runs of them."""
    from engine_wrapper import deviation_check

    choose = deviation_check.choose

    def chosen(check, deviations, *rest):
        places = np.arange(len(deviations))
        deviating = (places % 9 == 0) | (places // 20 % 3 == 1)
        return choose(SpanCheck(check.layer, 0.5), deviating.astype(np.float32), *rest)

    monkeypatch.setattr(deviation_check, "choose", chosen)


@pytest.fixture
def is_async(request, monkeypatch, _engines):
    """Whether engines schedule a step before the last one's tokens are known, as vLLM does on a card alone."""
    monkeypatch.setattr(_engines, "mode", request.param)
    if is_available():
        monkeypatch.setitem(PLACE, "async_scheduling", request.param)
        return bool(request.param)
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def keep(config):
        stock(config)
        config.scheduler_config.async_scheduling = request.param

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep))
    return bool(request.param)
