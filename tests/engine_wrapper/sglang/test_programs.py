"""The doctor and the validation know SGLang, and the fleet hears of its donors, over a real nats-server."""

import pytest

from engine_wrapper.embedded.request import SamplingParams
from tests.builders.vllm import DONOR, MOVED, NEW, findings_of
from tests.engine_wrapper.sglang.conftest import WARM
from tests.semblend_trt.conftest import NatsServer, Reader
from tests.semblend_trt.fleet.conftest import donors_of
from validation.arms import ArmChoices, arms_of
from validation.engines import EngineSettings, ended_requests, opened
from validation.models import shipped_model
from validation.sglang_engine import SglangEngines

WORKER = 5, 0


@pytest.mark.parametrize(
    ("options", "reason"), [(None, None), ({"enable-hierarchical-cache": True}, "hierarchical_cache")]
)
def test_the_doctor_says_what_would_be_refused(tmp_path, capsys, options, reason):
    findings = findings_of("sglang", options, tmp_path, capsys)
    assert [each["reason"] for each in findings if each["area"] in ("engine", "options")] == [None, reason]


def test_the_validation_reads_logits_and_forces_answers(monkeypatch):
    monkeypatch.setenv("SEMBLEND_METRICS", "0")
    engines = SglangEngines(str(shipped_model()), "float32")
    cold, *_, unchecked = arms_of(["cold", "position_fix"], ArmChoices(engines.facts.num_layers, boundary=1))
    settings = EngineSettings(str(shipped_model()), 4096, 1 << 28, 48, 4)
    four, found = SamplingParams(max_tokens=4, ignore_eos=True), {}
    forced = SamplingParams(max_tokens=4, ignore_eos=True, forced_token_ids=[7, 8, 9, 10])
    for arm in (cold, unchecked):
        with opened(engines, arm, settings) as (engine, audit):
            engine.generate([WARM], four)
            engine.generate([DONOR], four)
            engine.settle()
            (found[arm.name],) = engine.generate([MOVED], forced)
        assert len(ended_requests(audit.read())) == (0 if arm is cold else 3)
    assert [each.outputs[0].token_ids for each in found.values()] == [[7, 8, 9, 10]] * 2
    assert found[cold.name].outputs[0].generation_logits.shape[0] == 4
    assert (found[cold.name].cached_tokens, found[unchecked.name].cached_tokens >= 480) == (0, True)


@pytest.fixture
def nats(tmp_path):
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.mark.promise("engines", "In SGLang Llama, Qwen2 and Qwen3...")
def test_donors_are_announced_and_withdrawn(serve, nats, profile_at):
    reader = Reader(nats.url)
    checked = profile_at({"layer": 2, "threshold": 1.0})
    with serve({**checked, "NATS_URL": nats.url, "WORKER_ID": "5"}) as served:
        served.teach()
        assert reader.wait_for(lambda reader: len(donors_of(reader.directory, WORKER)) == 2)
        assert served.ask(MOVED, max_tokens=1).receipt["reused_tokens"] > 400
        served.settle()
        served.ask(NEW, max_tokens=1)
        served.settle()
        assert reader.wait_for(lambda reader: len(donors_of(reader.directory, WORKER)) == 4)
        assert served.local.scheduler.flush_cache()
        assert reader.wait_for(lambda reader: not donors_of(reader.directory, WORKER))
    reader.close()
