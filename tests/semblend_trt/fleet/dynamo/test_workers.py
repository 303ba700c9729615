"""Which instances are asked, whose donors are theirs, and what the next one is asked for."""

import json
from collections import Counter

import numpy as np
import pytest

from semblend_trt.fleet.dynamo.relay import REST_SECONDS, AskedRequest, EngineWorkers, worker_of

DIGEST = "blake3:aa"


def card(digest=DIGEST, **runtime):
    return json.dumps({"tokenizer": {"hf_tokenizer_json": {"checksum": digest}}, "runtime_config": runtime})


def topology(name):
    return {"topology_domains": {"semblend-worker": name}}


class Fleet:
    """Instances with their cards, and a clock that tests move."""

    def __init__(self, **cards):
        self.cards = {name.removeprefix("i"): text for name, text in cards.items()}
        self.present = [int(name) for name in self.cards]
        self.now = 0.0
        self.problems = Counter()
        asks = (lambda: self.present, lambda: self.cards, frozenset({DIGEST}))
        self.workers = EngineWorkers(*asks, lambda problem: self.problems.update([problem]), lambda: self.now)


def receipt(worker):
    return {"kv_transfer_params": {"semblend.receipt": {"worker": worker}}}


def test_a_worker_is_known_by_its_card_or_by_its_first_answer():
    fleet = Fleet(i1=card(**topology("3")), i2=card())
    assert fleet.workers.candidates() == {1: (3, 0), 2: None}
    assert fleet.workers.answered(2, receipt("4.0")) == (4, 0)
    assert fleet.workers.candidates() == {1: (3, 0), 2: (4, 0)}


@pytest.mark.parametrize("told", [None, {}, {"kv_transfer_params": None}, receipt(None), receipt("x"), receipt(3)])
def test_a_worker_without_our_connector_is_counted(told):
    fleet = Fleet(i1=card())
    fleet.workers.candidates()
    assert fleet.workers.answered(1, told) is None
    assert fleet.problems["no_connector"] == 1
    assert fleet.workers.candidates() == {1: None}


@pytest.mark.promise("fleet", "Through Dynamo a bad request is...")
@pytest.mark.parametrize("text", [card("blake3:bb"), "{", "[]", '{"runtime_config": 3}', '{"tokenizer": null}'])
def test_an_instance_with_another_tokenizer_or_an_unreadable_card_is_not_asked(text):
    fleet = Fleet(i1=card(), i2=text)
    assert list(fleet.workers.candidates()) == [1]
    assert fleet.problems["other_tokenizer"] == 1


def test_an_instance_is_asked_once_its_card_is_there():
    fleet = Fleet(i1=card())
    fleet.present.append(2)
    assert list(fleet.workers.candidates()) == [1]
    fleet.cards["2"] = card()
    assert list(fleet.workers.candidates()) == [1, 2]


def test_one_that_failed_rests_while_there_is_another():
    fleet = Fleet(i1=card(), i2=card())
    fleet.workers.candidates()
    fleet.workers.failed(1)
    assert list(fleet.workers.candidates()) == [2]
    assert list(fleet.workers.candidates(tried={2})) == [1]
    fleet.now = REST_SECONDS
    assert list(fleet.workers.candidates()) == [1, 2]
    fleet.workers.failed(1)
    fleet.workers.answered(1, receipt("1"))  # an answer ends the rest
    assert list(fleet.workers.candidates()) == [1, 2]


def test_two_instances_with_one_id_are_placed_by_load_until_one_is_gone_or_failed():
    fleet = Fleet(i1=card(**topology("3")), i2=card(**topology("3")))
    assert fleet.workers.candidates() == {1: None, 2: None}
    assert fleet.problems["same_worker_id"] > 0
    fleet.present.remove(1)
    assert fleet.workers.candidates() == {2: (3, 0)}
    fleet.present.append(1)
    assert fleet.workers.candidates() == {2: None, 1: None}
    fleet.workers.failed(1)  # one that comes back under another instance has its id once the old one failed
    assert fleet.workers.candidates() == {2: (3, 0)}


@pytest.mark.parametrize("name", ["3.", "-3", "", 3, None])
def test_a_workers_name_is_its_id_and_rank(name):
    assert [worker_of(each) for each in ("3", "3.1")] == [(3, 0), (3, 1)]
    with pytest.raises((ValueError, TypeError)):
        worker_of(name)


def request(**fields):
    return {"token_ids": [5, 6, 7], "stop_conditions": {"max_tokens": 4, "min_tokens": 1}} | fields


def taken(asked, *pieces):
    return [asked.take(piece) for piece in pieces]


@pytest.mark.parametrize("tokens", [[5, 6, 7], np.array([5, 6, 7], "<i4").tobytes()])
def test_the_next_worker_is_asked_for_the_rest_and_usage_is_that_of_the_whole(tokens):
    came = request(token_ids=tokens, model="m")
    asked = AskedRequest(came)
    assert asked.next_request() is came
    taken(asked, {"token_ids": [8]}, {"token_ids": [9, 10]})
    rest = {"max_tokens": 1, "min_tokens": 0}
    assert asked.next_request() == {"token_ids": [5, 6, 7, 8, 9, 10], "stop_conditions": rest, "model": "m"}
    assert asked.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert not asked.is_whole
    last = {"token_ids": [11], "finish_reason": "stop"}
    last["completion_usage"] = {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}
    assert taken(asked, last) == [True]
    assert last["completion_usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert asked.is_whole


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_options": {"n": 2}},
        {"sampling_options": {"best_of": 2}},
        {"sampling_options": {"guided_decoding": {"json": {}}}},
        {"output_options": {"prompt_logprobs": 0}},
    ],
)
def test_what_an_engine_alone_knows_is_not_continued_once_it_has_begun(fields):
    asked = AskedRequest(request(**fields))
    assert asked.is_continuable
    taken(asked, {"token_ids": [8, 9, 10, 11]})
    assert (asked.is_continuable, asked.is_whole) == (False, False)


def test_the_salt_is_the_engines():
    assert AskedRequest(request(routing={"cache_salt": "a"})).salt == "dynamo-cache-salt:a"
    assert AskedRequest(request(routing={"cache_salt": None})).salt is None
    assert AskedRequest(request(routing=None)).salt is None
