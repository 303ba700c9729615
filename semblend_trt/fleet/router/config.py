"""RouterConfig: the router's TOML file, validated, and the callers that it knows.

Secrets are in environment variables that the file names. The API key says who a caller is. Each tenant has a salt that
separates its KV from the others'."""

from __future__ import annotations

import hashlib
import hmac
import re
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from semblend_trt.cold_runs import VERIFY_HEADER
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import open_input
from semblend_trt.fleet.router.serving import RequestRefusedError, ServerBounds
from semblend_trt.fleet.routing_policy import POLICIES, SpanOverlap

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from semblend_trt.fleet.routing_policy import RoutingPolicy

MIN_SECRET_BYTES = 16
MAX_CONFIG_BYTES = 1 << 20
TENANT_HEADER, SESSION_HEADER = "X-Tenant-ID", "X-Session-ID"
MAX_SESSION = 256
# Seconds after which a tenant that has used its share may try again.
RETRY_SECONDS = 1
BOUNDS = ServerBounds()
# Fields whose wrong value may be a secret: a password in an address, or a key in place of its digest or variable.
_MAY_BE_SECRET = ("url", "nats_url", "sha256", "env", "secret_env")


def _checked_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise ValueError("give an address that begins with http:// or https://, without a query")
    return url.rstrip("/")


def _checked_policy(policy: str) -> str:
    if policy not in POLICIES:
        raise ValueError(f"use one of {', '.join(POLICIES)}")
    return policy


TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
Seconds = Annotated[float, Field(ge=0.01, le=86400)]
Host = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=0, le=65535)]
Bytes = Annotated[int, Field(ge=1024, le=1 << 30)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class ReplicaConfig(_Table):
    """A replica's address, and the worker id and rank of its donor events."""

    url: Annotated[str, Field(max_length=2048), AfterValidator(_checked_url)]
    worker_id: Annotated[int, Field(ge=0, le=(1 << 53) - 1)]
    dp_rank: Annotated[int, Field(ge=0, le=(1 << 31) - 1)] = 0


class _Key(_Table):
    """A key, by its SHA-256 or by the variable that holds it."""

    sha256: (
        Annotated[
            str,
            BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
            Field(pattern=r"^[0-9a-f]{64}$"),
        ]
        | None
    ) = None
    env: VariableName | None = None

    def digest(self, environment: Mapping[str, str]) -> str:
        """Return SHA-256 of the key, in hex. Raise ConfigurationError when its variable is not set."""
        return self.sha256 or hashlib.sha256(_variable(environment, self.env or "")).hexdigest()


class KeyConfig(_Key):
    """An API key and its tenants; with `verify` it may ask for answers to be compared with cold runs."""

    tenants: Annotated[list[TenantName], Field(min_length=1, max_length=1024)]
    verify: bool = False

    @model_validator(mode="after")
    def _names_one_key(self) -> KeyConfig:
        if (self.sha256 is None) == (self.env is None):
            raise ValueError("give either sha256 or env")
        return self


class StatusConfig(_Key):
    """An address of their own for /health and /metrics, and the key that they need; either may be left out."""

    host: Host | None = None
    port: Port | None = None

    @model_validator(mode="after")
    def _guards(self) -> StatusConfig:
        if (self.host is None) != (self.port is None):
            raise ValueError("give host and port, or neither of them")
        if self.sha256 is not None and self.env is not None:
            raise ValueError("give either sha256 or env")
        if self.host is None and self.sha256 is None and self.env is None:
            raise ValueError("give host and port, or a key, or leave the table out")
        return self


class TelemetryConfig(_Table):
    """The file with a line for each request. It is rotated at `max_bytes`, and `files` old ones are kept."""

    path: Path
    text: Literal["dropped", "kept"] = "dropped"
    block_tokens: Annotated[int, Field(ge=1, le=65536)] = 64
    max_bytes: Annotated[int, Field(ge=4096, le=1 << 40)] = 64 << 20
    files: Annotated[int, Field(ge=1, le=1000)] = 4


class RouterConfig(_Table):
    """The whole file.

    `model` is the folder or hub id of the replicas' tokenizer, `name` the model's name in requests. `nats_url`,
    `nats_subject` and `audit_sample` override the variables of these names. `load_weight` is span_overlap's."""

    host: Host = "127.0.0.1"
    port: Port = 8080
    model: Annotated[str, Field(min_length=1, max_length=4096)]
    name: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    policy: Annotated[str, AfterValidator(_checked_policy)] = "span_overlap"
    load_weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    nats_url: Annotated[SecretStr, Field(min_length=1, max_length=4096)] | None = None
    nats_subject: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    audit_sample: Annotated[float, Field(ge=0, le=1)] | None = None
    secret_env: VariableName | None = None
    health_seconds: Seconds = 5.0
    connect_seconds: Seconds = 5.0
    first_byte_seconds: Seconds = 120.0
    silence_seconds: Seconds = 60.0
    read_seconds: Seconds = 1.0
    attempts: Annotated[int, Field(ge=1, le=100)] = 3
    show_worker: bool = False
    header_seconds: Seconds = BOUNDS.header_seconds
    body_seconds: Seconds = BOUNDS.body_seconds
    max_connections: Count = BOUNDS.max_connections
    max_peer_connections: Count = BOUNDS.max_peer_connections
    max_body_bytes: Bytes = BOUNDS.max_body_bytes
    max_answer_bytes: Bytes = 64 << 20
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    tenant_requests: Count = 256
    tenant_bytes: Bytes = 32 << 20
    replicas: Annotated[list[ReplicaConfig], Field(min_length=1, max_length=1024)]
    keys: Annotated[list[KeyConfig], Field(max_length=65536)] = Field(default_factory=list)
    status: StatusConfig | None = None
    telemetry: TelemetryConfig | None = None

    @model_validator(mode="after")
    def _agrees(self) -> RouterConfig:
        workers = [(each.worker_id, each.dp_rank) for each in self.replicas]
        if twice := next((worker for worker in workers if workers.count(worker) > 1), None):
            raise ValueError(f"two replicas have worker_id {twice[0]} and dp_rank {twice[1]}; give each its own")
        if self.secret_env is None and (self.keys or self.telemetry):
            raise ValueError("keys and telemetry need secret_env, the variable with the secret that salts and hashes")
        if self.tenant_bytes < self.max_body_bytes:
            raise ValueError(
                f"tenant_bytes is {self.tenant_bytes}, and one body may have {self.max_body_bytes} bytes; give as many"
            )
        return self

    def bounds(self) -> ServerBounds:
        """Return the bounds of clients."""
        return ServerBounds(**self.model_dump(include=set(ServerBounds.__slots__)))

    def routing_policy(self) -> RoutingPolicy:
        """Make the policy that the file names."""
        return SpanOverlap(self.load_weight) if self.policy == "span_overlap" else POLICIES[self.policy]()

    def secret(self, environment: Mapping[str, str]) -> bytes | None:
        """Return the secret; None without a variable. Raise ConfigurationError when it is not set or too short."""
        if self.secret_env is None:
            return None
        secret = _variable(environment, self.secret_env)
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigurationError(
                f"the secret in {self.secret_env} has {len(secret)} bytes; give at least {MIN_SECRET_BYTES}"
            )
        return secret


def load_config(path: str | Path) -> RouterConfig:
    """Read a file. Raise ConfigurationError with one sentence that names the file, the field and the mistake."""
    try:
        with open_input(path) as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigurationError(f"{path} has more than {MAX_CONFIG_BYTES} bytes; it is not a router's configuration")
    try:
        values = tomllib.loads(text.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None
    try:
        return RouterConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    first: Any = details[0]
    place = ".".join(map(str, first["loc"]))
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        problem = "there is no such field"
    elif first["type"] == "missing":
        problem = "this field is missing"
    # Only simple values are shown.
    elif not set(_MAY_BE_SECRET) & set(first["loc"]) and isinstance(first["input"], (str, int, float)):
        problem += f" (given: {first['input']!r:.80})"
    more = f" ({len(details) - 1} more fields are wrong)" if len(details) > 1 else ""
    raise ConfigurationError(": ".join(filter(None, (str(path), place, problem))) + more)


def _variable(environment: Mapping[str, str], name: str) -> bytes:
    if not environment.get(name):
        raise ConfigurationError(f"the configuration names the variable {name}, which is not set; set it")
    return environment[name].encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. `salt` is the tenant's cache salt; both are None without tenants. `verifies`: the caller
    asks for a comparison with a cold run, and may."""

    tenant: str | None = None
    salt: str | None = field(default=None, repr=False)
    session: str | None = None
    verifies: bool = False


class Tenants:
    """The tenants of the configuration. Without keys there, all callers are served, without a tenant. Raises
    ConfigurationError when a variable that the configuration names is not set."""

    def __init__(self, config: RouterConfig, environment: Mapping[str, str]) -> None:
        self._secret = config.secret(environment)
        self._allowed: dict[str, tuple[str, ...]] = {}
        self._verifying: set[str] = set()
        for key in config.keys:
            digest = key.digest(environment)
            self._allowed[digest] = (*self._allowed.get(digest, ()), *key.tenants)
            if key.verify:
                self._verifying.add(digest)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller, by Authorization, X-Tenant-ID, X-Session-ID and X-SemBlend-Verify.

        A request may name a tenant of its key, and must where the key has several. Raise RequestRefusedError: 401
        unknown_key, 403 tenant_forbidden and verify_forbidden, 400 tenant_missing, bad_session and bad_verify."""
        session, named, asked = map(headers.get, (SESSION_HEADER, TENANT_HEADER, VERIFY_HEADER))
        if session is not None and not (1 <= len(session) <= MAX_SESSION and session.isprintable()):
            message = f"{SESSION_HEADER} has 1 to {MAX_SESSION} printable characters"
            raise RequestRefusedError(400, "bad_session", message)
        if asked is not None and asked.strip().lower() != "cold":
            message = f"{VERIFY_HEADER} has one value, cold; send that or leave it out"
            raise RequestRefusedError(400, "bad_verify", message)
        digest, tenant, salt = key_digest(headers), None, None
        if self._allowed:
            tenant = self._tenant(digest, named)
            assert self._secret is not None  # the configuration has no keys without it
            # Under the router's secret, so that no client can compute it.
            purpose = b"semblend-router:cache-salt:v1\0" + tenant.encode()
            salt = hmac.new(self._secret, purpose, hashlib.sha256).hexdigest()
        elif named is not None:
            message = f"this router knows no tenants; leave {TENANT_HEADER} out"
            raise RequestRefusedError(403, "tenant_forbidden", message)
        if asked is not None and digest not in self._verifying:
            message = f"{VERIFY_HEADER} costs a second run, and this caller may not use it; "
            message += "[[keys]] with verify = true may"
            raise RequestRefusedError(403, "verify_forbidden", message)
        return Caller(tenant, salt, session, asked is not None)

    def _tenant(self, digest: str, named: str | None) -> str:
        allowed = self._allowed.get(digest)
        if allowed is None:
            raise unknown_key()
        if named is None and len(set(allowed)) > 1:
            message = f"this API key speaks for several tenants; name one in {TENANT_HEADER}"
            raise RequestRefusedError(400, "tenant_missing", message)
        if named not in (None, *allowed):
            raise RequestRefusedError(403, "tenant_forbidden", f"this API key does not speak for that {TENANT_HEADER}")
        return named or allowed[0]


class Shares:
    """Bounds the number of requests that each tenant has under way, and the bytes of their bodies."""

    def __init__(self, requests: int, size: int) -> None:
        self._most_requests, self._most_bytes = requests, size
        self._requests: Counter[str | None] = Counter()
        self._bytes: Counter[str | None] = Counter()

    @contextmanager
    def taking(self, tenant: str | None, size: int) -> Iterator[None]:
        """Count a request with a body of `size` bytes for the tenant until the block ends.
        Raise RequestRefusedError, 429 tenant_busy, when that exceeds the tenant's share."""
        load, held = "", self._bytes[tenant]
        if self._requests[tenant] >= self._most_requests:
            load = f"{self._most_requests} requests"
        elif held + size > self._most_bytes:
            load = f"{held} bytes of requests, and with this one more than the {self._most_bytes} allowed,"
        if load:
            message = f"{load} are under way for this caller; wait for some of them to end"
            raise RequestRefusedError(429, "tenant_busy", message, RETRY_SECONDS)
        self._requests[tenant] += 1
        self._bytes[tenant] += size
        try:
            yield
        finally:
            self._requests[tenant] -= 1
            self._bytes[tenant] -= size


def key_digest(headers: Mapping[str, str]) -> str:
    """Return SHA-256 of a request's API key, in hex; empty without a key. The key may be any bytes."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return ""
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()


def unknown_key() -> RequestRefusedError:
    """Return the refusal of a caller without a known key."""
    return RequestRefusedError(401, "unknown_key", "the API key is missing or unknown; send it as Bearer")
