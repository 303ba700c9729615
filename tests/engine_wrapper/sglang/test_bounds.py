"""What a bound and a check choose inside SGLang: the embedded engine's choice, and what the receipt says of it."""

import numpy as np
import pytest

from engine_wrapper.embedded.request import SamplingParams
from engine_wrapper.token_schedule import SequenceWork
from semblend_trt.reuse_profile import ProfileBound, ProfileCheck, ProfileLevel, ReuseProfile
from tests.builders.engine import Engines, teach
from tests.builders.vllm import DOCUMENT, DONOR, MOVED, NEW, assert_cold
from tests.engine_wrapper.sglang.conftest import SHORT, WARM, WHOLE
from validation.models import shipped_model

# The document ends at a whole block of the embedded engine's too.
WEIGHED = [*NEW[:76], *DOCUMENT, *WARM[:40]]
CHECK = {"layer": 2, "threshold": 1.0, "sample_every": 4, "sample_threshold": 1.0}


ASKED = {"MAX_KL": "1.0", "RISK": "0.5"}


def bounded(share=0.3):
    """Fields of a profile whose bound computes this share of what is checked; above 1 everything."""
    level = ProfileLevel(deviation=1e6 if share <= 1 else 0.0, share=min(share, 1.0))
    return {"bounds": [ProfileBound(max_kl=1.0, risk=0.5, levels=[level])], "floor": 0.5}


def weighed_in_the_embedded_engine(tmp_path, check):
    engines = Engines(tmp_path / "audit.jsonl", model=str(shipped_model()), dtype="float32")
    cache, own = {"tokens_per_block": 32, "enable_partial_reuse": False}, {**SHORT, "MIN_SPAN": "64"}
    first = engines(cache=cache, **WHOLE, **own)
    scheduler = first.connector_scheduler
    known, path = (scheduler.namespace, scheduler._runtime.pool.geometry), tmp_path / "embedded.json"
    ReuseProfile.made_for(*known, policy="verified", check=ProfileCheck(**check), **bounded()).write(path)
    llm = engines(cache=cache, **own, POLICY="verified", PROFILE=str(path), PROFILE_TRIAL="1", **ASKED)
    teach(llm, DONOR)
    llm.generate([WEIGHED], SamplingParams(max_tokens=1))
    engines.shutdown()


@pytest.mark.promise(
    "engines",
    "In SGLang a bound chooses tokens by the attention that the embedded engine finds, and receipts say what was "
    "computed",
)
@pytest.mark.parametrize(
    ("options", "compares_all"),
    [({}, False), ({"chunked_prefill_size": 128}, True)],
    ids=["whole, a sample compared", "chunks, all compared"],
)
def test_levels_choose_by_the_attention_that_the_embedded_engine_finds(
    serve, profile_at, tmp_path, monkeypatch, options, compares_all
):
    monkeypatch.setattr("semblend_trt.discovery.planner.secrets.randbits", lambda _: 7)
    weighed, found = SequenceWork.weighed, []
    monkeypatch.setattr(SequenceWork, "weighed", lambda own, mass: found.append(mass.copy()) or weighed(own, mass))
    check = CHECK | {"compares_all": compares_all}
    weighed_in_the_embedded_engine(tmp_path, check)
    with serve(profile_at(check, **bounded()) | ASKED, **options) as served:
        served.teach()
        answer = served.ask(WEIGHED, max_tokens=1)
    wanted, _, ours = found  # the self-check chooses too
    assert len(ours) == len(wanted)
    if not options:
        assert np.allclose(ours, wanted, atol=1e-2)
        assert np.argsort(ours)[-20:].tolist() == np.argsort(wanted)[-20:].tolist()
    receipt = answer.receipt
    assert bool(receipt["checked_tokens"]) == compares_all
    compared = receipt["checked_tokens"] or receipt["offered_tokens"]
    assert receipt["recomputed_tokens"] >= round(0.3 * compared) > 0
    assert receipt["reused_tokens"] + receipt["recomputed_tokens"] == receipt["offered_tokens"]


@pytest.mark.promise("engines", "In SGLang a bound chooses tokens...")
def test_beyond_the_last_level_a_plan_is_computed_whole(serve, profile_at, cold):
    with serve(profile_at(CHECK, **bounded(2.0)) | ASKED) as served:
        served.teach()
        (answer,) = assert_cold(served, cold, MOVED)
    assert (answer.receipt["reason"], answer.receipt["reused_tokens"]) == ("risk_above_bound", 0)
