"""Writes this worker's own events, in schema version 1.

Messages are JSON, or MessagePack where the settings say so; a reader (events.py) tells them apart by the first byte.
The bytes of `provider_metadata` are binary in MessagePack, and in JSON a list of integers."""

from __future__ import annotations

import base64
import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from semblend_trt.config import EventFormat
from semblend_trt.errors import ConfigurationError, ReasonedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from semblend_trt.namespace import CacheNamespace

SCHEMA_VERSION = 1
KIND_NAMES = (
    "provider_generation_reset",
    "donor_registered",
    "donor_evicted",
    "donors_purged",
    "donor_relocated",
    "provider_heartbeat",
)
MAX_MESSAGE_BYTES = 65536
MAX_NAMESPACE_BYTES = 16384
MAX_EMBEDDING = 4096
# Each byte as a padded number and a comma (JSON ignores blanks): one look-up is several times as fast as json.dumps.
_BYTES_IN_JSON = np.frombuffer(b"".join(b"%3d," % each for each in range(256)), dtype="<u4")


class EventError(ReasonedError, ValueError):
    """A message that is not an event of this schema; `reason` is the label in counters."""


class Notice(NamedTuple):
    """One message ready to be sent."""

    kind: str
    event_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Emitter:
    """The source of one stream of events. `generation` is the same for the life of a process."""

    worker_id: int
    dp_rank: int
    generation: int


def token_digest(tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64], key: bytes = b"") -> int:
    """Return BLAKE2b, 8 bytes, of the ids as little-endian int64, read as a little-endian number.
    `key` is the sketch key of requests with a salt, so that no other tenant can test a guess; else empty."""
    wide = tokens.astype("<i8", copy=False)
    return int.from_bytes(hashlib.blake2b(wide.data, digest_size=8, key=key).digest(), "little")


def donor_digest(donor_id: str, tier: str) -> int:
    """Return BLAKE2b, 8 bytes, of `donor_id`, a zero byte and `tier`, read as a little-endian number.
    The XOR over a worker's donors is the `state_digest` of its heartbeats."""
    text = f"{donor_id}\0{tier}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class EventWriter:
    """Writes one emitter's messages and numbers them from 1. Raises ConfigurationError without msgspec (extra nats)."""

    def __init__(self, emitter: Emitter, form: EventFormat, *, embeddings: bool = False) -> None:
        try:
            import msgspec
        except ImportError as error:
            raise ConfigurationError("events need msgspec; install semblend-trt[nats]") from error
        self.emitter = emitter
        self.last_id = 0
        self._embeddings = embeddings
        self._raw: Any = msgspec.Raw
        self._is_json = form is EventFormat.JSON
        self._encode: Callable[[Any], bytes] = (msgspec.json if self._is_json else msgspec.msgpack).Encoder().encode
        # Donors share namespaces.
        self._namespace = functools.lru_cache(maxsize=256)(self._encoded)

    def reset(self) -> bytes:
        """Write provider_generation_reset."""
        return self._message({"kind": "provider_generation_reset", "generation": self.emitter.generation})

    def registered(
        self,
        donor_id: str,
        namespace: CacheNamespace,
        tier: str,
        tokens: int,
        digest: int,
        sketch: bytes,
        embedding: npt.NDArray[np.float32] | None = None,
    ) -> bytes:
        """Write donor_registered; `sketch` as `Sketch.to_bytes`, `embedding` float32 [dim].
        Raise EventError (oversize) for too large a namespace or embedding; no event id is used then."""
        metadata = sketch
        if self._is_json:
            numbers = _BYTES_IN_JSON.take(np.frombuffer(sketch, dtype=np.uint8)).tobytes()
            metadata = self._raw(b"[" + numbers[:-1] + b"]")
        segment = {
            "segment_id": 0,
            "token_range": (0, tokens),
            "digest": digest,
            "block_hashes": (),
            "provider_metadata": metadata,
        }
        if self._embeddings and embedding is not None:
            if embedding.ndim != 1 or len(embedding) > MAX_EMBEDDING:
                raise EventError(
                    "oversize", f"an embedding of shape {list(embedding.shape)}; at most [{MAX_EMBEDDING}] is sent"
                )
            segment["embedding"] = base64.b64encode(embedding.astype("<f4").tobytes()).decode("ascii")
        return self._of_donor(
            "donor_registered",
            donor_id=donor_id,
            namespace=self._namespace(namespace),
            location=self._location(tier),
            token_count=tokens,
            segments=(segment,),
            block_ids=(),
        )

    def evicted(self, donor_id: str) -> bytes:
        """Write donor_evicted for a whole donor."""
        return self._of_donor("donor_evicted", donor_id=donor_id)

    def relocated(self, donor_id: str, tier: str) -> bytes:
        """Write donor_relocated."""
        return self._of_donor("donor_relocated", donor_id=donor_id, new_location=self._location(tier))

    def purged(self) -> bytes:
        """Write donors_purged for all donors of this emitter."""
        return self._of_donor("donors_purged", scope={"kind": "all"})

    def heartbeat(self, interval_seconds: float, donor_count: int, digest: int) -> bytes:
        """Write provider_heartbeat; `digest` is the XOR of `donor_digest` over the announced donors."""
        fields = {"interval_seconds": interval_seconds, "donor_count": donor_count, "state_digest": digest}
        return self._of_donor("provider_heartbeat", **fields)

    def _of_donor(self, kind: str, **fields: Any) -> bytes:
        return self._message({"kind": kind, **fields, "provider_generation": self.emitter.generation})

    def _message(self, data: dict[str, Any]) -> bytes:
        self.last_id += 1
        envelope = {"schema_version": SCHEMA_VERSION, "event_id": self.last_id, "worker_id": self.emitter.worker_id}
        return self._encode({**envelope, "dp_rank": self.emitter.dp_rank, "data": data})

    def _location(self, tier: str) -> dict[str, Any]:
        emitter = self.emitter
        return {"kind": "worker", "tier": tier, "worker_id": emitter.worker_id, "dp_rank": emitter.dp_rank}

    def _encoded(self, namespace: CacheNamespace) -> Any:
        text = self._encode(namespace.to_dict())
        if len(text) > MAX_NAMESPACE_BYTES:
            raise EventError("oversize", f"a namespace of {len(text)} bytes; at most {MAX_NAMESPACE_BYTES} are sent")
        return self._raw(text)
