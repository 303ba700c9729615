"""Real engines of vLLM for tests: what they are told of the machine, their configurations, prompts and answers.

On a card engines come one after the other, and give memory back late. vLLM is imported where it is used: the doctor's
tests, and machines without it, read this file too."""

import copy
import gc
import json
import random
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch.cuda import is_available
from torch.distributed import DistNetworkError

from engine_wrapper.vllm.doctor import TRANSFER
from semblend_trt.cli.main import main
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from validation.models import shipped_model
from validation.vllm_engine import settle

# -- the machine -------------------------------------------------------------------------------------------------------

PLACE = {"kv_cache_memory_bytes": 1 << 28, **({"gpu_memory_utilization": 0.1} if is_available() else {})}
FP8 = {"kv_cache_dtype": "fp8"}
# Of tiny models, in layers and in tokens: a window is several blocks long, the document four chunks.
TINY_LAYERS, WINDOW, CHUNK = 3, 64, 128

# Where the smallest change of an answer is to be seen.
exact = pytest.mark.skipif(is_available(), reason="a card rounds by as much as one token of a window changes")
needs_vision = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="skipped: vLLM's models that take images need torchvision"
)
both_modes = pytest.mark.parametrize("is_async", [True, False], indirect=True, ids=["async", "in turn"])


@contextmanager
def on_card(options):
    """Give engines on a card these options as well. Elsewhere latent attention gets vLLM 0.32's backend for any dtype:
    the one that it takes for processors with AMX knows no float32."""
    is_latent = "MLA" in options.get("attention_backend", "")
    if not is_available():
        options = {}
        if is_latent and torch.cpu._is_amx_tile_supported():
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            options = {"attention_backend": "CPU_MLA"} if hasattr(AttentionBackendEnum, "AMX_MLA") else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setitem(PLACE, name, value)
        yield


def scale_by(patch, kind, scales):
    """Give the layers of a kind of attention their scales of K and V, as a checkpoint would that has them."""
    process = kind.process_weights_after_loading

    def load(attention, act_dtype):
        process(attention, act_dtype)
        for name, scale in zip("kv", scales[int(attention.layer_name.split(".")[2])], strict=False):
            getattr(attention, f"_{name}_scale").fill_(scale)
            setattr(attention, f"_{name}_scale_float", scale)

    patch.setattr(kind, "process_weights_after_loading", load)


# -- prompts -----------------------------------------------------------------------------------------------------------


def random_tokens(seed):
    """Return what draws a number of tokens."""
    generator = random.Random(seed)
    return lambda count: [generator.randrange(10, 2000) for _ in range(count)]


some = random_tokens(6)
DOCUMENT = some(500)
DONOR, MOVED = [*some(20), *DOCUMENT, *some(20)], [*some(70), *DOCUMENT, *some(40)]
NEW, LONG = some(150), some(90)


def findings_of(engine, options, tmp_path, capsys):
    """What the doctor finds of an engine with these options, or with none."""
    arguments = ["doctor", "--json", "--engine", engine]
    arguments += [] if options is not None and "model" in options else ["--model", str(shipped_model())]
    if options is not None:
        (tmp_path / "options.yaml").write_text(json.dumps(options))
        arguments += ["--engine-options", str(tmp_path / "options.yaml")]
    main(arguments)
    told = capsys.readouterr().out
    return json.loads(told[told.index("{\n") :])["findings"]


def request(name="a", tokens=3, sampling=None, **changes):
    """Return vLLM's own request for a prompt of so many numbers; `changes` of its arguments."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    given = {"sampling_params": SamplingParams(max_tokens=4, **(sampling or {})), "pooling_params": None}
    return Request(**{"request_id": name, "prompt_token_ids": list(range(tokens)), **given, **changes})


# -- configurations ----------------------------------------------------------------------------------------------------

SHORT = {"min_donor_tokens": 32, "min_span_tokens": 48, "host_bytes": 1 << 28}
# All layers of every reused token are computed again, so that answers are those of cold runs.
WHOLE = ("boundary", {"recompute_boundary_layer": 8})


def transfer(policy, settings=None, **changes):
    """Return the KVTransferConfig of our connector under a policy, with these settings and other `changes`."""
    from vllm.config import KVTransferConfig

    extra = {**SHORT, "policy": policy, **(settings or {})}
    return KVTransferConfig(**{**TRANSFER, **changes}, kv_connector_extra_config=extra)


def engine_config(changes=None, **extra):
    """Return an engine's configuration, `extra` as the connector's extra one and `changes` by their paths."""
    config = copy.deepcopy(_made())
    config.kv_transfer_config = _transfer_config(**extra)
    for path, value in (changes or {}).items():
        *places, name = path.split(".")
        holder = config
        for place in places:
            holder = getattr(holder, place)
        object.__setattr__(holder, name, value)
    return config


def made_for(model, **arguments):
    """Return what vLLM makes of a model's folder."""
    from vllm.engine.arg_utils import EngineArgs

    # As for our connector, which asks vLLM for piecewise graphs.
    graphs = {"cudagraph_mode": "PIECEWISE"}
    given = {"max_model_len": 2048, "kv_transfer_config": _transfer_config(), "compilation_config": graphs}
    return EngineArgs(model=str(model), **given, **arguments).create_engine_config()


def _transfer_config(**extra):
    from vllm.config import KVTransferConfig

    own = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
    return KVTransferConfig(kv_connector="ExampleConnector", **own)


@cache
def _made():
    return made_for(shipped_model(), dtype="float32")


# -- engines -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: its tokens, how many of its prompt's were not computed, and the log-probabilities of its tokens."""

    tokens: list[int]
    cached: int
    logprobs: list[float] = field(repr=False)
    receipt: dict | None = field(repr=False, compare=False)


class Served:
    """An engine in this process. It ends with faults, or a refusal, in tests only that read them."""

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
    runner = property(lambda self: self.core.model_executor.driver_worker.worker.model_runner)
    blocks = property(lambda self: self.core.scheduler.kv_cache_manager.block_pool)
    faults = property(lambda self: self.read("faults"))
    refusal = property(lambda self: self.read("refusal"))

    def read(self, name):
        self.are_faults_read = True
        return getattr(self.runtime, name)

    def outputs(self, *prompts, salts=(), adapters=None, priority=None, **options):
        """Return vLLM's outputs of prompts that are asked together, greedily unless `options` say otherwise."""
        from vllm import SamplingParams

        params = SamplingParams(**{"max_tokens": 8, "temperature": 0, "logprobs": 1, "detokenize": False, **options})
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        for each, salt in zip(asked, salts, strict=False):
            if salt is not None:
                each["cache_salt"] = salt
        return self.llm.generate(asked, params, use_tqdm=False, lora_request=adapters, priority=priority)

    def ask(self, *prompts, **options):
        """Return the answers, one alone as it is; for `options` see `outputs`."""
        found = [_answered(output) for output in self.outputs(*prompts, **options)]
        return found[0] if len(found) == 1 else found

    def cold(self, *prompts, **options):
        """Return what vLLM alone answers to each prompt; nothing of them stays."""
        found = [self.ask(each, max_tokens=8, skip_reading_prefix_cache=True, **options) for each in prompts]
        self.forget()
        return found[0] if len(found) == 1 else found

    @property
    def last(self):
        """Our number of the request that was asked last."""
        return next(copy.copy(self.core.scheduler.connector._scheduler._next_number)) - 1

    def report(self, back=0):
        """Return the report of the last request, or of one further `back`."""
        return self.scheduler.outcomes.of(self.last - back)

    @property
    def offered(self):
        """Tokens that the plan of the last request offered; those that were computed after all are among them."""
        return self.offered_of(1)[0]

    def offered_of(self, count):
        return [self.report(back).offered_tokens for back in reversed(range(count))]

    def forget(self):
        """Empty vLLM's own prefix cache."""
        for _ in range(20):
            if self.llm.reset_prefix_cache():
                return
            self.ask([1, 2, 3], max_tokens=4)  # a step that was on its way lets go of its blocks
        raise AssertionError("blocks are held")

    def settle(self):
        settle(self.core, lambda: self.ask([1, 2, 3], max_tokens=1))
        self.ask([1, 2, 3], max_tokens=4)  # blocks that a step on its way might write come back behind it

    def emptied(self):
        """Return the engine once all that has ended is saved and vLLM's own prefix cache is empty."""
        self.settle()
        self.forget()
        return self

    def renew(self):
        """Forget all donors and faults, as if the engine had just checked itself."""
        self.settle()
        self.runtime.faults.clear()
        self.runtime.refusal, self.are_faults_read = None, False
        assert self.llm.reset_prefix_cache(reset_connector=True)
        return self

    def close(self):
        with _collected_once():
            self.llm.llm_engine.engine_core.shutdown()


def _answered(output):
    from semblend_trt.outcome import VLLM_RECEIPT

    own = output.outputs[0]
    logprobs = [next(iter(each.values())).logprob for each in own.logprobs]
    receipt = (output.kv_transfer_params or {}).get(VLLM_RECEIPT)
    return Answered(list(own.token_ids), output.num_cached_tokens, logprobs, receipt)


def serving(model=None, **options):
    """Start an engine over a model, the shipped one at first. Skip the test where vLLM's CPU build cannot."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    given = {"model": str(model or shipped_model()), "dtype": "float32", "max_model_len": 2048, "enforce_eager": True}
    given |= {"max_num_batched_tokens": 2048, "block_size": 32, **PLACE, **options}
    # What earlier engines have left behind must not be collected while vLLM compiles: that ends the process.
    gc.collect()
    gc.disable()
    try:
        with _collected_once():
            try:
                return Served(LLM(**given))
            except DistNetworkError:  # another process has taken the port that vLLM had found free
                return Served(LLM(**given))
    except NotImplementedError as error:
        ensure_kv_transfer_shutdown()  # the next engine may have no connector
        cleanup_dist_env_and_memory()  # and other groups of ranks
        if "FP8 KV cache on CPU requires" in str(error):
            pytest.skip(f"this processor lacks what vLLM needs: {error}")
        raise
    finally:
        gc.enable()


@contextmanager
def _collected_once():
    """Leave out vLLM's own collections on a CPU: there are six for an engine, of a second each behind many engines."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_available():
            patch.setattr(gc, "collect", lambda *_: 0)
        yield


def cold_answers(*prompts, model=None, **options):
    """Ask vLLM without a connector; return what gives the answer to each prompt."""
    served = serving(model, enable_prefix_caching=False, **options)
    try:
        found = {tuple(prompt): served.ask(prompt, max_tokens=8) for prompt in prompts}
    finally:
        served.close()
    return lambda prompt: found[tuple(prompt)]


def taught(served, *donors):
    """Return the engine with `DONOR`, or these donors, and none of their blocks in vLLM's own prefix cache."""
    for donor in donors or (DONOR,):
        served.ask(donor, max_tokens=1)
    served.emptied()
    assert served.runtime.mode.value == "wrapper"
    return served


def checked_at(served, folder, **check):
    """Write a profile for this engine with such a check; return the settings that name it."""
    made = ReuseProfile.made_for(
        served.scheduler.namespace, served.runtime.pool.geometry, policy="verified", check=ProfileCheck(**check)
    )
    made.write(folder / "profile.json")
    return {"policy": "verified", "profile": str(folder / "profile.json"), "profile_trial": True}


def while_another_decodes(served, *adapters):
    """Return the tokens of NEW, "new", and of MOVED, "moved", which comes three steps later; `adapters` are theirs."""
    from vllm import SamplingParams

    params, tokens = SamplingParams(max_tokens=8, temperature=0, detokenize=False), {}
    for name, prompt, adapter in zip(("new", "moved"), (NEW, MOVED), adapters or (None, None), strict=True):
        served.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=adapter)
        for _ in range(3):
            served.llm.llm_engine.step()
    while served.llm.llm_engine.has_unfinished_requests():
        tokens |= {each.request_id: list(each.outputs[0].token_ids) for each in served.llm.llm_engine.step()}
    return tokens


def fail_planned(monkeypatch, served, *, once=False):
    """Have the fifth layer fail for our rows, not for vLLM's own; the list grows with every failure."""
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


# -- what is expected --------------------------------------------------------------------------------------------------


def near(own, others, rounding=0.0):
    """Return whether log-probabilities are the same but for rounding, at least so much."""
    # A card multiplies float32 matrices in parts of another order for every number of rows.
    most = max(rounding, 1e-2 if is_available() else 2e-4)
    return max(abs(a - b) for a, b in zip(own, others, strict=True)) < most


def is_cold(answer, expected, rounding=0.0):
    return answer.tokens == expected.tokens and near(answer.logprobs, expected.logprobs, rounding)


def assert_cold(served, cold, *prompts, **options):
    """Assert that prompts that are asked together are answered as by cold runs; return the answers."""
    found = served.ask(*prompts, max_tokens=8, **options)
    answers = found if isinstance(found, list) else [found]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == cold(prompt).tokens
        assert near(answer.logprobs, cold(prompt).logprobs)
    return answers
