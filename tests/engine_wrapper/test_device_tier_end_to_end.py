"""The whole path with donors on the card, or on the CPU in its place: same answers, and room is made downwards."""

import pytest
import torch

from semblend_trt.donors.catalog import Tier
from tests.builders import engine as serving
from tests.builders.engine import BLOCK, GREEDY, PREFILL, QUESTION, text
from tests.semblend_trt.held_donors import held_in

pytestmark = pytest.mark.usefixtures("position_fix")

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
ONE_ON_DEVICE = 16 * BLOCK * TOKEN_BYTES


DOCUMENTS = [text(10 + number, 200) for number in range(4)]


def question_about(*numbers):
    return [token for number in numbers for token in text(40 + number, 33) + DOCUMENTS[number]] + QUESTION


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
)
def device(request):
    return request.param


@pytest.fixture
def engine(engine, device):
    elsewhere = {} if device == "cpu" else {"runner": None, "dtype": "float32", "device": device}

    def build(device_bytes=0, host_bytes=1 << 30, **options):
        return engine(DEVICE_BYTES=device_bytes, HOST_BYTES=host_bytes, **elsewhere, **options)

    return build


def serve(llm, prompt, params=GREEDY):
    output = serving.serve(llm, prompt, params)
    llm.connector_worker.saver.drain()
    host = llm.connector_worker.store.host
    assert host.used_bytes <= host.byte_budget
    return output


def keep(llm, *numbers):
    for number in numbers:
        serve(llm, text(20 + number, 40) + DOCUMENTS[number] + text(30 + number, 9), PREFILL)


def held(llm):
    store, donors = llm.connector_worker.store, llm.connector_scheduler.donor_index
    on_device = on_host = 0
    for donor_id in donors.texts.by_id:
        is_on_device = donors.catalog.tier(donor_id) is Tier.DEVICE
        assert donor_id in (store.device if is_on_device else store.host)
        on_device, on_host = on_device + is_on_device, on_host + (not is_on_device)
    assert on_device + on_host == len(held_in(store))
    return on_device, on_host


def assert_reused(llm, reference, *numbers):
    """All of these documents are reused, and answered about as by the other engine."""
    output, expected = (serve(each, question_about(*numbers)) for each in (llm, reference))
    assert output.reused_tokens == expected.reused_tokens == 200 * len(numbers)
    serving.assert_same(output, expected, 0)


def test_host_donors_arrive_before_what_reads_them(engine, monkeypatch):
    llm, reference = serving.through_staging_memory(engine(), monkeypatch, 200), engine(device_bytes=1 << 26)
    for each in (llm, reference):
        keep(each, 0, 1, 2)
    for numbers in ((0,), (2, 1), (0, 1, 2)):
        assert_reused(llm, reference, *numbers)


def test_layers_that_a_failed_forward_left_out_harm_no_later_request(engine, monkeypatch):
    staged = serving.through_staging_memory(engine(contract="1.2"), monkeypatch, 200)
    llm, reference = staged, engine(device_bytes=1 << 26)
    for each in (llm, reference):
        keep(each, 0, 1)
    readiness = llm.executor.model_runner.readiness

    def failing(layer, stream):
        assert readiness.is_arriving
        raise RuntimeError("injected")

    with monkeypatch.context() as broken:
        broken.setattr(llm.connector_worker, "save_kv_layer", failing)
        (failed,) = llm.generate([question_about(0)], PREFILL)
    assert "a forward that failed" in failed.error
    assert_reused(llm, reference, 1)
    assert not any(donor.readers for donor in llm.connector_worker.store.host._donors.values())


@pytest.mark.promise("donors", "A full card moves donors down to the host; one that is used there goes up again")
def test_a_full_card_moves_the_oldest_down_and_what_is_used_there_up(engine):
    llm, reference = engine(device_bytes=2 * ONE_ON_DEVICE), engine()
    for each in (llm, reference):
        keep(each, 0, 1, 2)
    donors = llm.connector_scheduler.donor_index
    oldest = next(iter(donors.texts.by_id))
    assert (held(llm), donors.catalog.tier(oldest)) == ((2, 1), Tier.HOST)
    assert_reused(llm, reference, 0, 2)  # a plan of documents from both tiers
    for _ in range(2):
        assert_reused(llm, reference, 0)
        llm.connector_scheduler.take_events()  # hears what became of it
        assert (held(llm), donors.catalog.tier(oldest)) == ((2, 1), Tier.DEVICE)
    assert_reused(llm, reference, 1)
    assert_reused(llm, reference, 2)


def test_arena_below_one_block_stops_the_engine_with_a_sentence(engine):
    with pytest.raises(Exception, match="SEMBLEND_DEVICE_BYTES to at least 12288"):
        engine(device_bytes=100)
