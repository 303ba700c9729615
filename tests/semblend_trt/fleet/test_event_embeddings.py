"""A donor's embedding reaches readers of the events when, and only when, the worker was told to send it."""

from __future__ import annotations

import base64
from importlib.resources import files

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from semblend_trt.audit import AuditEvents
from semblend_trt.config import load_settings
from semblend_trt.fleet.announcer import announcer_for
from semblend_trt.fleet.wire import decode
from semblend_trt.metrics import metrics_for
from semblend_trt.semantic.embedder import embedder_for
from semblend_trt.semantic.neighbours import neighbourhood_for, text_decoder

MODEL = files("validation") / "assets" / "model"
STREAM = (5, 0)


@pytest.mark.parametrize("is_sent", [True, False])
@pytest.mark.parametrize("is_found_on_disk", [True, False])
def test_embeddings_reach_readers_only_when_they_are_to(
    nats_server, make_reader, namespace, tmp_path, is_sent, is_found_on_disk
) -> None:
    settings = load_settings(
        nats_url=nats_server.url, worker_id=5, event_embeddings=is_sent, heartbeat_seconds=0.1, embedder="static"
    )
    reader = make_reader(nats_server.url)
    neighbourhood = neighbourhood_for(
        settings,
        None,
        lambda: MODEL,
        AuditEvents(tmp_path / "audit"),
        metrics_for(True, CollectorRegistry()),
        announcer_for(settings),
    )
    tokens = np.random.default_rng(1).integers(300, 5000, 400, dtype=np.int32)
    if is_found_on_disk:
        neighbourhood.found("a", namespace.key, tokens, "disk")
        assert neighbourhood.neighbours.settle(60)
        neighbourhood.intended("b", namespace, None)
    else:
        neighbourhood.intended("a", namespace, None)
        neighbourhood.held("a", tokens, "host")
        assert neighbourhood.neighbours.settle(60)

    def sent() -> list[str | None]:
        events = [decode(payload).data for payload in reader.payloads]
        return [data.segments[0].embedding for data in events if data.kind == "donor_registered"]

    try:
        if is_sent:
            assert reader.wait_for(lambda _: any(sent()))
            vector = np.frombuffer(base64.b64decode(sent()[-1]), "<f4")
            (expected,) = embedder_for(settings.embedder).embed([text_decoder(MODEL)(tokens)])
            np.testing.assert_array_equal(vector, expected)
        else:
            assert reader.wait_for(lambda reader: reader.directory.compared(STREAM) > 2 and sent())
            assert not any(sent())
        assert not reader.directory.problems
    finally:
        neighbourhood.close()
