"""Documents first seen behind moved KV are reused where the reuse profile allows generations, and answered as cold."""

import random

import pytest

from engine_wrapper.embedded.llm import SamplingParams
from semblend_trt.reuse_profile import ReuseProfile
from tests.builders.engine import Engines, disk_tier, serve_and_drain, token_ids
from validation.documents import stock_list
from validation.models import profile_of, shipped_model
from validation.prompts import INSTRUCTIONS, render

LISTS = [stock_list(random.Random(seed), rows=14) for seed in range(7)]
# The first prompt is computed cold. Each later one shows a list for the first time, behind one of the first prompt's
# and, from the third prompt on, behind the list that was new in the prompt before.
SHOWN = [(0, 1, 2), (2, 1, 3), (1, 3, 4), (2, 4, 5), (1, 5, 6)]


def prompt_of(instruction, shown):
    return render(INSTRUCTIONS[instruction], [LISTS[each].text for each in shown], LISTS[shown[-1]].questions[3].text)


PROMPTS = [prompt_of(number, shown) for number, shown in enumerate(SHOWN)]


@pytest.fixture(scope="module")
def cold(shipped_runner, tmp_path_factory):
    engines = Engines(tmp_path_factory.mktemp("cold") / "audit.jsonl", model=shipped_model(), runner=shipped_runner)
    yield engines.cold()
    engines.shutdown()


@pytest.fixture
def verified(engine, shipped_runner, tmp_path):
    """Engines under the shipped profile with so many generations."""

    def build(generations, **settings):
        shipped, path = profile_of(None, None), tmp_path / f"{generations}.json"
        ReuseProfile.read(shipped).model_copy(update={"generations": generations}).write(path)
        model = {"model": shipped_model(), "runner": shipped_runner}
        return engine(cache={"tokens_per_block": 32}, PROFILE=path, **model, **settings)

    return build


def serve(llm, prompt, **options):
    return serve_and_drain(llm, prompt, SamplingParams(max_tokens=6), **options)


def generations_of(llm):
    return sorted(llm.connector_scheduler.donor_index.texts.generations.values())


@pytest.mark.promise("reuse", "With generations, documents first seen after moved KV are reused, and answered as cold")
@pytest.mark.parametrize(
    ("allowed", "contract", "reused", "kept"),
    [
        (0, "embedded", [False, True, False, True, False], []),
        (1, "embedded", [False, True, True, False, True], [1, 1]),
        (3, "1.2", [False, True, True, True, True], [1, 2, 3]),
        (3, "1.4", [False, True, True, True, True], [1, 2, 3]),
    ],
)
def test_documents_first_seen_behind_moved_kv_are_reused_as_the_profile_allows(
    engine, cold, verified, allowed, contract, reused, kept
):
    llm = verified(allowed, contract=contract)
    outputs = [serve(llm, prompt) for prompt in PROMPTS]
    assert [output.reused_tokens > 100 for output in outputs] == reused
    assert generations_of(llm) == kept
    assert [token_ids(output) for output in outputs] == [token_ids(serve(cold, prompt)) for prompt in PROMPTS]
    plans, donors = engine.events("plan_dispatched"), engine.events("donor_registered")
    assert sorted(event["generation"] for event in donors if event["generation"]) == kept
    assert max(event["generation"] for event in plans) == min(allowed, max(kept, default=0))


@pytest.mark.promise("reuse", "A request whose plan failed, or...")
def test_without_evidence_of_its_check_a_request_becomes_no_donor(verified):
    llm = verified(3)
    serve(llm, PROMPTS[0])
    llm.executor.model_runner.evidence_sink = None
    assert serve(llm, PROMPTS[1]).reused_tokens == 0  # unknown
    assert generations_of(llm) == []
    catalog = llm.connector_scheduler.donor_index.catalog.stats()
    assert (catalog.ready, catalog.saving, catalog.leases) == (1, 0, 0)


@pytest.mark.promise("reuse", "A donor keeps its generation on disk, and the fleet does not hear of it")
@pytest.mark.parametrize("allowed", [0, 3])
def test_a_restarted_engine_finds_it_on_disk_with_its_generation(cold, verified, tmp_path, allowed):
    disk = disk_tier(tmp_path) | {"DEVICE_BYTES": 0}
    llm = verified(3, **disk)
    for prompt in ("hello", *PROMPTS[:2]):  # files are written once the folder has been read
        serve(llm, prompt)
    llm.shutdown()
    restarted = verified(allowed, MIN_DONOR_TOKENS=4096, **disk)
    outputs = [serve(restarted, prompt) for prompt in ("hello", "hello", prompt_of(8, SHOWN[2]), PROMPTS[2])]
    assert generations_of(restarted) == [1]
    assert (outputs[-1].reused_tokens > 100) == (allowed > 0)
    assert token_ids(outputs[-1]) == token_ids(serve(cold, PROMPTS[2]))
