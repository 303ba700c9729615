"""A served engine announces its donors, so that a router that knows the prompt finds the worker that holds its text."""

from __future__ import annotations

import random

import pytest

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from semblend_trt.fleet.sketch import Sketch, overlap, prompt_fingerprints, sketch_key
from semblend_trt.fleet.wire import decode
from semblend_trt.namespace import CacheNamespace

PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)


def text(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.fixture
def engine(tiny_qwen2_path, nats_server, monkeypatch):
    """An embedded engine that tells the server of its donors as worker 4, with room for two of 300 tokens."""
    settings = {"POLICY": "position_fix", "NATS_URL": nats_server.url, "WORKER_ID": "4", "HEARTBEAT_SECONDS": "0.2"}
    for name, value in settings.items():
        monkeypatch.setenv(f"SEMBLEND_{name}", value)
    monkeypatch.setenv("SEMBLEND_MAX_DONORS", "2")
    config = KvCacheConnectorConfig.ours()
    with LLM(
        model=tiny_qwen2_path,
        dtype="float32",
        device="cpu",
        kv_connector_config=config,
        kv_cache_config=KvCacheConfig(tokens_per_block=16, enable_block_reuse=True, max_tokens=4096),
    ) as llm:
        yield llm


def test_an_engines_donors_are_known_to_the_fleet(engine, nats_server, make_reader) -> None:
    reader = make_reader(nats_server.url)
    reader.ask()  # what the engine said before somebody listened
    documents = [text(seed, 300) for seed in range(3)]
    for document in documents:
        engine.generate(document, PREFILL)
        engine.settle()
    engine.generate(text(9, 40), PREFILL)  # the scheduler hears of the last save at its next call

    def shown(reader) -> list[list[bool]]:
        """Which of the documents each donor that is known holds."""
        held, shares = reader.directory.donors_of((4, 0)), {}
        for data in (decode(payload).data for payload in reader.payloads):
            if data.kind == "donor_registered" and data.donor_id in held:
                key = sketch_key(CacheNamespace.from_dict(data.namespace).key, None)
                sketch = Sketch.from_bytes(data.segments[0].provider_metadata)
                asked = [prompt_fingerprints(text(20, 60) + document, key) for document in documents]
                shares[data.donor_id] = [overlap(sketch, each) > 0.5 for each in asked]
        return sorted(shares.values())

    # Two donors are known before the last one is, too.
    assert reader.wait_for(lambda reader: shown(reader) == [[False, False, True], [False, True, False]])
    assert reader.wait_for(lambda reader: reader.directory.compared((4, 0)) > 0)
    assert not reader.directory.problems
