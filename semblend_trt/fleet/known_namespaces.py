"""KnownNamespaces: the namespaces that donors were announced in, and which of them a request may meet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import NamespaceError
from semblend_trt.namespace import NO_SALT, SALT_PREFIX, TENANT_PREFIX, CacheNamespace, salt_digest, tenant_key

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAMESPACES = 16384
_MAX_SPELLINGS = 1024
# A request meets the namespaces of one tenant and model: more than one only where adapters or engines differ.
_MAX_MET = 8
# One model is one namespace in folders of any name.
_MAX_NAMES = 16


@dataclass(slots=True, eq=False)
class KnownNamespace:
    """A namespace's number, never given twice, its key, its salt's digest, the names that its model was announced with,
    and its donors' number."""

    number: int
    key: str
    salt: str
    models: set[str] = field(default_factory=set)
    donors: int = 0


class KnownNamespaces:
    """The namespaces of donors that are known. Not thread safe."""

    def __init__(self, max_namespaces: int = MAX_NAMESPACES) -> None:
        self._max_namespaces = max_namespaces
        self._next_number = 0
        self._by_key: dict[str, KnownNamespace] = {}
        self._by_salt: dict[str, dict[int, KnownNamespace]] = {}
        self._spellings: OrderedDict[str, CacheNamespace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def is_full(self) -> bool:
        return len(self._by_key) >= self._max_namespaces

    def enter(self, values: Mapping[str, Any]) -> KnownNamespace:
        """Counts one more donor in the namespace of these `values`.

        Raises NamespaceError for what is no namespace, one whose tenant key is not its salt's, and one too many.
        """
        namespace = self._read(values)
        known = self._by_key.get(namespace.key)
        if known is None:
            if self.is_full:
                raise NamespaceError(f"donors stand in more than {self._max_namespaces} namespaces; no more are kept")
            salt = str(namespace.extra.get("cache_salt", NO_SALT))
            known = KnownNamespace(self._next_number, namespace.key, salt)
            self._next_number += 1
            self._by_key[known.key] = known
            self._by_salt.setdefault(salt, {})[known.number] = known
        if len(known.models) < _MAX_NAMES:
            known.models.add(namespace.model)
        known.donors += 1
        return known

    def leave(self, known: KnownNamespace) -> None:
        """Takes back one `enter`; a namespace without donors is forgotten."""
        known.donors -= 1
        if not known.donors:
            del self._by_key[known.key]
            of_salt = self._by_salt[known.salt]
            del of_salt[known.number]
            if not of_salt:
                del self._by_salt[known.salt]

    def met_by(self, salt: str | None, model: str | None) -> list[KnownNamespace]:
        """The namespaces that a request with this raw salt may meet, those with the most donors first, a few at most.

        `model` None stands for all models. Raises NamespaceError for a salt that no request may have.
        """
        digest = NO_SALT if salt is None else salt_digest(salt)
        met = [each for each in self._by_salt.get(digest, {}).values() if model is None or model in each.models]
        return sorted(met, key=lambda each: -each.donors)[:_MAX_MET]

    def _read(self, values: Mapping[str, Any]) -> CacheNamespace:
        """The namespace, read once for all donors that spell it alike."""
        spelling = repr(values)
        namespace = self._spellings.get(spelling)
        if namespace is None:
            namespace = CacheNamespace.from_dict(values)
            _check_tenant(namespace)
            self._spellings[spelling] = namespace
            if len(self._spellings) > _MAX_SPELLINGS:
                self._spellings.popitem(last=False)
        return namespace


def _check_tenant(namespace: CacheNamespace) -> None:
    salt, unsalted = str(namespace.extra.get("cache_salt", NO_SALT)), tenant_key(None)
    expected = unsalted if salt in (NO_SALT, salt_digest("")) else TENANT_PREFIX + salt.removeprefix(SALT_PREFIX)
    if namespace.extra.get("tenant_key", expected) != expected:
        raise NamespaceError("the namespace's tenant key is not that of its salt; use CacheNamespace.for_request()")
