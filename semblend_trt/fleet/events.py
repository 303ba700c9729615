"""Schema version 1 of donor events, as pydantic models that check what comes from outside.

Readers ignore unknown fields and read an event of an unknown kind as `UnknownEvent`, so that fields and kinds can be
added. `wire.py` reads and writes whole messages; docs/events.md explains the events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    WithJsonSchema,
)

from semblend_trt.errors import SemBlendError
from semblend_trt.namespace import TENANT_PREFIX

if TYPE_CHECKING:
    from pydantic import JsonValue

SCHEMA_VERSION = 1
MAX_MESSAGE_BYTES = 65536
MAX_METADATA_BYTES = 32768
MAX_EMBEDDING_TEXT = 32768
MAX_ID = 256
MAX_SEGMENTS = 1024
MAX_BLOCKS = 16384
MAX_TOKENS = 1 << 28
U64 = (1 << 64) - 1

Count = Annotated[int, Field(strict=True, ge=0, le=U64)]
Tokens = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)]
DonorId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class EventError(SemBlendError, ValueError):
    """A message that is not an event of this schema; `reason` is the label in counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def tenant_key_of(namespace: dict[str, Any]) -> str:
    """Tenant key v1 of an announced namespace; where it states none, that of requests without a salt."""
    extra = namespace.get("extra")
    key = extra.get("tenant_key") if isinstance(extra, dict) else None
    return key if isinstance(key, str) else TENANT_PREFIX + "none"


def _as_bytes(value: object) -> object:
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_METADATA_BYTES or not all(type(each) is int and 0 <= each <= 255 for each in value):
            raise ValueError(f"provider_metadata is a list of at most {MAX_METADATA_BYTES} bytes")
        return bytes(value)
    return b"" if value is None else value


Metadata = Annotated[
    bytes,
    Field(strict=True, max_length=MAX_METADATA_BYTES),
    BeforeValidator(_as_bytes),
    PlainSerializer(list, return_type=list[int], when_used="json"),
    WithJsonSchema(
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "maxItems": MAX_METADATA_BYTES}
    ),
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class WorkerLocation(_Part):
    """KV in the memory of one worker; `tier` is `device` or `host`."""

    kind: Literal["worker"] = "worker"
    tier: ShortText
    worker_id: Count
    dp_rank: Count = 0


class SharedLocation(_Part):
    """KV in a store that several workers reach."""

    kind: Literal["shared"] = "shared"
    tier: ShortText
    backend: ShortText
    locator: Annotated[str, Field(max_length=4096)] | Annotated[list[Count], Field(max_length=4096)] = ""


Location = Annotated[WorkerLocation | SharedLocation, Field(discriminator="kind")]


class Segment(_Part):
    """Tokens [start, end) of the donor, described by values from which the tokens cannot be read.

    `digest`: see `wire.token_digest`. `provider_metadata`: a sketch (sketch.py). `embedding`: base64 of little-endian
    float32, present only where the worker's settings ask for it.
    """

    segment_id: Count
    token_range: tuple[Tokens, Tokens]
    digest: Count
    block_hashes: Annotated[list[Count], Field(max_length=MAX_BLOCKS)] | None = None
    provider_metadata: Metadata = b""
    embedding: Annotated[str, Field(max_length=MAX_EMBEDDING_TEXT, pattern=r"^[A-Za-z0-9+/]*={0,2}$")] | None = None


class ProviderGenerationReset(_Part):
    """Forget all donors of this worker; a registration of each held donor follows."""

    kind: Literal["provider_generation_reset"] = "provider_generation_reset"
    generation: Count


class DonorRegistered(_Part):
    """The worker holds a donor. An earlier registration of the same donor id is replaced."""

    kind: Literal["donor_registered"] = "donor_registered"
    donor_id: DonorId
    namespace: dict[str, Any]
    location: Location
    token_count: Tokens
    segments: Annotated[list[Segment], Field(min_length=1, max_length=MAX_SEGMENTS)]
    provider_generation: Count
    block_ids: Annotated[list[Count], Field(max_length=MAX_BLOCKS)] = Field(default_factory=list)

    @property
    def tenant_key(self) -> str:
        """Tenant key v1 of the namespace."""
        return tenant_key_of(self.namespace)


class DonorEvicted(_Part):
    """The worker no longer holds the donor, or only the named `segments` of it are gone."""

    kind: Literal["donor_evicted"] = "donor_evicted"
    donor_id: DonorId
    provider_generation: Count
    segments: Annotated[list[Count], Field(max_length=MAX_SEGMENTS)] | None = None


class DonorsPurged(_Part):
    """All donors of a scope are gone: `all` donors of this emitter, those of a `worker`, or those at a `location`."""

    kind: Literal["donors_purged"] = "donors_purged"
    scope: dict[str, Any]
    provider_generation: Count


class DonorRelocated(_Part):
    """The donor is held at another location."""

    kind: Literal["donor_relocated"] = "donor_relocated"
    donor_id: DonorId
    new_location: Location
    provider_generation: Count


class ProviderHeartbeat(_Part):
    """The worker is alive, and sends the next heartbeat within `interval_seconds`.

    A reader that received all events knows `donor_count` donors; `state_digest` is the XOR of their
    `wire.donor_digest`.
    """

    kind: Literal["provider_heartbeat"] = "provider_heartbeat"
    provider_generation: Count
    interval_seconds: Annotated[float, Field(gt=0, le=86400)]
    donor_count: Count
    state_digest: Count


KINDS: tuple[type[_Part], ...] = (
    ProviderGenerationReset,
    DonorRegistered,
    DonorEvicted,
    DonorsPurged,
    DonorRelocated,
    ProviderHeartbeat,
)
KIND_NAMES: tuple[str, ...] = tuple(model.model_fields["kind"].default for model in KINDS)


class UnknownEvent(BaseModel):
    """An event of a kind that this version does not know. Readers count its id and do nothing else."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: Annotated[
        str,
        Field(max_length=MAX_ID),
        WithJsonSchema({"type": "string", "maxLength": MAX_ID, "not": {"enum": list(KIND_NAMES)}}),
    ]


def _kind_of(data: object) -> str:
    kind = data.get("kind") if isinstance(data, dict) else getattr(data, "kind", None)
    return kind if isinstance(kind, str) and kind in KIND_NAMES else "unknown"


EventData = Annotated[
    Annotated[ProviderGenerationReset, Tag("provider_generation_reset")]
    | Annotated[DonorRegistered, Tag("donor_registered")]
    | Annotated[DonorEvicted, Tag("donor_evicted")]
    | Annotated[DonorsPurged, Tag("donors_purged")]
    | Annotated[DonorRelocated, Tag("donor_relocated")]
    | Annotated[ProviderHeartbeat, Tag("provider_heartbeat")]
    | Annotated[UnknownEvent, Tag("unknown")],
    Discriminator(_kind_of),
]


class SemanticKvEvent(_Part):
    """One message. `event_id` starts at 1 in each generation of (`worker_id`, `dp_rank`) and rises by one."""

    schema_version: Annotated[int, Field(strict=True, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    event_id: Count
    worker_id: Count
    dp_rank: Count = 0
    data: EventData

    @property
    def generation(self) -> int | None:
        """The generation that the event names; None for an unknown kind without one."""
        name = "generation" if isinstance(self.data, ProviderGenerationReset) else "provider_generation"
        value: JsonValue = getattr(self.data, name, None)
        return value if isinstance(value, int) else None
