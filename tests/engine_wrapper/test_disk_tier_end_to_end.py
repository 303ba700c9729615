"""Donors on disk: they outlive the engine, answer as before, and a failing disk costs a cold prefill only."""

import os
import random
import shutil
import threading

import pytest

from engine_wrapper.embedded.llm import SamplingParams
from semblend_trt.donors.disk_tier import FOLDER
from tests.builders.engine import disk_tier, token_ids
from tests.builders.engine import serve_and_drain as serve
from tests.engine_wrapper.watching import watched
from validation.documents import stock_list
from validation.models import shipped_model
from validation.prompts import render

pytestmark = pytest.mark.usefixtures("position_fix")

LISTS = [stock_list(random.Random(seed), rows=12) for seed in range(6)]
FIRST = render("Answer briefly.", [each.text for each in LISTS], LISTS[1].questions[0].text)


def second(number):
    """A question about the same documents. The engine's own prefix cache knows none of them from another one's head."""
    head = f"{number}: look up what is asked for."
    return render(head, [each.text for each in reversed(LISTS)], LISTS[4].questions[7].text)


SECOND = second(0)


@pytest.fixture
def engine(engine, shipped_runner, tmp_path):
    model = {"model": shipped_model(), "runner": shipped_runner}
    tiers = disk_tier(tmp_path) | {"HOST_BYTES": 1 << 30, "DEVICE_BYTES": 0}

    def build(**settings):
        return engine(cache={"tokens_per_block": 32}, **model | tiers | settings)

    return build


@pytest.fixture
def kept(engine):
    """A first engine's life: it leaves one donor on disk. The answer to SECOND that it gave by that donor."""
    first = ready(engine())
    serve(first, FIRST)
    expected = serve(first, SECOND)
    assert expected.reused_tokens > 500
    first.shutdown()
    return expected


@pytest.fixture
def restart(engine, kept):
    """Builds an engine that takes in the donor on disk, and keeps no donors of its own."""
    return lambda **settings: ready(engine(**{"MIN_DONOR_TOKENS": 4096, **settings}))


def ready(llm):
    serve(llm, "hello", SamplingParams(max_tokens=1))
    while llm.connector_worker._runtime.disk.found:
        serve(llm, "hello", SamplingParams(max_tokens=1))
    return llm


def events(llm):
    counts, offload = {}, llm.connector_scheduler.donor_index.offload
    offload._count = lambda event: counts.update({event.value: counts.get(event.value, 0) + 1})
    return counts


def donor_files(path):
    return sorted((path / FOLDER).glob("*.donor.safetensors"))


def reused(llm, numbers=range(3)):
    return [serve(llm, second(number)).reused_tokens for number in numbers]


@pytest.mark.promise("donors", "Donors on disk are found again after a restart")
def test_second_engine_answers_from_the_firsts_donor(restart, kept, tmp_path):
    assert len(donor_files(tmp_path)) == 1  # the second prompt's KV is approximate and no donor
    restarted = restart(MIN_DONOR_TOKENS=64)
    stats = restarted.connector_scheduler.donor_index.catalog.stats()
    assert (stats.ready, stats.resting) == (0, 1)
    cold = serve(restarted, second(1))
    assert cold.reused_tokens == 0  # never promised before it has been read
    assert restarted.connector_scheduler.outcomes.of(cold.request_id).reason == "donor_on_disk"
    warm = serve(restarted, SECOND)
    assert warm.reused_tokens >= kept.reused_tokens
    assert token_ids(warm) == token_ids(kept)


def test_another_salt_finds_nothing_after_a_restart(restart):
    assert reused(restart(DONOR_TENANT="another")) == [0, 0, 0]


@pytest.mark.promise("donors", "A full disk or a damaged...")
@pytest.mark.parametrize("damage", ["kv", "header", "text"])
def test_damaged_file_costs_a_cold_prefill(restart, tmp_path, damage):
    (path,) = donor_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[{"kv": len(data) // 2, "text": -200}.get(damage, data.index(b"namespace_key") + 20)] ^= 1
    path.write_bytes(bytes(data))
    restarted = restart()
    counts = events(restarted)
    assert reused(restarted) == [0, 0, 0]
    assert counts == ({"fetch_failed": 1} if damage == "kv" else {})
    assert (donor_files(tmp_path), len(restarted.connector_scheduler.donor_index.catalog)) == ([], 0)


@pytest.mark.parametrize("hindrance", ["key for all", "path of a file"])
def test_a_folder_or_key_that_cannot_be_used_costs_the_disk_tier_only(engine, tmp_path, hindrance):
    key, path = tmp_path / "key", tmp_path / "path"
    key.write_bytes(bytes(32))
    key.chmod(0o644 if hindrance == "key for all" else 0o600)
    if hindrance == "path of a file":
        path.write_text("in the way")
    llm = engine(DISK_PATH=path)
    assert [news.kind.value for news in llm.connector_worker._runtime.offload_events] == ["disk_unavailable"]
    serve(llm, FIRST)
    assert serve(llm, SECOND).reused_tokens > 500
    assert not path.is_dir() or donor_files(path) == []


def test_a_folder_that_goes_during_a_run_costs_its_donors_only(engine, tmp_path):
    llm = ready(engine())
    counts = events(llm)
    shutil.rmtree(tmp_path / FOLDER)
    serve(llm, FIRST)
    assert serve(llm, SECOND).reused_tokens > 500
    assert (counts, donor_files(tmp_path)) == ({"write_failed": 1}, [])


@pytest.mark.promise(
    "donors",
    "On a disk that is fuller than its budget new donors take the place of old ones, with one warning a minute",
)
def test_on_a_full_disk_new_donors_take_the_place_of_old_ones(engine, tmp_path, small_disk, caplog):
    """The file system holds two files and a half; the budget, of a gibibyte, is never used up."""
    prompts = [render("Answer.", [stock_list(random.Random(seed), rows=60).text], "What is it?") for seed in range(6)]
    llm = ready(engine())
    serve(llm, prompts[0])
    (path,) = donor_files(tmp_path)
    tokens = llm.connector_worker.transfers._disk.tokens_of(path.name.partition(".")[0])
    disk = small_disk(path.stat().st_size * 5 // 2)
    token_bytes = llm.connector_scheduler.donor_index.catalog.capacities.bytes_per_token
    llm.shutdown()
    llm = ready(engine(DISK_PATH=disk, HOST_BYTES=tokens * 3 // 2 * token_bytes))
    counts, held = events(llm), []
    for prompt in prompts:
        serve(llm, prompt)
        held.append({path.name for path in donor_files(disk)})
    newest = [(held[at] - held[at - 1]) for at in range(1, len(prompts))]
    assert [len(each) for each in newest] == [1, 0, 1, 1, 1]  # the third donor finds the disk full
    assert held[-1] == newest[-1] | newest[-2]
    assert counts == {"file_written": 5, "write_failed": 1}
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.promise("donors", "The disk is never touched on the engine's thread")
def test_disk_is_never_touched_on_the_engines_thread(engine, monkeypatch):
    touched = set()
    for name in ("open", "fsync", "posix_fallocate"):
        watched(monkeypatch, os, name, lambda *_, **__: touched.add(threading.current_thread().name))
    llm = ready(engine())
    touched.clear()
    serve(llm, FIRST)
    assert touched == {"semblend-write"}
