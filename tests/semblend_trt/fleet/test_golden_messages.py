"""The bytes of every message, as they were recorded once: a reader of another version must go on reading them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from semblend_trt.config import EventFormat
from semblend_trt.fleet.events import decode
from semblend_trt.fleet.wire import Emitter, EventWriter
from semblend_trt.namespace import CacheNamespace
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE

RECORDED: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "golden_messages.json").read_text(encoding="utf-8")
)
EMITTER = Emitter(worker_id=(1 << 53) - 1, dp_rank=1, generation=1_700_000_000_000_001)
SALTED = BASE_NAMESPACE.for_request("salt", "lora:1")
EMBEDDING = np.array([0.0, 1.0, -0.5, 3e38], dtype=np.float32)
# One message of each kind, in the order in which they were recorded.
WRITTEN: dict[str, Callable[[EventWriter], bytes]] = {
    "provider_generation_reset": EventWriter.reset,
    "donor_registered": lambda writer: writer.registered("d-1", NAMESPACE, "device", 3, (1 << 64) - 1, b"\x00\x07\xff"),
    "donor_registered with a salt and an embedding": lambda writer: writer.registered(
        'd\u00e9"\n', SALTED, "host", 1 << 28, 0, bytes(range(256)), EMBEDDING
    ),
    "donor_registered without a sketch": lambda writer: writer.registered("d-3", NAMESPACE, "disk", 0, 1, b""),
    "donor_relocated": lambda writer: writer.relocated("d-1", "host"),
    "provider_heartbeat": lambda writer: writer.heartbeat(2.5, 3, 1 << 63),
    "donor_evicted": lambda writer: writer.evicted("d-1"),
    "donors_purged": EventWriter.purged,
}


def recorded(form):
    if form is EventFormat.JSON:
        return {name: text.encode() for name, text in RECORDED[form.value].items()}
    return {name: base64.b64decode(text) for name, text in RECORDED[form.value].items()}


def written_again(writer, data):
    """The message that a writer makes of what a reader read."""
    if data.kind == "donor_registered":
        (segment,) = data.segments
        vector = segment.embedding and np.frombuffer(base64.b64decode(segment.embedding), "<f4")
        assert segment.token_range == (0, data.token_count)
        namespace = CacheNamespace.from_dict(data.namespace)
        donor = (data.donor_id, namespace, data.location.tier, data.token_count)
        return writer.registered(*donor, segment.digest, bytes(segment.provider_metadata), vector)
    if data.kind == "provider_heartbeat":
        return writer.heartbeat(data.interval_seconds, data.donor_count, data.state_digest)
    if data.kind == "donor_relocated":
        return writer.relocated(data.donor_id, data.new_location.tier)
    if data.kind == "donor_evicted":
        return writer.evicted(data.donor_id)
    return writer.reset() if data.kind == "provider_generation_reset" else writer.purged()


@pytest.mark.parametrize("form", EventFormat)
def test_messages_are_written_as_recorded(form):
    writer = EventWriter(EMITTER, form, embeddings=True)
    assert {name: write(writer) for name, write in WRITTEN.items()} == recorded(form)


@pytest.mark.parametrize("form", EventFormat)
def test_recorded_messages_are_read_and_written_to_the_same_bytes(form):
    writer = EventWriter(EMITTER, form, embeddings=True)
    for number, (name, payload) in enumerate(recorded(form).items(), 1):
        event = decode(payload)
        assert (event.event_id, event.worker_id, event.dp_rank) == (number, EMITTER.worker_id, EMITTER.dp_rank)
        assert event.generation == EMITTER.generation
        assert event.data.kind == name.split()[0]
        assert written_again(writer, event.data) == payload
