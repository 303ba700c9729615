"""A fleet hears of the donors of an SGLang engine, over a real nats-server."""

import numpy as np
import pytest

from semblend_trt.fleet.events import decode
from semblend_trt.fleet.sketch import Sketch, sketch_key
from tests.builders.vllm import DONOR, MOVED, NEW
from tests.semblend_trt.conftest import NatsServer, Reader
from tests.semblend_trt.fleet.conftest import donors_of, overlap
from tests.semblend_trt.samples import prompt_fingerprints

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
        # Of a request that reused moved text, what comes before that text alone is announced.
        assert served.ask(MOVED, max_tokens=1).receipt["reused_tokens"] > 400
        served.settle()
        served.ask(NEW, max_tokens=1)
        served.settle()
        assert reader.wait_for(lambda reader: len(donors_of(reader.directory, WORKER)) == 4)
        key = sketch_key(served.scheduler.namespace.for_request(None, None).key, None)
        told = [decode(payload).data for payload in reader.payloads]
        sketches = [
            Sketch.from_bytes(each.segments[0].provider_metadata) for each in told if each.kind == "donor_registered"
        ]
        for text in (DONOR, NEW, MOVED[70:570]):
            asked = prompt_fingerprints(np.asarray(text, np.int32), key)
            assert [overlap(each, asked) > 0.5 for each in sketches].count(True) == 1
        assert served.local.scheduler.flush_cache()
        assert reader.wait_for(lambda reader: not donors_of(reader.directory, WORKER))
    reader.close()
