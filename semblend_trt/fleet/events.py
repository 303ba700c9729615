"""Donor events, schema version 1: read into structs that check untrusted messages, and written for one worker.

Messages are JSON, or MessagePack where the settings say so; the first byte tells them apart. Readers ignore unknown
fields and read a message of an unknown kind as `UnknownEvent`, so that fields and kinds can be added. docs/events.md
explains the events."""

from __future__ import annotations

import base64
import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec import Meta

from semblend_trt.config import EventFormat
from semblend_trt.errors import ReasonedError

if TYPE_CHECKING:
    import numpy.typing as npt

    from semblend_trt.namespace import CacheNamespace

SCHEMA_VERSION = 1
MAX_MESSAGE_BYTES, MAX_NAMESPACE_BYTES, MAX_METADATA_BYTES = 65536, 16384, 32768
MAX_EMBEDDING, MAX_EMBEDDING_TEXT = 4096, 32768
MAX_ID, MAX_SEGMENTS, MAX_BLOCKS, MAX_TOKENS = 256, 1024, 16384, 1 << 28
# Each byte as a padded number and a comma (JSON ignores blanks): one look-up is several times as fast as json.dumps.
_BYTES_IN_JSON = np.frombuffer(b"".join(b"%3d," % each for each in range(256)), dtype="<u4")

# MessagePack has no integer above 2**64 - 1.
Count = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": (1 << 64) - 1})]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
Blocks = Annotated[list[Count], Meta(max_length=MAX_BLOCKS)]


class EventError(ReasonedError, ValueError):
    """A message that is not an event of this schema; `reason` is the label in counters."""


@dataclass(frozen=True, slots=True)
class Emitter:
    """The source of one stream of events. `generation` is the same for the life of a process."""

    worker_id: int
    dp_rank: int
    generation: int


class Notice(NamedTuple):
    """One message ready to be sent."""

    kind: str
    event_id: int
    payload: bytes


class Metadata(bytes):
    """Bytes of a provider: binary in MessagePack, and in JSON a list of integers."""


# No part of a message holds a cycle, so that the garbage collector need not look at it.
class _Kind(msgspec.Struct, frozen=True, gc=False, tag_field="kind"):
    """A part of a message whose field `kind` says what it is."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class WorkerLocation(_Kind, frozen=True, gc=False, tag="worker"):
    """KV in the memory of one worker; `tier` is `device` or `host`."""

    tier: ShortText
    worker_id: Count
    dp_rank: Count = 0


class SharedLocation(_Kind, frozen=True, gc=False, tag="shared"):
    """KV in a store that several workers reach."""

    tier: ShortText
    backend: ShortText
    locator: Annotated[str, Meta(max_length=4096)] | Annotated[list[Count], Meta(max_length=4096)] = ""


Location: TypeAlias = WorkerLocation | SharedLocation


class Segment(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens [start, end) of the donor, described by values from which the tokens cannot be read.

    `digest`: see `token_digest`. `provider_metadata`: a sketch (sketch.py). `embedding`: base64 of little-endian
    float32, present only where the worker's settings ask for it."""

    segment_id: Count
    token_range: tuple[Tokens, Tokens]
    digest: Count
    block_hashes: Blocks | None = None
    provider_metadata: Metadata = msgspec.field(default_factory=Metadata)
    embedding: Annotated[str, Meta(max_length=MAX_EMBEDDING_TEXT, pattern=r"^[A-Za-z0-9+/]*={0,2}$")] | None = None


class ProviderGenerationReset(_Kind, frozen=True, gc=False, tag="provider_generation_reset"):
    """Forget all donors of this worker; a registration of each held donor follows."""

    generation: Count


class DonorRegistered(_Kind, frozen=True, gc=False, kw_only=True, tag="donor_registered"):
    """The worker holds a donor. An earlier registration of the same donor id is replaced."""

    donor_id: ShortText
    namespace: dict[str, Any]
    location: Location
    token_count: Tokens
    segments: Annotated[list[Segment], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    block_ids: Blocks = []
    provider_generation: Count


class DonorEvicted(_Kind, frozen=True, gc=False, omit_defaults=True, tag="donor_evicted"):
    """The worker no longer holds the donor, or only the named `segments` of it are gone."""

    donor_id: ShortText
    provider_generation: Count
    segments: Annotated[list[Count], Meta(max_length=MAX_SEGMENTS)] | None = None


class DonorsPurged(_Kind, frozen=True, gc=False, tag="donors_purged"):
    """All donors of a scope are gone: `all` donors of this emitter, those of a `worker`, or those at a `location`."""

    scope: dict[str, Any]
    provider_generation: Count


class DonorRelocated(_Kind, frozen=True, gc=False, tag="donor_relocated"):
    """The donor is held at another location."""

    donor_id: ShortText
    new_location: Location
    provider_generation: Count


class ProviderHeartbeat(_Kind, frozen=True, gc=False, tag="provider_heartbeat"):
    """The worker is alive, and sends the next heartbeat within `interval_seconds`.

    A reader that received all events knows `donor_count` donors; `state_digest` is the XOR of their
    `donor_digest`."""

    interval_seconds: Annotated[float, Meta(gt=0, le=86400)]
    donor_count: Count
    state_digest: Count
    provider_generation: Count


class _Message(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    schema_version: Annotated[int, Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    event_id: Count
    worker_id: Count
    dp_rank: Count = 0


Data: TypeAlias = (
    ProviderGenerationReset | DonorRegistered | DonorEvicted | DonorsPurged | DonorRelocated | ProviderHeartbeat
)
KIND_NAMES = tuple(str(each.__struct_config__.tag) for each in get_args(Data))


class SemanticKvEvent(_Message, frozen=True, gc=False, kw_only=True):
    """One message. `event_id` starts at 1 in each generation of (`worker_id`, `dp_rank`) and rises by one."""

    data: Data

    @property
    def generation(self) -> int:
        """Return the generation that the event names."""
        return self.data.generation if isinstance(self.data, ProviderGenerationReset) else self.data.provider_generation


class UnknownEvent(_Message, frozen=True, gc=False, kw_only=True):
    """A message of a kind that this version does not know. Readers count its id and do nothing else."""

    data: dict[str, Any]

    @property
    def generation(self) -> int | None:
        """Return the generation that the event names, or None."""
        value = self.data.get("provider_generation")
        return value if isinstance(value, int) else None


Event: TypeAlias = SemanticKvEvent | UnknownEvent


def decode(payload: bytes) -> Event:
    """Read one message. Raise EventError with the reasons oversize, malformed, version or invalid, nothing else."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise EventError("oversize", f"a message of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        if payload and payload[0] in b"{[ \t\r\n":
            # One decoder reads both forms, so that JSON's integers have the bounds of MessagePack's.
            payload = msgspec.msgpack.encode(msgspec.json.decode(payload))
        try:
            return _read(payload)
        except msgspec.ValidationError as error:
            return _read_unknown(msgspec.msgpack.decode(payload), str(error))
    except EventError:
        raise
    except OverflowError as error:  # a number of more than 64 bits
        raise EventError("invalid", str(error)) from None
    except Exception as error:  # parsers raise many types for bytes that are no message
        raise EventError("malformed", f"{type(error).__name__}: {str(error)[:200]}") from None


def _as_metadata(_: type, value: Any) -> Metadata:
    value = b"" if value is None else value
    is_list = isinstance(value, list) and all(type(each) is int and 0 <= each <= 255 for each in value)
    if not (is_list or isinstance(value, bytes)) or len(value) > MAX_METADATA_BYTES:
        raise ValueError(f"provider_metadata is a list of at most {MAX_METADATA_BYTES} bytes")
    return Metadata(value)


_read = msgspec.msgpack.Decoder(SemanticKvEvent, dec_hook=_as_metadata).decode


def _read_unknown(message: Any, fault: str) -> UnknownEvent:
    """Read a message of an unknown kind. Refuse all others by the reason for which they are no events."""
    if not isinstance(message, dict):
        raise EventError("malformed", f"a message is a map, not {type(message).__name__}")
    version = message.get("schema_version")
    if type(version) is int and version != SCHEMA_VERSION:
        raise EventError("version", f"schema version {version}; this reader knows {SCHEMA_VERSION}")
    data = message.get("data")
    kind = data.get("kind") if isinstance(data, dict) else None
    try:
        if isinstance(kind, str) and kind not in KIND_NAMES and len(kind) <= MAX_ID:
            return msgspec.convert(message, UnknownEvent)
    except msgspec.ValidationError as error:
        fault = str(error)
    raise EventError("invalid", fault[:400])


def donor_digest(donor_id: str, tier: str) -> int:
    """Return BLAKE2b, 8 bytes, of `donor_id`, a zero byte and `tier`, read as a little-endian number.
    The XOR over a worker's donors is the `state_digest` of its heartbeats."""
    text = f"{donor_id}\0{tier}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class EventWriter:
    """Writes one emitter's messages, numbered from 1."""

    def __init__(self, emitter: Emitter, form: EventFormat, *, embeddings: bool = False) -> None:
        self.emitter, self._last_id, self._embeddings = emitter, 0, embeddings
        self._place = {"worker_id": emitter.worker_id, "dp_rank": emitter.dp_rank}
        self._is_json = form is EventFormat.JSON
        self._encode = (msgspec.json.Encoder() if self._is_json else msgspec.msgpack.Encoder()).encode
        # Donors share namespaces.
        self._namespace = functools.lru_cache(maxsize=256)(self._encoded)

    def reset(self) -> Notice:
        return self._notice(ProviderGenerationReset(self.emitter.generation))

    def registered(
        self,
        donor_id: str,
        namespace: CacheNamespace,
        tier: str,
        tokens: int,
        digest: int,
        sketch: bytes,
        embedding: npt.NDArray[np.float32] | None = None,
    ) -> Notice:
        """Write donor_registered; `sketch` as `Sketch.to_bytes`, `embedding` float32 [dim].
        Raise EventError (oversize) for too large a namespace or embedding; no event id is used then."""
        metadata: Any = sketch
        if self._is_json:
            numbers = _BYTES_IN_JSON.take(np.frombuffer(sketch, dtype=np.uint8)).tobytes()
            metadata = msgspec.Raw(b"[" + numbers[:-1] + b"]")
        vector = None
        if self._embeddings and embedding is not None:
            if embedding.ndim != 1 or len(embedding) > MAX_EMBEDDING:
                shape = list(embedding.shape)
                raise EventError("oversize", f"an embedding of shape {shape}; at most [{MAX_EMBEDDING}] is sent")
            vector = base64.b64encode(embedding.astype("<f4").tobytes()).decode("ascii")
        data = DonorRegistered(
            donor_id=donor_id,
            namespace=self._namespace(namespace),
            location=WorkerLocation(tier, **self._place),
            token_count=tokens,
            segments=[Segment(0, (0, tokens), digest, [], metadata, vector)],
            provider_generation=self.emitter.generation,
        )
        return self._notice(data)

    def evicted(self, donor_id: str) -> Notice:
        return self._notice(DonorEvicted(donor_id, self.emitter.generation))

    def relocated(self, donor_id: str, tier: str) -> Notice:
        return self._notice(DonorRelocated(donor_id, WorkerLocation(tier, **self._place), self.emitter.generation))

    def purged(self) -> Notice:
        return self._notice(DonorsPurged({"kind": "all"}, self.emitter.generation))

    def heartbeat(self, interval_seconds: float, donor_count: int, digest: int) -> Notice:
        """Write provider_heartbeat; `digest` is the XOR of `donor_digest` over the announced donors."""
        return self._notice(ProviderHeartbeat(interval_seconds, donor_count, digest, self.emitter.generation))

    def _notice(self, data: Any) -> Notice:
        self._last_id += 1
        event = SemanticKvEvent(schema_version=SCHEMA_VERSION, event_id=self._last_id, **self._place, data=data)
        return Notice(data.kind, self._last_id, self._encode(event))

    def _encoded(self, namespace: CacheNamespace) -> Any:
        text = self._encode(namespace.to_dict())
        if len(text) > MAX_NAMESPACE_BYTES:
            raise EventError("oversize", f"a namespace of {len(text)} bytes; at most {MAX_NAMESPACE_BYTES} are sent")
        return msgspec.Raw(text)
