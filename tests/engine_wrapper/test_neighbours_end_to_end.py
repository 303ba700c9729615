"""Semantic neighbours of served requests: found, said and written down, and never a reason to reuse KV."""

import random
import subprocess
import sys
from importlib.resources import files

import pytest

from tests.builders import engine as serving
from tests.builders.engine import PREFILL, find_donors

pytestmark = pytest.mark.usefixtures("position_fix")


def document(seed):
    """Sentences over words that no other document has."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(30)]
    return [" ".join([*rng.choices(words, k=7), str(rng.randrange(9999))]) + "." for _ in range(10)]


def reworded(sentences, seed):
    """The same words in another order, so that no run of tokens is long enough to be reused."""
    words = " ".join(sentences).split()
    random.Random(seed).shuffle(words)
    return " ".join(words)


@pytest.fixture
def served(engine):
    """Builds engines over the shipped model that look for neighbours."""

    def build(**settings):
        shipped = {"model": files("validation") / "assets" / "model", "runner": None}
        return engine(cache={"max_tokens": 8192}, **shipped, **{"EMBEDDER": "static", **settings})

    return build


def serve(llm, prompt, **options):
    output = serving.serve(llm, prompt, PREFILL, **options)
    scheduler = llm.connector_scheduler
    scheduler.reuse_of(output.request_id)
    scheduler.take_events()
    if scheduler._neighbours is not None:
        scheduler._neighbours._thread.drain()
    return output, scheduler.reuse_of(output.request_id)


@pytest.mark.promise("donors", "Semantic neighbours are reported and never a reason to reuse KV")
@pytest.mark.known_defect(29)
def test_a_reworded_prompt_is_near_and_reuses_nothing(engine, served):
    llm = served()
    donors = [document(seed) for seed in range(3)]
    first = [serve(llm, " ".join(sentences))[0] for sentences in donors]
    output, report = serve(llm, reworded(donors[1], 5))
    assert (output.reused_tokens, report.reused_tokens) == (0, 0)
    assert [near.donor_id.rsplit("-", 1)[1] for near in report.nearest] == [str(first[1].request_id)]
    assert report.nearest[0].similarity >= 0.6
    _, other_salt = serve(llm, reworded(donors[1], 6), cache_salt="another")
    assert other_salt.nearest == ()
    (event,) = (each for each in engine.events("neighbours") if each["request_id"] == output.request_id)
    assert [name for name, _ in event["nearest"]] == [near.donor_id for near in report.nearest]


@pytest.mark.promise("donors", "A near donor on disk is read back ahead of the next request")
@pytest.mark.parametrize("embedder", ["static", "off"])
def test_a_near_donor_on_disk_is_in_memory_for_the_next_lookup(served, tmp_path, embedder):
    disk, sentences = serving.disk_tier(tmp_path), document(3)
    llm = served(EMBEDDER="off", **disk)
    find_donors(llm)
    serve(llm, " ".join(sentences))
    llm.connector_worker.transfers.drain()
    llm.shutdown()
    llm = served(EMBEDDER=embedder, MIN_DONOR_TOKENS=4096, **disk)
    find_donors(llm)
    output, _ = serve(llm, reworded(sentences, 5))
    assert output.reused_tokens == 0
    serve(llm, "hello")  # an iteration behind the search: it has the donor fetched
    llm.connector_worker.transfers.drain()
    output, _ = serve(llm, "Read this. " + " ".join(sentences))
    assert (output.reused_tokens > 0) == (embedder == "static")


@pytest.mark.promise("donors", "Without the extra `semantic` serving goes on")
@pytest.mark.parametrize(
    ("package", "embedder", "extra"), [("onnxruntime", "onnx", "onnx"), ("faiss", "static", "semantic")]
)
def test_without_the_extra_the_exact_path_still_works(served, monkeypatch, caplog, package, embedder, extra):
    monkeypatch.setitem(sys.modules, package, None)
    llm = served(EMBEDDER=embedder)
    sentences = document(9)
    serve(llm, " ".join(sentences))
    output, report = serve(llm, "Read this. " + " ".join(sentences))
    assert output.reused_tokens > 0
    assert report.nearest == ()
    assert f"pip install 'semblend-trt[{extra}]'" in caplog.text


@pytest.mark.promise("donors", "Without the extra `semantic` serving goes...")
def test_serving_needs_no_extra():
    """In a process of its own: here, everything is imported already."""
    modules = "engine_wrapper.connector, semblend_trt.cli.doctor, semblend_trt.fleet.publisher"
    code = f"import sys; sys.modules.update(faiss=None); import {modules}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
