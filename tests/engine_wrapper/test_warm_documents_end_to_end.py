"""Documents that were prefilled ahead are donors from the first prompt on, and no request waits for them."""

from __future__ import annotations

import pytest

from engine_wrapper.embedded.llm import SamplingParams
from semblend_trt.errors import ConfigurationError
from tests.engine_wrapper.serving import DOCUMENT, QUESTION, SHIFTED, assert_same, serve, text

SECOND = text(11, 150)
VERSION = text(12, 30) + DOCUMENT[30:]  # most of it stands in DOCUMENT
TEN = SamplingParams(max_tokens=10, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("position_fix")


def test_the_first_prompt_reuses_a_document_behind_other_text(engine):
    llm, steps = engine(POLICY="boundary", RECOMPUTE_BOUNDARY_LAYER=3), []
    report = llm.warm_documents([DOCUMENT, SECOND], on_step=steps.append)
    assert (report.documents, report.tokens, report.already_held, report.failed) == (2, 350, 0, {})
    assert steps == [1, 2]
    output = serve(llm, SHIFTED)
    other = serve(llm, QUESTION + SECOND + QUESTION)
    offered = [llm.connector_scheduler.reuse_of(each.request_id).offered_tokens for each in (output, other)]
    assert offered == [len(DOCUMENT), len(SECOND)]
    assert_same(output, serve(engine.cold(), SHIFTED))


@pytest.mark.parametrize("contract", ["1.2", "embedded"])
def test_what_is_held_is_not_computed_again_and_another_salt_holds_nothing(engine, contract):
    llm = engine(contract=contract)
    assert llm.warm_documents([DOCUMENT], cache_salt="a").tokens == len(DOCUMENT)
    again = llm.warm_documents([DOCUMENT, SECOND], cache_salt="a")
    assert (again.tokens, again.already_held, again.failed) == (len(SECOND), 1, {})
    assert llm.warm_documents([DOCUMENT], cache_salt="b").tokens == len(DOCUMENT)


def test_a_document_that_is_mostly_anothers_is_computed_whole_and_is_a_donor(engine):
    llm = engine()
    report = llm.warm_documents([DOCUMENT, VERSION])
    assert (report.tokens, report.failed) == (len(DOCUMENT) + len(VERSION), {})
    assert serve(llm, QUESTION + VERSION + QUESTION).reused_tokens == len(VERSION)


def test_documents_that_cannot_be_donors_are_told_and_the_rest_goes_on(engine):
    report = engine().warm_documents(["", text(5, 1024), [1, 300], text(6, 63), DOCUMENT])
    assert report.tokens == 63 + len(DOCUMENT)
    assert list(report.failed) == [0, 1, 2, 3]
    told = ("the prompt is empty", "1024 tokens with 1 new ones exceeds max_seq_len 1024", "token id 300", "63 tokens")
    assert all(each in reason for each, reason in zip(told, report.failed.values(), strict=True))
    with pytest.raises(ConfigurationError, match="keeps no donors"):
        engine.cold().warm_documents(DOCUMENT)


def test_documents_that_later_ones_push_out_are_told(engine):
    llm = engine()
    llm.warm_documents(DOCUMENT)
    room = llm.connector_scheduler.donor_index.held().host_bytes * 3 // 2
    report = engine(HOST_BYTES=room).warm_documents([DOCUMENT, text(20, len(DOCUMENT))])
    assert list(report.failed) == [0]
    assert "SEMBLEND_HOST_BYTES" in report.failed[0]


def test_a_request_that_comes_while_documents_wait_is_served_before_the_next(engine):
    llm, streams, served = engine(), [], []

    def come(done):
        served.append([each.has_news() for each in streams])
        streams.append(llm.generate_async(text(30 + done, 90), TEN, streaming=False))

    llm.warm_documents([DOCUMENT, SECOND, VERSION], on_step=come)
    assert served == [[], [True], [True, True]]
    assert not streams[2].has_news()


def test_an_interrupt_keeps_what_is_done(engine):
    llm = engine()

    def interrupt(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.warm_documents([DOCUMENT, SECOND], on_step=interrupt)
    assert llm.executor.num_unfinished == 0
    report = llm.warm_documents([DOCUMENT, SECOND])
    assert (report.already_held, report.tokens) == (1, len(SECOND))
