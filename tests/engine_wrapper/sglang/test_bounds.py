"""What a bound and a check choose inside SGLang: the embedded engine's choice, and what the receipt says of it."""

import numpy as np
import pytest

from engine_wrapper.embedded.request import SamplingParams
from engine_wrapper.sglang.rows import SglangRows
from engine_wrapper.token_schedule import SequenceWork
from semblend_trt.reuse_profile import ProfileBound, ProfileCheck, ProfileLevel, ReuseProfile
from tests.builders.engine import Engines, teach
from tests.engine_wrapper.sglang.conftest import DOCUMENT, DONOR, MOVED, NEW, SHORT, WARM, WHOLE, assert_cold
from tests.engine_wrapper.watching import watched
from validation.models import shipped_model

# The document ends at a whole block of the embedded engine's too.
WEIGHED = [*NEW[:76], *DOCUMENT, *WARM[:40]]
CHECK = {"layer": 2, "threshold": 1.0, "sample_every": 4, "sample_threshold": 1.0}


def bounded(namespace, geometry, path, share=0.3, **check):
    """Variables of a profile whose bound computes this share of what is checked; above 1 everything."""
    level = ProfileLevel(deviation=1e6 if share <= 1 else 0.0, share=min(share, 1.0))
    own = {"check": ProfileCheck(**CHECK | check), "bounds": [ProfileBound(max_kl=1.0, risk=0.5, levels=[level])]}
    ReuseProfile.made_for(namespace, geometry, policy="verified", floor=0.5, **own).write(path)
    return {"POLICY": "verified", "PROFILE": str(path), "PROFILE_TRIAL": "1", "MAX_KL": "1.0", "RISK": "0.5"}


@pytest.fixture
def here(serve):
    """The namespace and geometry of SGLang's engine."""
    with serve() as served:
        served.teach()
        return served.scheduler.namespace, served.runtime.pool.geometry


def weighed_in_the_embedded_engine(tmp_path, **check):
    engines = Engines(tmp_path / "audit.jsonl", model=str(shipped_model()), dtype="float32")
    cache, own = {"tokens_per_block": 32, "enable_partial_reuse": False}, {**SHORT, "MIN_SPAN": "64"}
    first = engines(cache=cache, **WHOLE, **own)
    scheduler = first.connector_scheduler
    made = bounded(scheduler.namespace, scheduler._runtime.pool.geometry, tmp_path / "embedded.json", **check)
    llm = engines(cache=cache, **own, **made)
    teach(llm, DONOR)
    llm.generate([WEIGHED], SamplingParams(max_tokens=1))
    engines.shutdown()


@pytest.mark.promise(
    "engines",
    "In SGLang a bound chooses tokens by the attention that the embedded engine finds, and receipts say what was "
    "computed",
)
@pytest.mark.parametrize("compares_all", [True, False], ids=["all compared", "a sample compared"])
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 128}], ids=["whole", "chunks"])
def test_levels_choose_by_the_attention_that_the_embedded_engine_finds(
    serve, here, tmp_path, monkeypatch, options, compares_all
):
    monkeypatch.setattr("semblend_trt.discovery.planner.secrets.randbits", lambda _: 7)
    weighed, found = SequenceWork.weighed, []
    monkeypatch.setattr(SequenceWork, "weighed", lambda own, mass: found.append(mass.copy()) or weighed(own, mass))
    weighed_in_the_embedded_engine(tmp_path, compares_all=compares_all)
    with serve(bounded(*here, tmp_path / "bounded.json", compares_all=compares_all), **options) as served:
        served.teach()
        answer = served.ask(WEIGHED, max_new_tokens=1)
    wanted, ours = found
    assert len(ours) == len(wanted)
    if not options:
        assert np.allclose(ours, wanted, atol=1e-2)
        assert np.argsort(ours)[-20:].tolist() == np.argsort(wanted)[-20:].tolist()
    receipt = answer.receipt
    assert bool(receipt["checked_tokens"]) == compares_all
    compared = receipt["checked_tokens"] or receipt["offered_tokens"]
    assert receipt["recomputed_tokens"] >= round(0.3 * compared) > 0


@pytest.mark.promise("engines", "In SGLang a bound chooses tokens...")
def test_beyond_the_last_level_a_plan_is_computed_whole(serve, here, cold, tmp_path):
    with serve(bounded(*here, tmp_path / "bounded.json", share=2.0)) as served:
        served.teach()
        (answer,) = assert_cold(served, cold, MOVED)
    assert (answer.receipt["reason"], answer.receipt["reused_tokens"]) == ("risk_above_bound", 0)


@pytest.mark.promise("engines", "In SGLang a bound chooses tokens...")
def test_the_receipt_says_what_the_check_computed(serve, cold, tmp_path, monkeypatch):
    """Half of the tokens deviate by more than the threshold; what runs through the highest layer is computed."""
    compared = watched(monkeypatch, SglangRows, "compare", lambda found, *_: found.tolist())
    run = SglangRows.run
    top = []

    def running(rows, layer):
        if layer == rows._parts.geometry.num_layers - 1:
            top.append(rows._positions.tolist())
        run(rows, layer)

    with serve() as served:
        served.teach()
        checked = served.checked_at(tmp_path, layer=2, threshold=1.0)
    with serve(checked) as served:
        served.teach()
        served.ask(MOVED, max_new_tokens=1)
        checked = served.checked_at(tmp_path, layer=2, threshold=float(np.median(compared[-1])))
    with serve(checked) as served:
        served.teach()
        compared.clear()
        monkeypatch.setattr(SglangRows, "run", running)
        answer = served.ask(MOVED, max_new_tokens=1)
    receipt, (rows,), (deviations,) = answer.receipt, top, compared
    # What comes before the document is computed too, and is not offered.
    lead = answer.cached - receipt["offered_tokens"]
    promised = [position for position in rows if lead <= position < answer.cached]
    assert receipt["checked_tokens"] == len(deviations)
    assert receipt["recomputed_tokens"] == len(promised)
    assert receipt["reused_tokens"] + receipt["recomputed_tokens"] == receipt["offered_tokens"]
    assert 0.4 < receipt["reused_tokens"] / len(deviations) < 0.6
