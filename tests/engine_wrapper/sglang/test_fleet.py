"""A fleet hears of the donors of an SGLang engine, over a real nats-server."""

import pytest

from tests.builders.vllm import MOVED, NEW
from tests.semblend_trt.conftest import NatsServer, Reader
from tests.semblend_trt.fleet.conftest import donors_of

WORKER = 5, 0


@pytest.fixture
def nats(tmp_path):
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.kill()


@pytest.mark.promise("engines", "In SGLang Llama, Qwen2 and Qwen3...")
def test_donors_are_announced_and_withdrawn(serve, nats, profile_at):
    reader = Reader(nats.url)
    checked = profile_at({"layer": 2, "threshold": 1.0})
    with serve({**checked, "NATS_URL": nats.url, "WORKER_ID": "5"}) as served:
        served.teach()
        assert reader.wait_for(lambda reader: len(donors_of(reader.directory, WORKER)) == 2)
        assert served.ask(MOVED, max_tokens=1).receipt["reused_tokens"] > 400
        served.settle()
        served.ask(NEW, max_tokens=1)
        served.settle()
        assert reader.wait_for(lambda reader: len(donors_of(reader.directory, WORKER)) == 4)
        assert served.local.scheduler.flush_cache()
        assert reader.wait_for(lambda reader: not donors_of(reader.directory, WORKER))
    reader.close()
