"""Settings and plans of the wrapper's tests."""

import pytest

from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.plan import PlanSpan
from semblend_trt.reuse_profile import ReuseProfile
from tests.builders.engine import DONOR, SHIFTED, Engines, geometry_of, serve, teach
from tests.semblend_trt.plans import plan_of
from validation.models import shipped_model


@pytest.fixture(scope="session")
def make_plan():
    def build(
        tokens, spans, *, num_layers=3, boundary=0, num_computed=0, prefix_end=None, shift=0, exact=(), head=0, **more
    ):
        """`spans` are (start, end) in the prompt; `exact` holds the indices of exact ones."""
        own = [
            PlanSpan("donor", start + (0 if index in exact else shift), start, stop - start, index in exact)
            for index, (start, stop) in enumerate(spans)
        ]
        matched = None if prefix_end is None else prefix_end - num_computed
        numbers = {"computed": num_computed, "matched": matched, "layers": num_layers}
        layers = {"recompute_boundary_layer": boundary, "head_tokens": head}
        return plan_of(*own, prompt=tokens, **numbers, **layers, **more)

    return build


@pytest.fixture(scope="session")
def tiny_runner(tiny_qwen2_path):
    return ModelRunner(tiny_qwen2_path, "float32", "cpu")


@pytest.fixture(scope="session")
def shipped_runner():
    return ModelRunner(shipped_model(), "float32", "cpu")


@pytest.fixture
def engines_of(tmp_path, request):
    """Makes what builds engines over a model; all of them are shut down when the test ends."""

    def make(model, kind=Engines, **options):
        made = kind(tmp_path / "audit.jsonl", model=model, **options)
        request.addfinalizer(made.shutdown)
        return made

    return make


@pytest.fixture
def engine(tiny_qwen2_path, tiny_runner, engines_of):
    return engines_of(tiny_qwen2_path, runner=tiny_runner)


@pytest.fixture
def shifted(engine):
    def build(*module, **settings):
        llm = engine(*module, **settings)
        teach(llm, DONOR)
        return llm, serve(llm, SHIFTED)

    return build


@pytest.fixture
def trial(monkeypatch):
    monkeypatch.setenv("SEMBLEND_PROFILE_TRIAL", "1")


@pytest.fixture
def profile(engine, tmp_path, trial):
    def make(policy="verified", **fields):
        llm, path = engine(), tmp_path / "reuse-profile.json"
        namespace, geometry = llm.connector_scheduler.namespace, geometry_of(llm)
        ReuseProfile.made_for(namespace, geometry, policy=policy, **fields).write(path)
        return path

    return make


@pytest.fixture
def position_fix(monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
