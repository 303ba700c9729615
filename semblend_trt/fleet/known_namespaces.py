"""The namespaces of the known donors, each with an index of its donors' sketches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.sketch_index import SketchIndex
from semblend_trt.namespace import NO_SALT, SALT_PREFIX, TENANT_PREFIX, CacheNamespace, salt_digest, tenant_key

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAMESPACES = 16384
# Namespaces searched for a request. One tenant and model has several only where adapters or engines differ.
_MAX_MET = 8


@dataclass(slots=True, eq=False)
class KnownNamespace:
    """A namespace: its key, its salt's digest, the number and sketches of its donors."""

    key: str
    salt: str
    donors: int = 0
    index: SketchIndex = field(default_factory=SketchIndex)


class KnownNamespaces:
    """The namespaces of the known donors. Not thread safe."""

    def __init__(self, max_namespaces: int = MAX_NAMESPACES) -> None:
        self._max_namespaces = max_namespaces
        self._by_key: dict[str, KnownNamespace] = {}
        self._by_salt: dict[str, dict[str, KnownNamespace]] = {}

    @property
    def is_full(self) -> bool:
        return len(self._by_key) >= self._max_namespaces

    def enter(self, values: Mapping[str, Any]) -> KnownNamespace:
        """Adds a donor to the namespace with these `values`.

        Raises NamespaceError for bad values, for a tenant key that does not match the salt, and for too many
        namespaces.
        """
        namespace = _read(msgspec.msgpack.encode(values))
        known = self._by_key.get(namespace.key)
        if known is None:
            if self.is_full:
                raise NamespaceError(f"donors are in more than {self._max_namespaces} namespaces; no more are kept")
            salt = str(namespace.extra.get("cache_salt", NO_SALT))
            known = KnownNamespace(namespace.key, salt)
            self._by_key[known.key] = known
            self._by_salt.setdefault(salt, {})[known.key] = known
        known.donors += 1
        return known

    def leave(self, known: KnownNamespace) -> None:
        """Removes a donor; a namespace without donors is forgotten."""
        known.donors -= 1
        if not known.donors:
            del self._by_key[known.key]
            of_salt = self._by_salt[known.salt]
            del of_salt[known.key]
            if not of_salt:
                del self._by_salt[known.salt]

    def met_by(self, salt: str | None) -> list[KnownNamespace]:
        """The namespaces that a request with this raw salt may reuse from, at most _MAX_MET, most donors first.

        Raises NamespaceError for a salt that no request may have.
        """
        met = self._by_salt.get(NO_SALT if salt is None else salt_digest(salt), {}).values()
        return sorted(met, key=lambda each: -each.donors)[:_MAX_MET]


@functools.lru_cache(maxsize=1024)
def _read(spelling: bytes) -> CacheNamespace:
    """The namespace in MessagePack. Donors that state it in the same words and order share one."""
    namespace = CacheNamespace.from_dict(msgspec.msgpack.decode(spelling))
    salt, unsalted = str(namespace.extra.get("cache_salt", NO_SALT)), tenant_key(None)
    expected = unsalted if salt in (NO_SALT, salt_digest("")) else TENANT_PREFIX + salt.removeprefix(SALT_PREFIX)
    if namespace.extra.get("tenant_key", expected) != expected:
        raise NamespaceError("the namespace's tenant key is not that of its salt; use CacheNamespace.for_request()")
    return namespace
