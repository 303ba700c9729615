"""RouterConfig: the router's TOML file, validated. Secrets are in environment variables that it names."""

from __future__ import annotations

import hashlib
import re
import sys
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

from semblend_trt.errors import ConfigurationError
from semblend_trt.files import open_input
from semblend_trt.fleet.router.serving import ServerBounds
from semblend_trt.fleet.routing_policy import POLICIES, SpanOverlap

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

    from semblend_trt.fleet.routing_policy import RoutingPolicy

MIN_SECRET_BYTES = 16
MAX_CONFIG_BYTES = 1 << 20
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


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


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

    sha256: Annotated[str, BeforeValidator(_lower), Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    env: VariableName | None = None

    def digest(self, environment: Mapping[str, str]) -> str:
        """SHA-256 of the key, in hex. Raises ConfigurationError when its variable is not set."""
        if self.sha256 is not None:
            return self.sha256
        return hashlib.sha256(_variable(environment, self.env or "").encode("utf-8", "surrogateescape")).hexdigest()


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
    `nats_subject` and `audit_sample` override the variables of these names. `load_weight` is for policy span_overlap.
    Prompts of more than `max_prompt_tokens` tokens are refused.
    """

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
        """The bounds of clients."""
        return ServerBounds(
            self.header_seconds,
            self.body_seconds,
            self.max_connections,
            self.max_peer_connections,
            self.max_body_bytes,
        )

    def routing_policy(self) -> RoutingPolicy:
        """A new policy as the file says."""
        return SpanOverlap(self.load_weight) if self.policy == "span_overlap" else POLICIES[self.policy]()

    def secret(self, environment: Mapping[str, str]) -> bytes | None:
        """The secret; None where no variable is named. Raises ConfigurationError when it is not set or too short."""
        if self.secret_env is None:
            return None
        secret = _variable(environment, self.secret_env).encode("utf-8", "surrogateescape")
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigurationError(
                f"the secret in {self.secret_env} has {len(secret)} bytes; give at least {MIN_SECRET_BYTES}"
            )
        return secret


def load_config(path: str | Path) -> RouterConfig:
    """Reads a file. Raises ConfigurationError with one sentence that names the file, the field and the mistake."""
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
        raise ConfigurationError(f"{path}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    first: Any = details[0]
    place = ".".join(str(part) for part in first["loc"])
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        problem = "there is no such field"
    elif first["type"] == "missing":
        problem = "this field is missing"
    # Only simple values are shown.
    elif not set(_MAY_BE_SECRET) & set(first["loc"]) and isinstance(first["input"], (str, int, float)):
        problem += f" (given: {first['input']!r:.80})"
    more = f" ({len(details) - 1} more fields are wrong)" if len(details) > 1 else ""
    return f"{place}: {problem}{more}" if place else f"{problem}{more}"


def _variable(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ConfigurationError(f"the configuration names the variable {name}, which is not set; set it")
    return value
