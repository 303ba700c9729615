"""CacheNamespace: everything that has to be equal before one request's KV may replace another's.

`key` decides reuse. It covers every field except the ranks, the tenant key, and names whose revision is a digest of the
content. A donor has a part on each rank, so all ranks must derive the scheduler's key (rank 0)."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from semblend_trt.errors import NamespaceError

SALT_PREFIX = "semblend:ns:salt:"
NO_SALT = "semblend:ns:no-cache-salt"
TENANT_PREFIX = "semblend:tenant:v1:"
UNKNOWN_PREFIX = "semblend:unknown:"
CONTENT_PREFIX = "semblend:content:"
MAX_TEXT = 4096
MAX_DEPTH = 8
# Adapters whose unsalted namespace is kept: to bind it again takes longer than the lookup of a short prompt.
MAX_REMEMBERED = 64
# A name counts unless its revision is a digest of the content.
REVISION_OF = {"model": "model_revision", "tokenizer": "tokenizer_revision"}
_HOW_UNKNOWN = "where it cannot be determined use unknown_value()"
PARALLEL_SIZES = ("tp_size", "pp_size", "cp_size")
PARALLEL_RANKS = ("tp_rank", "pp_rank", "cp_rank")


def unknown_value() -> str:
    """Return a value for a field that cannot be determined. It equals no other value, not even an unknown one."""
    return UNKNOWN_PREFIX + uuid.uuid4().hex


def is_unknown(value: object) -> bool:
    """Return True for what `unknown_value` returns."""
    return isinstance(value, str) and value.startswith(UNKNOWN_PREFIX)


def content_value(digest: str) -> str:
    """Return a revision that is a digest of all its bytes; such content is the same under every name."""
    return CONTENT_PREFIX + digest


def is_content(value: object) -> bool:
    """Return True for what `content_value` returns."""
    return isinstance(value, str) and value.startswith(CONTENT_PREFIX)


def salt_digest(salt: str) -> str:
    """Return the irreversible form in which a cache salt is kept; every character counts.
    An empty salt is a salt: it never meets requests without one. Raises NamespaceError."""
    return SALT_PREFIX + _digest(_checked_salt(salt))


def tenant_key(salt: str | None) -> str:
    """Return tenant key v1 for the wire (SemBlend 0.3.25): the untrimmed salt's digest, `none` without a salt.
    Never part of `CacheNamespace.key`. Raises NamespaceError."""
    return TENANT_PREFIX + (_digest(salt) if salt is not None and _checked_salt(salt) else "none")


@dataclass(frozen=True, slots=True, eq=False)
class CacheNamespace:
    """Every field that makes KV interchangeable. None in `quantization` and `adapter` means not in use.

    A field that cannot be determined is `unknown_value()`; there is no wildcard. `rope_config` and `extra` hold JSON
    values, `tensor_parallel` the sizes, and a 0 for each rank, as the wire has it: it is of all ranks.
    `extra["cache_salt"]` is a digest, absent for requests without a salt. Raises NamespaceError."""

    model: str
    model_revision: str
    tokenizer: str
    tokenizer_revision: str
    kv_layout: str
    block_size: int | str
    kv_dtype: str
    cache_dtype: str
    quantization: str | None
    adapter: str | None
    rope_config: Mapping[str, Any]
    tensor_parallel: Mapping[str, int | str]
    backend_cache_layout: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in _TEXT_FIELDS:
            _check_text(name, getattr(self, name))
        for name in ("quantization", "adapter"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        _check_count("block_size", self.block_size)
        object.__setattr__(self, "tensor_parallel", _frozen("tensor_parallel", _checked_parallel(self.tensor_parallel)))
        for name in ("rope_config", "extra"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise NamespaceError(f"namespace field {name} is {type(value).__name__}, not a mapping")
            object.__setattr__(self, name, _frozen(name, value))
        salt = self.extra.get("cache_salt", NO_SALT)
        if salt != NO_SALT and not (isinstance(salt, str) and salt.startswith(SALT_PREFIX)):
            raise NamespaceError("namespace field extra.cache_salt is not a digest; pass salts to for_request()")
        tenant = self.extra.get("tenant_key", TENANT_PREFIX)
        if not (isinstance(tenant, str) and tenant.startswith(TENANT_PREFIX)):
            message = f"namespace field extra.tenant_key does not start with {TENANT_PREFIX}; use tenant_key()"
            raise NamespaceError(message)
        values = {name: getattr(self, name) for name in _FIELDS}
        values["tensor_parallel"] = {size: self.tensor_parallel[size] for size in PARALLEL_SIZES}
        for name, revision in REVISION_OF.items():
            if is_content(values[revision]):
                del values[name]
        values["extra"] = {"cache_salt": NO_SALT, **self.extra}
        values["extra"].pop("tenant_key", None)
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
        object.__setattr__(self, "key", hashlib.sha256(canonical.encode("ascii")).hexdigest())

    def for_request(self, cache_salt: str | None, adapter: str | None) -> CacheNamespace:
        """Return this engine's namespace bound to one request's salt and LoRA adapter; it keeps digests of the salt
        only.

        A request's adapter adds to one that the engine always applies. Raises NamespaceError."""
        if "tenant_key" in self.extra:
            raise NamespaceError("the namespace is bound to a request already; bind the engine's own namespace instead")
        extra = {**self.extra, "tenant_key": tenant_key(cache_salt)}
        if cache_salt is not None:
            extra["cache_salt"] = salt_digest(cache_salt)
        applied = self.adapter if adapter is None else adapter
        if adapter is not None and self.adapter is not None:
            applied = json.dumps([self.adapter, adapter])
        return replace(self, extra=extra, adapter=applied)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form, read back by `from_dict`; it holds no raw salt."""
        values: dict[str, Any] = json.loads(json.dumps({name: getattr(self, name) for name in _FIELDS}, default=dict))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheNamespace:
        """Read `to_dict`'s form. A missing or unexpected field is a NamespaceError: it might matter."""
        if not isinstance(values, Mapping):
            raise NamespaceError(f"a namespace is a mapping of {len(_FIELDS)} fields, not {type(values).__name__}")
        missing = [name for name in _FIELDS if name not in values]
        unexpected = [str(name)[:64] for name in values if name not in _FIELDS]
        if missing or unexpected:
            raise NamespaceError(f"namespace fields {missing} are missing and {unexpected} are not known")
        return cls(**values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CacheNamespace):
            return NotImplemented
        return self.key == other.key and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only mappings can be neither pickled nor copied.
        return CacheNamespace.from_dict, (self.to_dict(),)


_FIELDS = tuple(item.name for item in fields(CacheNamespace) if item.init)
_TEXT_FIELDS = tuple(item.name for item in fields(CacheNamespace) if item.init and item.type == "str")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def _checked_salt(salt: str) -> str:
    # The messages never repeat the salt: it may be a secret.
    if not isinstance(salt, str):
        raise NamespaceError(f"a cache salt is a string, not {type(salt).__name__}; decline the request")
    if len(salt) > MAX_TEXT:
        raise NamespaceError(f"the cache salt has {len(salt)} characters, more than {MAX_TEXT}; use a shorter one")
    try:
        salt.encode("utf-8")
    except UnicodeEncodeError:
        raise NamespaceError("the cache salt holds a lone surrogate and has no UTF-8 form; use valid text") from None
    return salt


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise NamespaceError(f"namespace field {name} is {value!r:.80}, not a text; {_HOW_UNKNOWN}")
    if len(value) > MAX_TEXT:
        raise NamespaceError(f"namespace field {name} has {len(value)} characters, more than {MAX_TEXT}")


def _check_count(name: str, value: object) -> None:
    if is_unknown(value):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NamespaceError(f"namespace field {name} is {value!r:.80}, not an integer >= 1; {_HOW_UNKNOWN}")


def _checked_parallel(parallel: Mapping[str, int | str]) -> dict[str, int | str]:
    names = PARALLEL_SIZES + PARALLEL_RANKS
    if not isinstance(parallel, Mapping) or not set(PARALLEL_SIZES) <= set(parallel) <= set(names):
        raise NamespaceError(
            f"namespace field tensor_parallel is {parallel!r:.200}; it needs {', '.join(PARALLEL_SIZES)} "
            f"and may hold {', '.join(PARALLEL_RANKS)}"
        )
    checked: dict[str, int | str] = {}
    for size, rank in zip(PARALLEL_SIZES, PARALLEL_RANKS, strict=True):
        _check_count(f"tensor_parallel.{size}", parallel[size])
        checked |= {size: parallel[size], rank: 0}
    return checked


def _frozen(name: str, value: Any, depth: int = 0) -> Any:
    """Copy a JSON value as read-only. A whole float becomes an integer, so that 1e6 and 1000000 are one theta."""
    if depth > MAX_DEPTH:
        raise NamespaceError(f"namespace field {name} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            _check_text(f"{name} (name)", key)
        return MappingProxyType({key: _frozen(name, item, depth + 1) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(name, item, depth + 1) for item in value)
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value.is_integer() else float(value)
    if value is None or isinstance(value, int) or (isinstance(value, str) and len(value) <= MAX_TEXT):
        return value
    raise NamespaceError(
        f"namespace field {name} holds {value!r:.80}, which is not a finite JSON value of at most {MAX_TEXT} characters"
    )
