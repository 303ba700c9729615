"""Placement: the best of a gateway's candidates by text and load, whatever it is given."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.fleet.placement import Loads, Placement, Score
from semblend_trt.namespace import content_value
from semblend_trt.prompts import ReadingThreads
from tests.semblend_trt.fleet.conftest import DOCUMENT, fed
from tests.semblend_trt.samples import BASE_NAMESPACE

NAMES = ("a", "b", "c", "d")
FOUR = {name: (number, 0) for number, name in enumerate(NAMES)}
FOUR_OF = dict.fromkeys(("min_size", "max_size"), 4)


def best(placement, tokens=DOCUMENT, salt=None, candidates=FOUR, load=None):
    return placement.place(tokens, salt, candidates, load or {})[0]


@pytest.mark.promise("fleet", "A gateway sends a request where its text is, weighed against what waits there")
@given(st.lists(st.integers(0, 8), **FOUR_OF), st.lists(st.integers(0, 3000), **FOUR_OF), st.sampled_from([0.25, 1, 2]))
def test_the_worker_that_would_have_the_prompt_first_is_best(parts, loads, weight):
    placement = Placement(None, load_weight=weight)
    for (_, worker), part in zip(FOUR.items(), parts, strict=True):
        fed(placement.directory, ("d", DOCUMENT[: 125 * part]), worker=worker) if part else None
    load = dict(zip(NAMES, loads, strict=True))
    scores = placement.place(DOCUMENT, None, FOUR, load)
    waits = [weight * load[each.name] + len(DOCUMENT) - each.held for each in scores]
    assert waits == sorted(waits)
    assert {each.name: -(-each.held // 125) for each in scores}.keys() == set(NAMES)
    for each, part in zip(sorted(scores, key=lambda score: score.name), parts, strict=True):
        assert abs(each.held - 125 * part) <= 125 * (part > 0)


def test_equal_candidates_take_turns():
    placement = Placement(None)
    assert Counter(best(placement).name for _ in range(40)) == dict.fromkeys(NAMES, 10)


def test_a_worker_without_the_connector_and_one_of_another_group_are_placed_by_load():
    placement = Placement(None)
    fed(placement.directory, ("d", DOCUMENT), worker=(9, 0))
    scores = placement.place(DOCUMENT, None, {"bare": None, "ours": (0, 0)}, {"bare": 5, "ours": 7})
    assert scores == (Score("bare", 0, -5), Score("ours", 0, -7))
    assert placement.counts == {"not_held": 1}


@pytest.mark.promise("fleet", "What placement cannot read, find or trust is placed by load, and counted")
@pytest.mark.parametrize(
    ("tokens", "salt", "result"),
    [
        *((tokens, None, "failed") for tokens in (np.zeros((2, 2), int), ["a"], [-1], [1 << 40], [0.5])),
        *(([], None, "not_held"), (None, None, "unread"), (DOCUMENT, "\ud800", "failed"), (DOCUMENT, "b", "not_held")),
    ],
)
def test_what_is_no_prompt_or_no_salt_is_placed_by_load(tokens, salt, result):
    placement = Placement(None)
    fed(placement.directory, ("d", DOCUMENT), worker=(0, 0))
    assert best(placement, tokens, salt, load={"a": 1, "b": 1, "d": 1}).name == "c"
    assert placement.place(tokens, salt, {}, {}) == ()
    assert placement.counts == {result: 1, "no_candidate": 1}


@pytest.mark.promise("fleet", "What placement cannot read, find or...")
def test_engines_with_another_tokenizer_hold_nothing():
    ours, other = Placement(None, tokenizer=content_value("ours")), Placement(None, tokenizer=content_value("other"))
    for placement in (ours, other):
        base = replace(BASE_NAMESPACE, tokenizer_revision=content_value("ours"))
        fed(placement.directory, ("d", DOCUMENT), worker=(0, 0), base=base)
    assert (best(ours).held, best(other).held) == (1000, 0)


def test_loads_go_with_the_first_answer():
    loads = Loads()
    answered = [loads.sent("a", 100), loads.sent("a", 50), loads.sent("b", 7)]
    assert loads.tokens == {"a": 150, "b": 7}
    for _ in range(2):
        answered[0]()
        answered[2]()
    assert loads.tokens == {"a": 50}


def test_tenants_never_meet():
    placement = Placement(None)
    fed(placement.directory, ("d", DOCUMENT, "acme"), worker=(2, 0))
    assert best(placement, salt="acme") == Score("c", 1000, 1000)
    assert all(best(placement, salt=salt).held == 0 for salt in (None, "", "globex"))
    assert placement.counts == {"held": 1, "not_held": 3}


@pytest.mark.promise("fleet", "Many long prompts at once keep their holder")
def test_sixteen_prompts_of_128k_tokens_at_once_go_to_their_holders(tokenizer):
    rng, placement, threads = np.random.default_rng(5), Placement(None), ReadingThreads(tokenizer)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", dtype=np.uint8)
    texts = [rng.choice(letters, 1 << 17).tobytes().decode() for _ in range(4)]
    held = [np.array(tokenizer.encode(each), np.int32) for each in texts]
    assert min(map(len, held)) >= 128_000
    for worker, tokens in zip(FOUR.values(), held, strict=True):
        fed(placement.directory, ("d", tokens), worker=worker)

    async def placed(number):
        body = {"prompt": f"Number {number}: " + texts[number % 4]}
        tokens = await threads.read(len(body["prompt"]), lambda reader: reader.completion(body))
        return best(placement, tokens)

    async def placed_at_once():
        return await asyncio.gather(*map(placed, range(16)))

    found = asyncio.run(placed_at_once())
    threads.close()
    assert [each.name for each in found] == [NAMES[number % 4] for number in range(16)]
    assert all(each.held > 0.95 * len(held[number % 4]) for number, each in enumerate(found))
