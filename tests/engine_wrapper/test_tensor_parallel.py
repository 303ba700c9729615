"""An engine of four processes serves what one does, and all decide alike when something fails on one of them."""

import json
import multiprocessing

import pytest

from semblend_trt.ranks import Ranks
from tests.conftest import save_tiny_model
from tests.engine_wrapper.rank_life import DOCUMENT, SHIFTED, Life, live

JOINED_WITHIN = 120.0  # seconds, of which the processes take most to start


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Each of four ranks has two of its KV heads."""
    folder = tmp_path_factory.mktemp("model")
    return save_tiny_model("qwen2", folder, num_attention_heads=8, num_key_value_heads=8)


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    return Life(model, tmp_path_factory.mktemp("alone"), Ranks()).run()


@pytest.fixture(scope="module")
def told(model, tmp_path_factory):
    size, folder = 4, tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engine_wrapper.rank_life"])
    processes = [context.Process(target=live, args=(rank, size, model, folder), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(JOINED_WITHIN)
    for process in processes:
        process.kill()
    assert [process.exitcode for process in processes] == [0] * size
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def alike(told, name):
    assert all(each[name] == told[0][name] for each in told)
    return told[0][name]


def test_cold_answers_are_those_of_one_process(told, alone):
    assert alike(told, "cold") == alone["cold"]


@pytest.mark.known_defect(23)
def test_each_rank_keeps_and_places_its_own_heads(told, alone):
    ours = alike(told, "shifted")
    assert ours["shifted"] == alone["shifted"]["shifted"]
    assert (ours["shifted"]["reused"], ours["shifted"]["computed"]) == (200, len(SHIFTED) - 200)
    for our_heads, their_heads in zip(ours["held"], alone["shifted"]["held"], strict=True):
        assert (our_heads, len(set(our_heads))) == (pytest.approx(their_heads, rel=1e-6), 8)


@pytest.mark.promise("engines", "A check decides once over all heads")
def test_a_check_decides_once_over_all_heads(told, alone):
    ours, theirs = alike(told, "verified"), alone["verified"]
    assert (ours["told"], ours["evidence"]) == (theirs["told"], theirs["evidence"])
    assert ours["kept"] == pytest.approx(theirs["kept"], rel=1e-5)
    ((_, checked, reused, is_dropped),) = ours["evidence"]
    assert checked == len(DOCUMENT)
    assert 0 < reused < checked
    assert not is_dropped
    assert not any(ours["unread"])


def test_donors_are_evicted_on_every_rank(told, alone):
    ours = alike(told, "evicted")
    assert ours["told"] == alone["evicted"]["told"]
    assert [each["reused"] for each in ours["told"]] == [240, 0]
    assert all(each == alone["evicted"]["held"][0] for each in ours["held"])


@pytest.mark.promise(
    "engines",
    "A donor is found only where every rank holds it; a load that fails on one is used on none",
)
def test_a_donor_that_one_rank_could_not_save_is_never_found(told, alone):
    ours = alike(told, "save_fails")
    assert not any(ours["held"])
    assert (ours["second"]["tokens"], ours["second"]["reused"]) == (alone["cold"]["tokens"][1], 0)
    assert (ours["third"]["reused"], ours["leaked"]) == (200, 0)


@pytest.mark.promise("engines", "A donor is found only where...")
def test_a_load_that_fails_on_one_rank_is_used_on_none(told, alone):
    ours = alike(told, "load_fails")
    assert ours["failed"]["tokens"] == alone["cold"]["tokens"][1]
    assert (ours["failed"]["reused"], ours["failed"]["reason"]) == (0, "load_failed")
    assert not any(ours["keeps"])
    assert not any(ours["unread"])


@pytest.mark.promise("donors", "Engines of several ranks keep nothing on disk, which is counted")
def test_the_disk_tier_is_refused_and_counted(told, alone):
    ours = alike(told, "disk")
    assert "disk_unavailable" in ours["events"]
    assert ours["shifted"] == alone["shifted"]["shifted"]


@pytest.mark.promise("engines", "What one rank refuses, all refuse; ranks of two versions reuse nothing")
def test_what_one_rank_refuses_all_refuse(told):
    ours = alike(told, "refusal")
    assert (ours["refusal"], ours["told"]["reason"]) == ("pool_layout", "pool_layout")
