"""Tenants: the API key says who a caller is, and each tenant has a salt that separates its KV from the others'."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from semblend_trt.fleet.router.cold_runs import VERIFY_HEADER, asks_to_verify
from semblend_trt.fleet.router.serving import RequestRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from semblend_trt.fleet.router.config import RouterConfig

TENANT_HEADER, SESSION_HEADER = "X-Tenant-ID", "X-Session-ID"
MAX_SESSION = 256
# Seconds after which a tenant that has used its share may try again.
RETRY_SECONDS = 1
_PURPOSE = b"semblend-router:cache-salt:v1\0"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. `salt` is the tenant's cache salt; both are None without tenants. `verifies`: it asks
    for its answer to be compared with a cold run, and may."""

    tenant: str | None = None
    salt: str | None = field(default=None, repr=False)
    session: str | None = None
    verifies: bool = False


class Tenants:
    """The tenants of the configuration. Without keys there, all callers are served, without a tenant."""

    def __init__(self, config: RouterConfig, environment: Mapping[str, str]) -> None:
        """Raises ConfigurationError when a variable that the configuration names is not set."""
        self._secret = config.secret(environment)
        self._allowed: dict[str, tuple[str, ...]] = {}
        self._verifying: set[str] = set()
        for key in config.keys:
            digest = key.digest(environment)
            self._allowed[digest] = (*self._allowed.get(digest, ()), *key.tenants)
            if key.verify:
                self._verifying.add(digest)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """The caller, by Authorization, X-Tenant-ID, X-Session-ID and X-SemBlend-Verify.

        A request may name a tenant of its key, and must name one where the key has several.
        Raises RequestRefusedError: 401 unknown_key, 403 tenant_forbidden and verify_forbidden, 400 tenant_missing,
        bad_session and bad_verify.
        """
        session = headers.get(SESSION_HEADER)
        if session is not None and not (1 <= len(session) <= MAX_SESSION and session.isprintable()):
            message = f"{SESSION_HEADER} has 1 to {MAX_SESSION} printable characters"
            raise RequestRefusedError(400, "bad_session", message)
        digest, verifies = key_digest(headers), asks_to_verify(headers)
        named = headers.get(TENANT_HEADER)
        if not self._allowed:
            if named is not None:
                raise RequestRefusedError(
                    403, "tenant_forbidden", f"this router knows no tenants; leave {TENANT_HEADER} out"
                )
            if verifies:
                raise _may_not_verify()
            return Caller(session=session)
        allowed = self._allowed.get(digest)
        if allowed is None:
            raise unknown_key()
        if named is not None and named not in allowed:
            raise RequestRefusedError(403, "tenant_forbidden", f"this API key does not speak for that {TENANT_HEADER}")
        if named is None and len(set(allowed)) > 1:
            raise RequestRefusedError(
                400, "tenant_missing", f"this API key speaks for several tenants; name one in {TENANT_HEADER}"
            )
        if verifies and digest not in self._verifying:
            raise _may_not_verify()
        tenant = named or allowed[0]
        return Caller(tenant, self.salt_of(tenant), session, verifies)

    def salt_of(self, tenant: str) -> str:
        """The tenant's cache salt: HMAC-SHA256 under the router's secret, so that no client can compute it."""
        assert self._secret is not None  # the configuration has no keys without it
        return hmac.new(self._secret, _PURPOSE + tenant.encode(), hashlib.sha256).hexdigest()


class Shares:
    """Bounds the requests that each tenant has under way, by number and by bytes of their bodies."""

    def __init__(self, requests: int, size: int) -> None:
        self._most_requests, self._most_bytes = requests, size
        self._requests: Counter[str | None] = Counter()
        self._bytes: Counter[str | None] = Counter()

    @contextmanager
    def taking(self, tenant: str | None, size: int) -> Iterator[None]:
        """Counts a request with a body of `size` bytes for the tenant until the block ends.

        Raises RequestRefusedError, 429 tenant_busy, when that exceeds the tenant's share.
        """
        if self._requests[tenant] >= self._most_requests:
            raise _busy(f"{self._most_requests} requests")
        if self._bytes[tenant] + size > self._most_bytes:
            held = self._bytes[tenant]
            raise _busy(f"{held} bytes of requests, and with this one more than the {self._most_bytes} allowed,")
        self._requests[tenant] += 1
        self._bytes[tenant] += size
        try:
            yield
        finally:
            self._requests[tenant] -= 1
            self._bytes[tenant] -= size


def _busy(load: str) -> RequestRefusedError:
    message = f"{load} are under way for this caller; wait for some of them to end"
    return RequestRefusedError(429, "tenant_busy", message, RETRY_SECONDS)


def _may_not_verify() -> RequestRefusedError:
    message = f"{VERIFY_HEADER} costs a second run, and this caller may not use it; [[keys]] with verify = true may"
    return RequestRefusedError(403, "verify_forbidden", message)


def key_digest(headers: Mapping[str, str]) -> str:
    """SHA-256 of a request's API key, in hex; empty without a key. The key may be any bytes."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return ""
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()


def unknown_key() -> RequestRefusedError:
    """The refusal of a caller without a known key."""
    return RequestRefusedError(401, "unknown_key", "the API key is missing or unknown; send it as Bearer")
