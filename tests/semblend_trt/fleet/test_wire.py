"""Events as they are written: as they were recorded once, read by the structs, and without tokens, salts or text."""

import base64
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.config import EventFormat
from semblend_trt.fleet.events import decode
from semblend_trt.fleet.sketch import MAX_ENTRIES, MAX_SKETCH_BYTES, sketch_key, sketch_of
from semblend_trt.fleet.wire import MAX_MESSAGE_BYTES, Emitter, EventError, EventWriter, token_digest
from semblend_trt.namespace import CacheNamespace
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE, text

EMITTER = Emitter(worker_id=(1 << 53) - 1, dp_rank=1, generation=1_700_000_000_000_001)
DONOR = {"donor_id": "d", "namespace": NAMESPACE, "tier": "device", "tokens": 3, "digest": 7, "sketch": b"\x01\xff"}
RECORDED = json.loads((Path(__file__).parent / "golden_messages.json").read_text(encoding="utf-8"))
SALTED = BASE_NAMESPACE.for_request("salt", "lora:1")
EMBEDDING = np.array([0.0, 1.0, -0.5, 3e38], dtype=np.float32)
# One message of each kind, in the order in which they were recorded.
WRITTEN = {
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


@pytest.fixture(params=EventFormat)
def writer(request):
    return EventWriter(EMITTER, request.param)


@given(
    st.text(min_size=1, max_size=256).filter(lambda text: text.isprintable()),
    st.integers(0, 1 << 28),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=MAX_SKETCH_BYTES),
    st.sampled_from(EventFormat),
)
def test_all_that_is_written_is_read(donor_id, tokens, digest, sketch, form):
    namespace = BASE_NAMESPACE.for_request("salt", "lora:1")
    payload = EventWriter(EMITTER, form).registered(donor_id, namespace, "host", tokens, digest, sketch)
    data = decode(payload).data
    assert (data.donor_id, data.token_count, data.segments[0].digest) == (donor_id, tokens, digest)
    assert data.segments[0].provider_metadata == sketch
    assert CacheNamespace.from_dict(data.namespace) == namespace


def test_the_largest_message_fits():
    namespace = dataclasses.replace(BASE_NAMESPACE, model="m" * 4000, tokenizer="t" * 4000).for_request("s" * 4096, "a")
    sketch = sketch_of(text(1, 100_000), bytes(16), MAX_ENTRIES).to_bytes()
    donor = {"donor_id": "d" * 256, "namespace": namespace, "sketch": sketch, "embedding": np.ones(4096, np.float32)}
    for form in EventFormat:
        payload = EventWriter(EMITTER, form, embeddings=True).registered(**DONOR | donor)
        assert len(payload) <= MAX_MESSAGE_BYTES
        assert decode(payload).data.donor_id == "d" * 256


def test_a_namespace_too_large_takes_no_id(writer):
    extra = {f"field-{number}": "x" * 4000 for number in range(5)}
    namespace = dataclasses.replace(BASE_NAMESPACE, extra=extra).for_request(None, None)
    with pytest.raises(EventError, match="namespace of"):
        writer.registered(**DONOR | {"namespace": namespace})
    assert decode(writer.reset()).event_id == 1


@pytest.mark.known_defect(32)
def test_embeddings_go_out_only_when_asked_for():
    embedding = np.arange(384, dtype=np.float32)
    donor = DONOR | {"embedding": embedding}
    silent = decode(EventWriter(EMITTER, EventFormat.JSON).registered(**donor))
    assert silent.data.segments[0].embedding is None
    payload = EventWriter(EMITTER, EventFormat.JSON, embeddings=True).registered(**donor)
    sent = decode(payload).data.segments[0].embedding
    assert np.array_equal(np.frombuffer(base64.b64decode(sent), "<f4"), embedding)
    assert len(payload) < 4000


def test_no_salt_and_no_tokens_are_written(writer):
    tokens = np.arange(70_001, 70_401, dtype=np.int32)
    namespace = BASE_NAMESPACE.for_request("tenant-acme", None)
    key = sketch_key(namespace.key, "tenant-acme")
    payload = writer.registered(
        "d", namespace, "device", len(tokens), token_digest(tokens, key), sketch_of(tokens, key).to_bytes()
    )
    assert b"tenant-acme" not in payload
    assert not [token for token in tokens.tolist() if str(token).encode() in payload]
    assert decode(payload).data.tenant_key == "semblend:tenant:v1:9332cc3fc0ec09d0f04fa8e1e08637b5"


def test_digest_of_unsalted_tokens_is_the_packed_one():
    assert token_digest(np.array([1, 2, 3], dtype=np.int32)) == 13041116711478803063
    assert token_digest(np.array([1, 2, 3], dtype=np.int32), bytes(16)) != 13041116711478803063
