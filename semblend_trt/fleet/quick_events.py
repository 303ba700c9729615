"""The two events that come by the thousand, read from MessagePack in one step.

`wire.decode` says what an event is. What is read here it would read too, with the same values; all else is left to it.
So a field that is not written by `EventWriter`, or seldom, takes an event out of here, and refusals are its alone.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from semblend_trt.fleet.events import (
    MAX_BLOCKS,
    MAX_ID,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    MAX_SEGMENTS,
    MAX_TOKENS,
    SCHEMA_VERSION,
    SemanticKvEvent,
    tenant_key_of,
)
from semblend_trt.fleet.wire import decode

# MessagePack has no integer above 2**64 - 1.
_Count = Annotated[int, Meta(ge=0)]
_Counts = Annotated[list[_Count], Meta(max_length=MAX_BLOCKS)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]


class _Part(msgspec.Struct, gc=False, forbid_unknown_fields=True, tag_field="kind"):
    """An unknown field must be read to be refused, so it is not read here."""


class _Location(_Part, tag=False):
    kind: Literal["worker"]
    tier: _ShortText
    worker_id: _Count
    dp_rank: _Count = 0


class _Segment(_Part, tag=False):
    segment_id: _Count
    token_range: tuple[_Tokens, _Tokens]
    digest: _Count
    block_hashes: _Counts | None = None
    provider_metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)] = b""
    embedding: None = None


class QuickRegistered(_Part, tag="donor_registered"):
    """`events.DonorRegistered`, on a worker and without an embedding."""

    kind: ClassVar[str] = "donor_registered"
    donor_id: _ShortText
    namespace: dict[str, Any]
    location: _Location
    token_count: _Tokens
    segments: Annotated[list[_Segment], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    provider_generation: _Count
    block_ids: _Counts = []

    @property
    def tenant_key(self) -> str:
        """Tenant key v1 of the namespace."""
        return tenant_key_of(self.namespace)


class QuickEvicted(_Part, tag="donor_evicted"):
    """`events.DonorEvicted` of a whole donor."""

    kind: ClassVar[str] = "donor_evicted"
    donor_id: _ShortText
    provider_generation: _Count
    segments: None = None


class QuickEvent(_Part, tag=False, kw_only=True):
    """`events.SemanticKvEvent` with one of these."""

    schema_version: Annotated[int, Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    event_id: _Count
    worker_id: _Count
    dp_rank: _Count = 0
    data: QuickRegistered | QuickEvicted

    @property
    def generation(self) -> int:
        """The generation that the event names."""
        return self.data.provider_generation


Event: TypeAlias = SemanticKvEvent | QuickEvent

_decoder = msgspec.msgpack.Decoder(QuickEvent)


def read(payload: bytes) -> Event:
    """Reads one message. Raises EventError as `wire.decode` does."""
    if len(payload) > MAX_MESSAGE_BYTES:
        return decode(payload)
    try:
        return _decoder.decode(payload)
    except Exception:  # parsers raise many types
        return decode(payload)
