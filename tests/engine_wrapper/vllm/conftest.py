"""A real vLLM with the shipped model, on the card where there is one. The folder is left out without vLLM."""

import gc
import os
import random
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import pytest
from torch.cuda import is_available
from torch.distributed import DistNetworkError

from semblend_trt.plan import SpanCheck
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.conftest import save_tiny_model
from tests.engine_wrapper.vllm.place import PLACE, WINDOWED, on_card
from tests.engine_wrapper.watching import watched
from validation.models import profile_of, shipped_model
from validation.vllm_engine import TRANSFER, settle

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

SHORT = {"min_donor_tokens": 32, "min_span_tokens": 48, "host_bytes": 1 << 28}
# All layers of every reused token are computed again, so that answers are those of cold runs.
WHOLE = ("boundary", {"recompute_boundary_layer": 8})


needs_vision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="skipped: vLLM's models that take images need torchvision"
)


def random_tokens(seed):
    """Draws so many tokens."""
    generator = random.Random(seed)
    return lambda count: [generator.randrange(10, 2000) for _ in range(count)]


some = random_tokens(6)
DOCUMENT = some(500)
DONOR, MOVED = [*some(20), *DOCUMENT, *some(20)], [*some(70), *DOCUMENT, *some(40)]
NEW, LONG = some(150), some(90)


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: its tokens, how many of its prompt's were not computed, and the log-probabilities of its tokens."""

    tokens: list[int]
    cached: int
    logprobs: list[float] = field(repr=False)


class Served:
    def __init__(self, llm):
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.are_faults_read = False

    @property
    def scheduler(self):
        """Our scheduler half for every engine; None without a connector."""
        connector = self.core.scheduler.connector
        return None if connector is None else connector._scheduler._scheduler

    @property
    def worker(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    runtime = property(lambda self: self.scheduler._runtime)

    @property
    def faults(self):
        """What has failed in us; an engine ends with faults in those tests only that read them, or its refusal."""
        self.are_faults_read = True
        return self.runtime.faults

    @property
    def refusal(self):
        self.are_faults_read = True
        return self.runtime.refusal

    def ask(self, *prompts, max_tokens=8, salts=(), **options):
        """Answers of prompts that are asked together, greedily."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=1, detokenize=False, **options)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        for each, salt in zip(asked, salts, strict=False):
            if salt is not None:
                each["cache_salt"] = salt
        found = [
            Answered(
                list(output.outputs[0].token_ids),
                output.num_cached_tokens,
                [next(iter(each.values())).logprob for each in output.outputs[0].logprobs],
            )
            for output in self.llm.generate(asked, params, use_tqdm=False)
        ]
        return found[0] if len(found) == 1 else found

    @property
    def last(self):
        """Our number of the request that was asked last."""
        return next(copy(self.core.scheduler.connector._scheduler._next_number)) - 1

    @property
    def offered(self):
        """Tokens that the plan of the last request offered; those that were computed after all are among them."""
        return self.offered_of(1)[0]

    def offered_of(self, count):
        return [self.scheduler.outcomes.of(self.last - back).offered_tokens for back in reversed(range(count))]

    def forget(self):
        for _ in range(20):
            if self.llm.reset_prefix_cache():
                return
            self.ask([1, 2, 3], max_tokens=4)  # a step that was on its way lets go of its blocks
        raise AssertionError("blocks are held")

    def settle(self):
        settle(self.core, lambda: self.ask([1, 2, 3], max_tokens=1))
        self.ask([1, 2, 3], max_tokens=4)  # blocks that a step on its way might write come back behind it

    def close(self):
        with _collected_once():
            self.llm.llm_engine.engine_core.shutdown()


def near(ours, theirs, rounding=0.0):
    """Whether log-probabilities are the same but for rounding, at least so much."""
    # A card multiplies float32 matrices in parts of another order for every number of rows.
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < max(rounding, 1e-2 if is_available() else 1e-3)


def assert_cold(served, cold, *prompts, **options):
    """The answers to prompts that are asked together are those of cold runs; returns them."""
    found = served.ask(*prompts, max_tokens=16, **options)
    answers = found if isinstance(found, list) else [found]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == cold(prompt).tokens
        assert near(answer.logprobs, cold(prompt).logprobs)
    return answers


def taught(served, *donors):
    """The engine with `DONOR`, or these donors, and none of their blocks in vLLM's own prefix cache."""
    for donor in donors or (DONOR,):
        served.ask(donor, max_tokens=1)
    served.settle()
    served.forget()
    assert served.runtime.mode.value == "wrapper"
    return served


def checked_at(served, folder, **check):
    """Settings of a profile for this engine with such a check."""
    made = ReuseProfile.made_for(
        served.scheduler.namespace, served.runtime.pool.geometry, policy="verified", check=ProfileCheck(**check)
    )
    made.write(folder / "profile.json")
    return {"policy": "verified", "profile": str(folder / "profile.json"), "profile_trial": True}


def fail_planned(monkeypatch, served, *, once=False):
    """Has the fifth layer fail for our rows, not for vLLM's own; the list grows with every failure."""
    from engine_wrapper.vllm.attention import VllmRows

    layer, inside, failures = served.worker._forward._runner.model.model.layers[5], [], []
    run, enter, leave = layer.forward, VllmRows.__enter__, VllmRows.__exit__

    def entered(rows):
        inside.append(rows)
        return enter(rows)

    def left(rows, *raised):
        inside.remove(rows)
        leave(rows, *raised)

    def fails(*arguments, **options):
        if inside and not (once and failures):
            failures.append(5)
            raise RuntimeError("the fifth layer fails")
        return run(*arguments, **options)

    monkeypatch.setattr(VllmRows, "__enter__", entered)
    monkeypatch.setattr(VllmRows, "__exit__", left)
    monkeypatch.setattr(layer, "forward", fails)
    return failures


def serving(model=None, **options):
    """An engine over a model, the shipped one at first."""
    from vllm import LLM

    given = {
        "model": str(model or shipped_model()),
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
        **PLACE,
        **options,
    }
    # What earlier engines have left behind must not be collected while vLLM compiles: that ends the process.
    gc.collect()
    gc.disable()
    try:
        with _collected_once():
            try:
                return Served(LLM(**given))
            except DistNetworkError:  # another process has taken the port that vLLM had found free
                return Served(LLM(**given))
    finally:
        gc.enable()


@contextmanager
def _collected_once():
    """Without vLLM's own collections on a CPU: there are six for an engine, of a second each behind many engines."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_available():
            patch.setattr(gc, "collect", lambda *_: 0)
        yield


def cold_answers(*prompts, model=None, **options):
    served = serving(model, enable_prefix_caching=False, **options)
    try:
        found = {tuple(prompt): served.ask(prompt, max_tokens=16) for prompt in prompts}
    finally:
        served.close()
    return lambda prompt: found[tuple(prompt)]


def while_another_decodes(served):
    """The tokens of NEW, "new", and of MOVED, "moved", which comes three steps later."""
    from vllm import SamplingParams

    params, tokens = SamplingParams(max_tokens=16, temperature=0, detokenize=False), {}
    for name, prompt in (("new", NEW), ("moved", MOVED)):
        served.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(3):
            served.llm.llm_engine.step()
    while served.llm.llm_engine.has_unfinished_requests():
        tokens |= {each.request_id: list(each.outputs[0].token_ids) for each in served.llm.llm_engine.step()}
    return tokens


@pytest.fixture(scope="session", autouse=True)
def _bfloat16_sinks():
    """vLLM 0.28's attention on a CPU reads sinks as bfloat16, whatever the model's type is, and float32 ones fail."""
    if is_available() or not find_spec("vllm"):
        yield
        return
    from vllm import _custom_ops

    stock = _custom_ops.cpu_attention_with_kv_cache

    def attend(*, s_aux=None, **options):
        if s_aux is not None:
            s_aux.data.copy_(s_aux.bfloat16())  # so that our attention reads the same
        stock(s_aux=None if s_aux is None else s_aux.bfloat16(), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_custom_ops, "cpu_attention_with_kv_cache", attend)
        yield


@pytest.fixture(scope="module")
def blocks_for_windows():
    with on_card(WINDOWED):
        yield


@pytest.fixture(scope="session")
def cold():
    return cold_answers(DONOR, MOVED, NEW, LONG)


# Of the tiny models, in layers and in tokens: a window is several blocks long, the document four chunks.
TINY_LAYERS, WINDOW, CHUNK = 3, 64, 128
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
            made[key] = save_tiny_model(family, tmp_path_factory.mktemp(family), **sizes, **fields)
        return made[key]

    # Before an engine runs them: vLLM changes the classes of Transformers that it uses.
    for family in _BY_TRANSFORMERS:
        for layers in (1, TINY_LAYERS):
            model(family, layers)
    return model


@pytest.fixture(scope="session")
def cold_of():
    """Asks vLLM without a connector for its 16 tokens, once; to be called before an engine runs."""
    found = {}

    def answer(model, prompt, **options):
        key = repr((model, prompt, options, PLACE))
        if key not in found:
            found[key] = cold_answers(prompt, model=model, **options)(prompt)
        return found[key]

    return answer


@pytest.fixture(scope="session")
def profile(tmp_path_factory):
    """The shipped model's profile, in this vLLM among its engines."""
    from vllm.config import KVTransferConfig

    path = tmp_path_factory.mktemp("profile") / "reuse-profile.json"
    shipped = profile_of(None, None)
    served = serving(kv_transfer_config=KVTransferConfig(**TRANSFER, kv_connector_extra_config=SHORT))
    try:
        ReuseProfile.read(shipped).confirmed_in(served.scheduler.namespace.backend_cache_layout).write(path)
    finally:
        served.close()
    return path


@pytest.fixture
def engine(profile):
    """Makes an engine with our connector under a policy; `settings` are those of its extra config."""
    from vllm.config import KVTransferConfig

    opened = []

    def end():
        while opened:
            served = opened.pop()
            unread = served.scheduler is not None and not served.are_faults_read and dict(served.runtime.faults)
            served.close()
            assert not unread

    def make(policy, settings=None, **options):
        end()
        if policy is not None:
            extra = {**SHORT, "policy": policy, **(settings or {})}
            if policy == "verified":
                extra["profile"] = str(profile)
            options["kv_transfer_config"] = KVTransferConfig(**TRANSFER, kv_connector_extra_config=extra)
        opened.append(serving(**options))
        return opened[-1]

    yield make
    end()


@pytest.fixture
def blocks(monkeypatch):
    """Of all requests whose rows we computed alone; those of the last one are the last."""
    from engine_wrapper.vllm.planned_forward import PlannedForward

    return watched(monkeypatch, PlannedForward, "_blocks", lambda found, _: found[0])


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
def is_async(request, monkeypatch):
    """Whether engines schedule a step before the last one's tokens are known, as vLLM does on a card alone."""
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


both_modes = pytest.mark.parametrize("is_async", [True, False], indirect=True, ids=["async", "in turn"])
