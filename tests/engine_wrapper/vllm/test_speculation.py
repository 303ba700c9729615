"""Drafts from the text itself: answers, donors and reuse are as without them."""

import pytest

from tests.engine_wrapper.vllm.conftest import DOCUMENT, DONOR, MOVED, WHOLE, assert_cold, cold_answers, some, taught
from tests.engine_wrapper.watching import watched

pytestmark = pytest.mark.every_version

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PHRASE = some(40)
REPEATED = PHRASE * 4  # an answer to it has drafts that are taken


def test_drafts_of_the_text_change_no_answer_and_no_donor(engine, monkeypatch):
    cold, most = cold_answers(DONOR, MOVED, REPEATED), 48
    served = taught(engine(*WHOLE, speculative_config=DRAFTS))
    [answer] = assert_cold(served, cold, MOVED)
    assert (answer.cached, served.offered) == (0, len(DOCUMENT))
    steps = watched(monkeypatch, served.core.scheduler, "update_from_output", lambda *_: 1)
    told = served.ask(REPEATED, max_tokens=most)
    assert told.tokens[:16] == cold(REPEATED).tokens
    assert len(steps) < most  # drafts were taken
    served.settle()
    served.forget()
    # The donor holds the answer too, but for what the last step may have added.
    again = [*REPEATED, *told.tokens]
    served.ask([*again, *DONOR[:30]], max_tokens=1)
    assert served.offered >= len(again) - 1 - DRAFTS["num_speculative_tokens"]
