"""A real SGLang with the shipped model, in this process. The folder is left out without SGLang."""

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.builders import vllm
from tests.builders.vllm import DOCUMENT, DONOR, MOVED, NEW, random_tokens
from validation.models import shipped_model
from validation.sglang_engine import Ask, LocalSglang

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]

SHORT = {"MIN_DONOR_TOKENS": "32", "MIN_SPAN": "48", "HOST_BYTES": str(1 << 28), "MIN_SAVING": "0", "METRICS": "0"}
# All layers of every reused token are computed again, so that answers are those of cold runs.
WHOLE = {"POLICY": "boundary", "RECOMPUTE_BOUNDARY_LAYER": "8"}
PLAIN, PAGES, CHUNKS = {"disable_overlap_schedule": True}, {"page_size": 16}, {"chunked_prefill_size": 64}

some = random_tokens(7)
WARM, OTHER = some(100), [*some(30), *DOCUMENT[100:400], *some(60)]


@dataclass(frozen=True, slots=True)
class Answered(vllm.Answered):
    """One answer; SGLang began the request again `retractions` times."""

    retractions: int


class Served:
    def __init__(self, **options):
        given = {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 4, **options}
        self.local = LocalSglang(given.pop("model", str(shipped_model())), **given)
        self.are_faults_read = False

    cache = property(lambda self: self.local.cache)
    scheduler = property(lambda self: self.cache._scheduler)
    worker = property(lambda self: self.cache._worker)
    runtime = property(lambda self: self.cache._runtime)

    @property
    def faults(self):
        """What has failed in us; an engine ends with faults in those tests only that read them."""
        self.are_faults_read = True
        return self.runtime.faults

    def ask(self, *prompts, salts=(), options=None, max_tokens=8, **sampling):
        """Answers of prompts that are asked together, greedily."""
        salts, sampling = [*salts, *[None] * (len(prompts) - len(salts))], {"max_new_tokens": max_tokens, **sampling}
        asked = [Ask(p, sampling, salt, options or {}) for p, salt in zip(prompts, salts, strict=True)]
        found = [self._answered(each) for each in self.local.ask(*asked)]
        return found[0] if len(found) == 1 else found

    @staticmethod
    def _answered(request):
        receipt = ((request.customized_info or {}).get("semblend") or [{}])[-1]
        logprobs = [] if request.logprob is None else list(request.logprob.output_token_logprobs_val)
        return Answered(list(request.output_ids), request.cached_tokens, logprobs, receipt, request.retraction_count)

    def settle(self):
        """Wait until what has ended is saved."""
        self.worker.drain()

    def teach(self, *donors, warm=WARM):
        """Have these donors, or DONOR, once the self-check has passed by `warm`."""
        self.ask(warm, max_new_tokens=1)
        for donor in donors or (DONOR,):
            self.ask(donor, max_new_tokens=1)
        self.settle()
        assert self.runtime.mode.value == "wrapper"
        return self


@contextmanager
def serving(monkeypatch, variables, **options):
    """An SGLang with these variables; None is one without SemBlend."""
    with monkeypatch.context() as patch:
        for name, value in ({} if variables is None else {**SHORT, **variables}).items():
            patch.setenv(f"SEMBLEND_{name}", value)
        if variables is not None:
            options["radix_cache_backend"] = "semblend"
        served = Served(**options)
        try:
            yield served
            served.local.ask()  # SGLang looks for slots that nothing owns, and raises
            if variables is not None and hasattr(served.cache, "_runtime") and not served.are_faults_read:
                assert not served.runtime.faults
                assert served.runtime.refusal is None
        finally:
            served.local.close()
            del served
            gc.collect()


@pytest.fixture(scope="session")
def cold():
    """Answers of an SGLang without SemBlend, each prompt asked once."""
    patch, found = pytest.MonkeyPatch(), {}
    prompts = [WARM, DONOR, MOVED, OTHER, NEW]
    with serving(patch, None, disable_radix_cache=True) as served:
        for prompt in prompts:
            found[tuple(prompt)] = served.ask(prompt, max_new_tokens=8)
    return lambda prompt: found[tuple(prompt)]


@pytest.fixture
def serve(monkeypatch):
    """Opens one SGLang after the other, by its variables and options."""
    return lambda variables=WHOLE, **options: serving(monkeypatch, variables, **options)


@pytest.fixture(scope="session")
def profile_at(tmp_path_factory):
    """Makes variables of a profile for SGLang's engine, with a check and whatever else the profile has."""
    with serving(pytest.MonkeyPatch(), WHOLE) as served:
        known = served.teach().scheduler.namespace, served.runtime.pool.geometry

    def variables(check, **more):
        path = tmp_path_factory.mktemp("profile") / "profile.json"
        ReuseProfile.made_for(*known, policy="verified", check=ProfileCheck(**check), **more).write(path)
        return {"POLICY": "verified", "PROFILE": str(path), "PROFILE_TRIAL": "1"}

    return variables
