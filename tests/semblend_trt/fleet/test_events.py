"""Events: published shapes are read, all else is refused by a reason, and a worker's are written as recorded."""

import base64
import dataclasses
import json
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.config import EventFormat
from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.events import (
    KIND_NAMES,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    Emitter,
    EventError,
    EventWriter,
    SemanticKvEvent,
    UnknownEvent,
    decode,
)
from semblend_trt.fleet.sketch import MAX_ENTRIES, sketch_key, sketch_of, token_digest
from semblend_trt.namespace import CacheNamespace
from tests.pages import ROOT
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE, text

SCHEMA, ASYNCAPI = (
    json.loads((ROOT / "docs" / name).read_text(encoding="utf-8"))
    for name in ("events.schema.json", "events.asyncapi.json")
)
RECORDED = json.loads((Path(__file__).parent / "golden_messages.json").read_text(encoding="utf-8"))
EMITTER = Emitter(worker_id=(1 << 53) - 1, dp_rank=1, generation=1_700_000_000_000_001)
DONOR = {"donor_id": "d", "namespace": NAMESPACE, "tier": "device", "tokens": 3, "digest": 7, "sketch": b"\x01\xff"}
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
LOCATION = {"kind": "worker", "tier": "device", "worker_id": 0, "dp_rank": 0}
SHARED = {"kind": "shared", "tier": "host", "backend": "nixl", "locator": "..."}
SEGMENT = {"segment_id": 0, "token_range": [0, 3], "digest": 7, "block_hashes": [11], "provider_metadata": [0, 0]}
REGISTERED = {"kind": "donor_registered", "donor_id": "r1", "location": LOCATION, "token_count": 3}
REGISTERED |= {"namespace": {"model": "m", "extra": {"tenant_key": "semblend:tenant:v1:none"}}}
REGISTERED |= {"segments": [SEGMENT], "provider_generation": 1, "block_ids": [5]}
HEARTBEAT = {"interval_seconds": 10, "donor_count": 3, "state_digest": 2**64 - 1}
HEARTBEAT |= {"kind": "provider_heartbeat", "provider_generation": 1}
PUBLISHED = [
    {"kind": "provider_generation_reset", "generation": 1},
    REGISTERED,
    {"kind": "donor_evicted", "donor_id": "r1", "provider_generation": 1, "segments": [0]},
    {"kind": "donor_evicted", "donor_id": "r1", "provider_generation": 1},
    {"kind": "donors_purged", "scope": {"kind": "worker", "worker_id": 0}, "provider_generation": 1},
    {"kind": "donor_relocated", "donor_id": "r1", "new_location": SHARED, "provider_generation": 1},
    HEARTBEAT,
]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=10,
)


def envelope(data, **changes):
    return {"schema_version": 1, "event_id": 1, "worker_id": 0, "dp_rank": 0, "data": data} | changes


def read(data, **changes):
    return decode(json.dumps(envelope(data, **changes)).encode())


def reason_of(payload):
    with pytest.raises(EventError) as refused:
        decode(payload)
    return refused.value.reason


@pytest.mark.parametrize("data", PUBLISHED, ids=lambda data: data["kind"])
@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
def test_published_shapes_are_read(data, encode):
    event = decode(encode(envelope(data)))
    assert event.data.kind == data["kind"]
    assert event.generation == 1
    assert json.loads(msgspec.json.encode(event, enc_hook=list)) == json.loads(json.dumps(envelope(data)))
    assert {each["kind"] for each in PUBLISHED} == set(KIND_NAMES)


def test_the_shape_of_dynamo_is_read():
    namespace = {"model": "m", "tokenizer": "t", "kv_layout": "l", "block_size": 16}
    segment = {"segment_id": 0, "token_range": [0, 3], "digest": 7}
    data = {key: value for key, value in REGISTERED.items() if key != "block_ids"}
    event = read(data | {"namespace": namespace, "segments": [segment]}, event_id=0)
    assert event.data.segments[0].block_hashes is None
    assert event.data.segments[0].provider_metadata == b""
    with pytest.raises(NamespaceError):
        CacheNamespace.from_dict(event.data.namespace)


@pytest.mark.promise("fleet", "Readers ignore unknown fields and kinds, and refuse other versions")
def test_unknown_kinds_and_fields_are_tolerated():
    event = read({"kind": "donor_praised", "praise": 5, "provider_generation": 4}, colour="blue")
    assert isinstance(event, UnknownEvent)
    assert event.generation == 4
    assert msgspec.to_builtins(event)["data"] == {"kind": "donor_praised", "praise": 5, "provider_generation": 4}
    assert read({"kind": "donor_praised"}).generation is None
    assert read(REGISTERED | {"mood": {"deep": [1]}}).data.donor_id == "r1"


@pytest.mark.parametrize(
    "changes",
    [
        *({"event_id": value} for value in (-1, "1", True)),
        *({"worker_id": value} for value in (2**64, None)),
        {"schema_version": "1"},
        *({"data": value} for value in ([], {}, {"kind": 5}, {"kind": "x" * 1000})),
        *({"data": {"kind": "donor_praised"}} | each for each in ({"event_id": -1}, {"worker_id": 2**64})),
        *({"data": REGISTERED | {"donor_id": value}} for value in ("", "x" * 257)),
        {"data": REGISTERED | {"token_count": 2**40}},
        {"data": REGISTERED | {"segments": []}},
        {"data": REGISTERED | {"location": {"kind": "moon"}}},
        *({"data": REGISTERED | {"segments": [SEGMENT | {"provider_metadata": v}]}} for v in ([256], [True], "AAAA")),
        {"data": REGISTERED | {"segments": [SEGMENT | {"embedding": "not base64!"}]}},
        *({"data": HEARTBEAT | {"interval_seconds": value}} for value in (0, "NaN")),
    ],
    ids=str,
)
def test_wrong_fields_are_refused(changes):
    message = envelope(PUBLISHED[0]) | changes
    assert reason_of(json.dumps(message).encode()) == "invalid"
    with suppress(OverflowError):  # a number that MessagePack has not
        assert reason_of(msgspec.msgpack.encode(message)) == "invalid"


@pytest.mark.promise("fleet", "Readers ignore unknown fields and kinds,...")
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        *((each, "malformed") for each in (b"", b"\xff\xfe", b"{", b"[]", b"[" * 20_000)),
        (b'{"schema_version": 1, "event_id": ' + b"9" * 5000 + b"}", "malformed"),
        *((each, "malformed") for each in (b"\x93\x01\x02\x03", b"\x81\xa4data" + b"\x91" * 50_000 + b"\xc0")),
        (b"{}", "invalid"),
        (b" " * (MAX_MESSAGE_BYTES + 1), "oversize"),
        *((json.dumps(envelope(PUBLISHED[0], schema_version=each)).encode(), "version") for each in (0, 2, 999)),
    ],
)
def test_garbage_is_refused_by_a_reason(payload, reason):
    assert reason_of(payload) == reason


@given(st.sampled_from(PUBLISHED), st.data())
def test_no_field_value_raises_anything_else(data, draw):
    name = draw.draw(st.sampled_from([key for key in data if key != "kind"]))
    message = envelope(data | {name: draw.draw(JSON_VALUES)})
    with suppress(EventError):
        assert decode(json.dumps(message).encode()).data.kind == data["kind"]


@given(st.sampled_from(PUBLISHED), st.data())
def test_no_changed_byte_raises_anything_else(data, draw):
    payload = msgspec.msgpack.encode(envelope(data))
    at = draw.draw(st.integers(0, len(payload) - 1))
    with suppress(EventError):
        decode(payload[:at] + draw.draw(st.binary(max_size=2)) + payload[at + draw.draw(st.integers(0, 2)) :])


def made(place):
    """The structs' schemas, by name; `place` is where a reference looks for them."""
    byte = {"type": "integer", "minimum": 0, "maximum": 255}
    _, schemas = msgspec.json.schema_components(
        [SemanticKvEvent],
        schema_hook=lambda _: {"type": "array", "items": byte, "maxItems": MAX_METADATA_BYTES},
        ref_template=place + "/{name}",
    )
    data = schemas["SemanticKvEvent"]["properties"]["data"]
    del data["discriminator"]  # which an unknown kind is not under
    data["anyOf"].append({"$ref": place + "/UnknownEvent"})
    return json.loads(json.dumps(schemas))


@pytest.mark.promise(
    "fleet", "`docs/events.schema.json` and the AsyncAPI document hold the schemas by which messages are read"
)
@pytest.mark.parametrize(
    ("schemas", "place"),
    [(SCHEMA["$defs"], "#/$defs"), (ASYNCAPI["components"]["schemas"], "#/components/schemas")],
    ids=["schema", "asyncapi"],
)
def test_documents_hold_the_schemas_of_the_structs(schemas, place):
    known = {name: schema for name, schema in schemas.items() if name not in ("UnknownEvent", "ResyncRequest")}
    assert known == made(place)
    assert schemas["UnknownEvent"]["properties"]["kind"]["not"] == {"enum": list(KIND_NAMES)}


def recorded(form):
    as_bytes = str.encode if form is EventFormat.JSON else base64.b64decode
    return {name: as_bytes(text) for name, text in RECORDED[form.value].items()}


@pytest.mark.parametrize("form", EventFormat)
def test_messages_are_written_as_recorded_and_read(form):
    writer = EventWriter(EMITTER, form, embeddings=True)
    assert {name: write(writer).payload for name, write in WRITTEN.items()} == recorded(form)
    for number, (name, payload) in enumerate(recorded(form).items(), 1):
        event = decode(payload)
        assert (event.event_id, event.worker_id, event.dp_rank) == (number, EMITTER.worker_id, EMITTER.dp_rank)
        assert (event.generation, event.data.kind) == (EMITTER.generation, name.split()[0])


@pytest.fixture(params=EventFormat)
def writer(request):
    return EventWriter(EMITTER, request.param)


def test_the_largest_message_fits():
    namespace = dataclasses.replace(BASE_NAMESPACE, model="m" * 4000, tokenizer="t" * 4000).for_request("s" * 4096, "a")
    sketch = sketch_of(text(1, 100_000), bytes(16), MAX_ENTRIES).to_bytes()
    donor = {"donor_id": "d" * 256, "namespace": namespace, "sketch": sketch, "embedding": np.ones(4096, np.float32)}
    for form in EventFormat:
        payload = EventWriter(EMITTER, form, embeddings=True).registered(**DONOR | donor).payload
        assert len(payload) <= MAX_MESSAGE_BYTES
        assert decode(payload).data.donor_id == "d" * 256


def test_a_namespace_too_large_takes_no_id(writer):
    extra = {f"field-{number}": "x" * 4000 for number in range(5)}
    namespace = dataclasses.replace(BASE_NAMESPACE, extra=extra).for_request(None, None)
    with pytest.raises(EventError, match="namespace of"):
        writer.registered(**DONOR | {"namespace": namespace})
    assert decode(writer.reset().payload).event_id == 1


@pytest.mark.known_defect(32)
def test_embeddings_go_out_only_when_asked_for():
    embedding = np.arange(384, dtype=np.float32)
    donor = DONOR | {"embedding": embedding}
    silent = decode(EventWriter(EMITTER, EventFormat.JSON).registered(**donor).payload)
    assert silent.data.segments[0].embedding is None
    payload = EventWriter(EMITTER, EventFormat.JSON, embeddings=True).registered(**donor).payload
    sent = decode(payload).data.segments[0].embedding
    assert np.array_equal(np.frombuffer(base64.b64decode(sent), "<f4"), embedding)
    assert len(payload) < 4000


@pytest.mark.promise("fleet", "Token ids and text never leave the process")
def test_no_salt_and_no_tokens_are_written(writer):
    tokens = np.arange(70_001, 70_401, dtype=np.int32)
    namespace = BASE_NAMESPACE.for_request("tenant-acme", None)
    key = sketch_key(namespace.key, "tenant-acme")
    donor = "d", namespace, "device", len(tokens), token_digest(tokens, key), sketch_of(tokens, key).to_bytes()
    payload = writer.registered(*donor).payload
    assert b"tenant-acme" not in payload
    assert not [token for token in tokens.tolist() if str(token).encode() in payload]
    assert decode(payload).data.namespace["extra"]["tenant_key"] == (
        "semblend:tenant:v1:9332cc3fc0ec09d0f04fa8e1e08637b5"
    )


def test_digest_of_unsalted_tokens_is_the_packed_one():
    assert token_digest(np.array([1, 2, 3], dtype=np.int32)) == 13041116711478803063
    assert token_digest(np.array([1, 2, 3], dtype=np.int32), bytes(16)) != 13041116711478803063
