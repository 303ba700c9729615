"""What is read in one step is what the models read; what they refuse is refused in their words."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from semblend_trt.fleet.events import MAX_MESSAGE_BYTES, EventError, SemanticKvEvent
from semblend_trt.fleet.quick_events import QuickEvent, read
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter, decode
from tests.semblend_trt.samples import NAMESPACE

encode = msgspec.msgpack.encode


def written(form: EventFormat = EventFormat.MSGPACK) -> list[bytes]:
    writer = EventWriter(Emitter(3, 1, 99), form)
    donor = {"donor_id": "d\u00e9", "namespace": NAMESPACE, "tier": "device", "tokens": 3, "digest": 1 << 63}
    return [
        writer.registered(**donor, sketch=b"\x01\xff"),
        writer.evicted("d\u00e9"),
        writer.relocated("d\u00e9", "host"),
        writer.heartbeat(2.5, 1, 5),
        writer.reset(),
        writer.purged(),
    ]


REGISTERED, EVICTED, *OTHERS = written()


def is_same(found: Any, expected: Any) -> bool:
    """Whether all fields are equal, also those that are no numbers."""
    if isinstance(expected, BaseModel):
        return all(is_same(getattr(found, name), getattr(expected, name)) for name in type(expected).model_fields)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return repr(found) == repr(expected)


def is_judged_alike(payload: bytes) -> bool:
    try:
        expected = decode(payload)
    except EventError as error:
        with pytest.raises(EventError) as refused:
            read(payload)
        return (refused.value.reason, str(refused.value)) == (error.reason, str(error))
    return is_same(read(payload), expected)


def test_only_the_two_that_are_many_are_read_in_one_step() -> None:
    assert isinstance(read(REGISTERED), QuickEvent)
    assert isinstance(read(EVICTED), QuickEvent)
    for payload in [*OTHERS, *written(EventFormat.JSON)]:
        assert isinstance(read(payload), SemanticKvEvent)
    for payload in (REGISTERED, EVICTED, *OTHERS):
        assert is_judged_alike(payload)
        assert read(payload).generation == 99
    assert read(REGISTERED).data.tenant_key == NAMESPACE.extra["tenant_key"]


def test_what_is_too_long_or_too_deep_is_refused_as_before() -> None:
    deep = encode(msgspec.msgpack.decode(REGISTERED) | {"data": "deep"})
    for payload in (REGISTERED + bytes(MAX_MESSAGE_BYTES), deep.replace(encode("deep"), b"\x91" * 50_000 + b"\xc0")):
        assert is_judged_alike(payload)
        with pytest.raises(EventError, match=r"at most|recursion"):
            read(payload)


@pytest.mark.parametrize("kind", ["donor_evicted", "donor_registered", "donor_praised"])
def test_a_field_that_comes_twice_is_read_alike(kind) -> None:
    twice = b"\x84" + encode("kind") + encode(kind) + encode("kind")
    assert is_judged_alike(EVICTED.replace(b"\x83" + encode("kind"), twice))
    assert is_judged_alike(
        EVICTED.replace(b"\x83" + encode("kind"), b"\x84" + encode("donor_id") + encode(kind) + encode("kind"))
    )


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a message with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in [(value, key), *places(value[key])]]


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.sampled_from([0, 1, 1 << 28, (1 << 28) + 1, "", "worker", "donor_evicted", "\u00e9" * 256, "\u00e9" * 257])
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.datetimes(timezones=st.just(datetime.timezone.utc)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | st.integers(0, 9), inner),
    max_leaves=5,
)


@given(st.sampled_from([REGISTERED, EVICTED]), st.data())
@settings(max_examples=400)
def test_any_change_of_a_value_is_judged_alike(payload, draw) -> None:
    message = msgspec.msgpack.decode(payload)
    for _ in range(draw.draw(st.integers(1, 2))):
        holder, key = draw.draw(st.sampled_from(places(message)))
        deed = draw.draw(st.sampled_from(["replace", "leave out", "add"]))
        if deed == "replace" or isinstance(holder, list):
            holder[key] = draw.draw(junk)
        elif deed == "add":
            holder[draw.draw(st.sampled_from(["kind", "embedding", "segments", "dp_rank", "colour"]))] = draw.draw(junk)
        else:
            del holder[key]
        if not places(message):
            return
    assert is_judged_alike(encode(message))


@given(st.sampled_from([REGISTERED, EVICTED]), st.data())
@settings(max_examples=400)
def test_any_change_of_a_byte_is_judged_alike(payload, draw) -> None:
    at = draw.draw(st.integers(0, len(payload) - 1))
    changed = payload[:at] + draw.draw(st.binary(max_size=2)) + payload[at + draw.draw(st.integers(0, 2)) :]
    assert is_judged_alike(changed)
