"""What is asked through TensorRT-LLM's arguments is answered as the embedded engine answers it."""

from dataclasses import replace

import pytest
import torch

from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.errors import SemBlendError
from validation import engines as audit
from validation.arms import COLD, POSITION_FIX, ArmChoices, arms_of
from validation.families.catalog import FamilyRequest, write_cases
from validation.measurement import BatchServer, ServingSettings
from validation.models import shipped_model
from validation.trtllm_engine import TrtllmEngine, TrtllmEngines, open_llm

SETTINGS = ServingSettings(str(shipped_model()), max_tokens=8, batch=4)


pytestmark = pytest.mark.usefixtures("_trtllm")


@pytest.fixture(autouse=True)
def _embedded(monkeypatch):
    monkeypatch.setattr("tests.validation.trtllm_stand_in.LLM.contract", "embedded")  # V2 shares other prefixes


@pytest.mark.parametrize("name", [COLD, POSITION_FIX])
def test_answers_losses_and_evidence_are_those_of_the_embedded_engine(shipped, name):
    trtllm = TrtllmEngines(str(shipped_model()))
    # A text is scored by one request a token; the requests behind it keep their own evidence.
    cases = write_cases(shipped, FamilyRequest(("prose", "reordered"), groups=2, questions=1, tokens=512))
    [arm] = arms_of([name], ArmChoices(8, boundary=1))
    ours, theirs = (BatchServer(engines, cases, SETTINGS).answers(arm) for engines in (shipped, trtllm))
    assert list(ours) == list(theirs)
    for case in cases:
        left, right = ours[case.id], theirs[case.id]
        assert left.loss == pytest.approx(right.loss, abs=1e-4)
        assert left.text == right.text
        torch.testing.assert_close(left.logits, right.logits, atol=1e-3, rtol=0)
        assert replace(left.reuse, exact_prefix_tokens=0) == replace(right.reuse, exact_prefix_tokens=0)
        assert (right.reuse.reused_tokens > 100) == (name == POSITION_FIX)


def test_an_audit_log_that_misses_requests_is_not_read_as_their_evidence(shipped, monkeypatch):
    cases = write_cases(shipped, FamilyRequest(("reordered",), groups=1, questions=1, tokens=512))
    [arm] = arms_of([POSITION_FIX], ArmChoices(8, boundary=1))
    ended = audit.ended_requests
    monkeypatch.setattr("validation.measurement.ended_requests", lambda events, asked: ended(events[:-8], asked))
    with pytest.raises(SemBlendError, match="audit log has the end of"):
        BatchServer(shipped, cases, SETTINGS).answers(arm)


class Named:
    """An LLM that notes the options of a call, or raises `error`."""

    def __init__(self, error=None):
        self.options, self.error = {}, error

    def generate(self, prompts, params, **options):
        if self.error is not None:
            raise self.error
        self.options = options
        return []


@pytest.mark.parametrize(("salts", "named"), [([None, None], set()), (["a", None], {"cache_salt"})])
def test_salts_are_named_only_where_there_are_some(salts, named):
    llm = Named()
    with pytest.raises(SemBlendError, match="zip"):
        TrtllmEngine(llm, None).generate([[1], [2]], SamplingParams(max_tokens=1), salts)
    assert set(llm.options) - {"use_tqdm"} == named


def test_what_the_engine_raises_is_one_sentence():
    with pytest.raises(SemBlendError, match="TensorRT-LLM gave no answer: out of memory"):
        TrtllmEngine(Named(RuntimeError("out of memory")), None).generate([[1]], SamplingParams())
    with pytest.raises(SemBlendError, match=r"does not start with model .*unknown_option"):
        open_llm(str(shipped_model()), None, {}, unknown_option=1)
