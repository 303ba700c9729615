"""Settings: one object, read from the environment; every variable has a name, a description and bounds.

A setting is read as TRTLLM_SEMBLEND_X, then as SEMBLEND_X, then under the name that the SemBlend package gave it.
TensorRT-LLM hands only TRTLLM* variables on to its workers. An empty variable counts as unset."""

from __future__ import annotations

import difflib
import logging
import os
import re
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SecretStr, ValidationError, model_validator

from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import ReuseTerms, SpanCheck
from semblend_trt.policy import CACHEBLEND_LAYER, MaxKl, ReusePolicy, parse_max_kl, parse_policy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)

# Addresses as nats-py reads them; the user and the password may be any text.
_SERVER = re.compile(
    r"(?:(?:nats|tls|ws|wss)://)?(?:(?!\w+://)\S+@)?(?:[\w.\-]+|\[[\da-fA-F:]+\])(?::(\d{1,5}))?(?:/[^\s@]*)?"
)

PREFIXES = ("TRTLLM_SEMBLEND_", "SEMBLEND_")

# Names of variables after their prefixes, where they are not those of the settings in upper case.
_NAMES = {"profile_path": "PROFILE", "min_span_tokens": "MIN_SPAN", "digest_cache_path": "DIGEST_CACHE"}
# Whole names that the SemBlend package gave.
_OLD_NAMES = {
    "recompute_boundary_layer": "SEMBLEND_TRTLLM_RECOMPUTE_BOUNDARY_LAYER",
    "min_span_tokens": "SEMBLEND_TRTLLM_MIN_MATCH_LENGTH",
    "audit_path": "SEMBLEND_TRTLLM_AUDIT_PATH",
}
# Settings that are accepted and ignored, each with the reason.
_EXACT_RUNS = "exact runs at any position are found without it; SEMBLEND_MIN_SPAN sets the shortest"
_RETIRED = {
    "AUDIT_SAMPLE": "spot checks are a command, semblend-trt spot-check; unset it",
    "DONOR_DTYPE": "donors are kept in the dtype of the cache",
    "FUZZY_CHUNKS": _EXACT_RUNS,
    "FUZZY_MARGIN": _EXACT_RUNS,
    "FUZZY_MARGIN_TOKENS": _EXACT_RUNS,
}


class Eviction(str, Enum):
    LRU = "lru"
    LFU = "lfu"
    SIZE_AWARE = "size_aware"


class EmbedderKind(str, Enum):
    OFF = "off"
    STATIC = "static"
    JACCARD = "jaccard"
    MINILM = "minilm"
    ONNX = "onnx"
    ONNX_GPU = "onnx_gpu"


class EventFormat(str, Enum):
    JSON = "json"
    MSGPACK = "msgpack"


def _parse_eviction(value: object) -> object:
    if value in ("fifo", "static_semantic", "adaptive_semantic"):
        names = ", ".join(each.value for each in Eviction)
        raise ConfigurationError(
            f"policy {value!r} evicts no donors; use one of {names}; `python -m validation replay` plays the others"
        )
    return value


def _checked_servers(url: SecretStr | None) -> SecretStr | None:
    if url is not None:
        found = [_SERVER.fullmatch(each.strip()) for each in url.get_secret_value().split(",") if each.strip()]
        if not found or not all(each is not None and 0 < int(each[1] or 1) < 1 << 16 for each in found):
            raise ConfigurationError(
                "this is no address such as nats://localhost:4222 (with nats, tls, ws or wss), nor several with commas "
                "between them"
            )
    return url


def _matching(pattern: str, message: str) -> AfterValidator:
    def check(text: str | None) -> str | None:
        if text is not None and not re.fullmatch(pattern, text):
            raise ConfigurationError(f"{text[:80]!r} {message}")
        return text

    return AfterValidator(check)


_SUBJECT = _matching(
    r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", "is no subject of letters, digits, _ and -, with dots in between"
)
_STREAM = _matching(r"[A-Za-z0-9_-]+", "is no stream of letters, digits, _ and - alone")
_NAME = Field(min_length=1, max_length=256)
_Name = Annotated[str | None, _NAME]


class SettingsGroup(BaseModel):
    """Settings of one theme. Arguments win over the environment, where an empty variable counts as unset."""

    # A wrong value may be a secret, and an error's text is in every traceback.
    model_config = {
        "extra": "forbid",
        "frozen": True,
        "protected_namespaces": (),
        "allow_inf_nan": False,
        "hide_input_in_errors": True,
        "use_attribute_docstrings": True,
    }

    @model_validator(mode="before")
    @classmethod
    def _with_environment(cls, given: dict[str, Any]) -> dict[str, Any]:
        found = {name: variable for name in cls.model_fields if (variable := variable_in_use(name)) is not None}
        return {name: os.environ[variable].strip() for name, variable in found.items()} | given


class ReuseSettings(SettingsGroup):
    """Settings of what may be reused."""

    enabled: bool = True
    """Master switch; without it every request is served cold and nothing is kept."""
    policy: Annotated[ReusePolicy, BeforeValidator(parse_policy)] = ReusePolicy.VERIFIED
    """What may be reused: nothing; KV equal to a cold run's; what the reuse profile justifies, without one as exact;
    runs at any position with the lowest layers computed again; runs at any position as they are; and two published
    fixed budgets, there to be compared with and not safe."""
    profile_path: Path | None = None
    """JSON file of the reuse profile for policy verified, made by a calibration."""
    profile_trial: bool = False
    """Use the profile without its evidence, as a calibration does: text may be served unchecked."""
    max_kl: Annotated[MaxKl, BeforeValidator(parse_max_kl)] = "rounding"
    """How far an answer may be from a cold run's: the mean KL to its distribution over its own answer, in nats. Policy
    verified reuses moved text only within it; rounding is twice the profile's rounding floor, unbounded is no bound."""
    risk: float = Field(0.05, ge=0.001, le=0.999)
    """Share of the answers that may be further away than SEMBLEND_MAX_KL."""
    recompute_boundary_layer: int = Field(0, ge=0, le=4096)
    """Policy boundary computes this many lowest layers for every token."""
    epic_tokens: int = Field(16, ge=1, le=1 << 20)
    """Policy epic computes this many first tokens of every run."""
    cacheblend_share: float = Field(0.15, ge=0.0, le=1.0)
    """Policy cacheblend computes this share of the reused tokens, those that deviate most at layer 1."""


class DiscoverySettings(SettingsGroup):
    """Settings of how donors are found and which runs of theirs make a plan."""

    min_span_tokens: int = Field(64, ge=1, le=1 << 20)
    """Shortest token-identical run that is reused; runs below 32 tokens are not looked for."""
    min_reuse_ratio: float = Field(0.5, ge=0.0, le=1.0)
    """Least share of the prompt's uncomputed tokens that a plan must reuse."""
    min_saving: float = Field(0.1, ge=0.0, le=1.0)
    """Least share of a prompt's time that moved KV must save, by what the engine measured at its start. With 0 nothing
    is measured, and reuse that does not pay is done too."""
    discovery_only: bool = False
    """Look donors up and report what would be reused, but place nothing."""
    strict_prefix_boundary: bool = False
    """Promise only what goes on without a hole from where the engine's own prefix ends, up to the end of a block."""
    exact_materialization_only: bool = False
    """Place only KV equal to a cold run's; what the policy would reuse beyond it is reported."""
    lookup_deadline_ms: float = Field(5.0, ge=0.001, le=60_000)
    """Processor time, in milliseconds, that the lookup of a prompt of up to 20,480 tokens may take, and in proportion
    that of a longer one; at least half of the time that a plan has to save (`min_saving`). Then what was found and
    chosen is reused, and the request counts as lookup_timeout."""
    embedder: EmbedderKind = EmbedderKind.OFF
    """How texts are compared to report the nearest donors of a request, beside serving: not at all, by hashed words, by
    word sets, or by a sentence model. What is near is reported, and read back from disk for the next request, never
    reused for it. All but off need the extra semantic."""
    embedder_model: str | None = Field(None, min_length=1, max_length=4096)
    """Folder or cached hub id of the sentence model; unset, all-MiniLM-L6-v2 as the extra embedder brings it."""
    min_similarity: float = Field(0.60, ge=-1.0, le=1.0)
    """Least cosine similarity at which a donor is reported as near a request."""


class DonorSettings(SettingsGroup):
    """Settings of which requests become donors, and where their KV is held."""

    host_bytes: int = Field(4 << 30, ge=0, le=1 << 50)
    """Host memory for donor KV, in bytes, page-locked at the start where there is a card; when it is full, donors go in
    the order of SEMBLEND_EVICTION."""
    # Off by default: the engine has sized its pool to the card's free memory, and its forward needs what is left.
    device_bytes: int = Field(0, ge=0, le=1 << 50)
    """Device memory for donor KV, in bytes, allocated at the start beside the engine's pool; lower the engine's memory
    fraction by it. When it is full, donors move down to host memory."""
    staging_bytes: int = Field(256 << 20, ge=1 << 20, le=1 << 40)
    """Device memory through which donors travel from and to host memory, in bytes; without a card none is used."""
    snapshot_bytes: int = Field(1 << 30, ge=1 << 20, le=1 << 40)
    """Device memory for copies of ended requests on their way to a tier, in bytes; taken only where the engine gives a
    request's blocks to others before it is saved (SGLang, TensorRT-LLM's V1 manager). A donor is cut to what is free
    of it."""
    disk_bytes: int = Field(0, ge=0, le=1 << 50)
    """Files for donor KV, in bytes together; 0 writes none. Donors in host memory are written in the background, stay
    on disk when memory lets them go, and are found again after a restart."""
    disk_path: Path | None = None
    """Folder for those files, of this engine alone; they hold token ids and KV, from which prompts can be recovered."""
    disk_key_path: Path | None = None
    """File of the key with which those files are sealed, outside of their folder: 32 random bytes, mode 600, made if it
    is missing. Unset, it is `semblend-trt/donor-key` in `$XDG_STATE_HOME` or `~/.local/state`. Files of another key
    are not read."""
    eviction: Annotated[Eviction, BeforeValidator(_parse_eviction)] = Eviction.LRU
    """Which donors go first when a tier is full: the least recently used; the least often used; large ones before
    small."""
    max_donors: int = Field(10_000, ge=1, le=10_000_000)
    """Most donors held at once, of all salts together."""
    min_donor_tokens: int = Field(64, ge=1, le=1 << 20)
    """A request with fewer tokens does not become a donor."""


class IdentitySettings(SettingsGroup):
    """Settings of what the engine's KV may be interchanged with: fields of its namespace."""

    donor_tenant: _Name = None
    """Tenant of this engine; other tenants share no donors with it."""
    donor_template: _Name = None
    """Prompt template of this engine; others share no donors with it."""
    model_revision: _Name = None
    """Model revision; unset, it is a digest of every byte of the weights, under any name."""
    digest_cache_path: Path | None = None
    """Folder, of this user alone, in which digests of weights are kept for the next start; unset, `semblend-trt` in
    $XDG_CACHE_HOME or ~/.cache; off keeps none."""
    tokenizer_revision: _Name = None
    """Tokenizer revision; unset, it is a digest of its files."""
    adapter_id: _Name = None
    """Adapter that this engine applies to every request."""


class ReportingSettings(SettingsGroup):
    """Settings of what is reported of requests."""

    audit_path: Path | None = None
    """JSONL file to which audit events are appended; unset, none are written."""
    metrics: bool = True
    """Counts in Prometheus' default registry, where prometheus_client is installed."""


class FleetSettings(SettingsGroup):
    """Settings of what the fleet hears of this worker's donors."""

    # Secret: it may hold a user's password.
    nats_url: Annotated[SecretStr | None, AfterValidator(_checked_servers)] = Field(None, min_length=1, max_length=4096)
    """NATS server, or several with commas between them, to which donor events go; unset, none are sent."""
    nats_subject: Annotated[str, _NAME, _SUBJECT] = "semantic-kv-events"
    """Subject of donor events; with .resync after it, that of requests for all donors."""
    nats_subject_per_worker: bool = False
    """Donor events go to the subject with .<worker id> after it, and readers believe a worker's from there only, so
    that NATS permissions can keep one worker from speaking for another."""
    nats_stream: Annotated[_Name, _STREAM] = None
    """JetStream stream that acknowledges and keeps donor events, made where it is missing; unset, core NATS carries
    them."""
    nats_tls_ca: Path | None = None
    """PEM file of the authorities that may have signed the NATS server's certificate."""
    nats_tls_cert: Path | None = None
    """PEM file of this client's certificate for NATS."""
    nats_tls_key: Path | None = None
    """PEM file of the private key of that certificate, where it is not in the same file."""
    nats_creds: Path | None = None
    """Credentials file of a NATS user."""
    nats_token: SecretStr | None = Field(None, min_length=1, max_length=4096)
    """Token for NATS."""
    event_format: EventFormat = EventFormat.JSON
    """How donor events are written."""
    event_embeddings: bool = False
    """Send donors' embeddings too, where there are any; texts can be guessed from them."""
    worker_id: int | None = Field(None, ge=0, le=(1 << 53) - 1)
    """Number of this worker in the fleet; unset, that after the last hyphen of the host's name, or 0."""
    load_weight: float = Field(1.0, gt=0.0, le=1000.0)
    """What a token that a worker has yet to compute counts against one that it holds, where a gateway's callback places
    requests: below 1 a request stays longer with its text while it has a queue."""
    tenant_secret: SecretStr | None = Field(None, min_length=16, max_length=4096)
    """Secret from which a gateway's callback makes each tenant's salt, the same for all its processes; unset, all
    callers share their KV."""
    heartbeat_seconds: float = Field(10.0, ge=0.1, le=3600.0)
    """A heartbeat goes out this often; readers give a silent worker up."""
    resync_seconds: float = Field(300.0, ge=0.0, le=86400.0)
    """All donors are sent again this often, for readers that cannot ask; 0, only when one asks."""


# pydantic takes the fields of the last base first, so documentation shows the groups from the last to the first.
class Settings(FleetSettings, ReportingSettings, IdentitySettings, DonorSettings, DiscoverySettings, ReuseSettings):
    """What a user may set. Arguments win over the environment; see `load_settings` for errors of our own."""

    @model_validator(mode="after")
    def _check_bound(self) -> Settings:
        """Refuse a bound that nothing keeps, and a risk without a bound."""
        given = [variables_of(name)[1] for name in ("max_kl", "risk") if name in self.model_fields_set]
        if given and self.policy is not ReusePolicy.VERIFIED:
            raise ConfigurationError(
                f"{given[0]} is set, but policy {self.policy.value} keeps no bound; unset it, or use policy verified"
            )
        if self.max_kl == "unbounded" and "risk" in self.model_fields_set:
            raise ConfigurationError(
                f"SEMBLEND_RISK is {self.risk:g}, but SEMBLEND_MAX_KL is unbounded, which no answer exceeds; unset one"
            )
        return self


def terms_of(
    policy: ReusePolicy, settings: Settings, num_layers: int, lowest_check_layer: int = 1
) -> ReuseTerms | None:
    """Return the terms that the settings alone give; None for exact spans only, and for VERIFIED, whose profile gives
    them. Raises ConfigurationError for a layer that the model lacks, a check below `lowest_check_layer`, or an unset
    boundary: at 0 BOUNDARY would be POSITION_FIX under another name."""
    if policy is ReusePolicy.POSITION_FIX:
        return ReuseTerms()
    if policy is ReusePolicy.EPIC:
        return ReuseTerms(head_tokens=settings.epic_tokens)
    if policy is ReusePolicy.BOUNDARY:
        boundary = settings.recompute_boundary_layer
        if not 1 <= boundary <= num_layers:
            raise ConfigurationError(
                f"SEMBLEND_RECOMPUTE_BOUNDARY_LAYER is {boundary}, outside 1..{num_layers}, the layers of this model; "
                "policy boundary needs it in that range"
            )
        return ReuseTerms(boundary=boundary)
    if policy is not ReusePolicy.CACHEBLEND:
        return None
    why = None
    if num_layers <= CACHEBLEND_LAYER:
        why = f" has {num_layers} layer"
    elif lowest_check_layer > CACHEBLEND_LAYER:
        why = f"'s layers below {lowest_check_layer} see no further than a window"
    if why is not None:
        raise ConfigurationError(
            f"policy cacheblend chooses tokens at layer {CACHEBLEND_LAYER}, and this model{why}; use another policy"
        )
    return ReuseTerms(check=SpanCheck(layer=CACHEBLEND_LAYER, largest_share=settings.cacheblend_share))


def load_settings(**overrides: Any) -> Settings:
    """Read the settings; `overrides` win over the environment.

    Raises ConfigurationError naming the variable, its value and the bound. A SEMBLEND_* variable that no setting has is
    warned about once a process."""
    for name, close in unknown_variables(os.environ).items():
        if (why := why_ignored(name)) is not None:
            _warn_once("%s is ignored: %s", name, why)
        else:
            _warn_once("%s is not read by this version%s", name, f"; did you mean {close}?" if close else "")
    try:
        return Settings(**overrides)
    except ValidationError as error:
        sentences = (_sentence(each, overrides) for each in error.errors(include_url=False))
        raise ConfigurationError(". ".join(sentences)) from error


def _sentence(detail: ErrorDetails, overrides: dict[str, Any]) -> str:
    problem = detail.get("ctx", {}).get("error")
    if not detail["loc"]:
        return str(problem)
    name = str(detail["loc"][0])
    if (field := Settings.model_fields.get(name)) is None:
        close = difflib.get_close_matches(name, Settings.model_fields, n=1)
        return f"{name} is not a setting" + (f"; did you mean {close[0]}?" if close else "")
    source = name if name in overrides else variable_in_use(name) or name
    if isinstance(problem, ConfigurationError):
        return f"{source}: {problem}"
    is_secret = SecretStr in (field.annotation, *get_args(field.annotation))
    value = "wrong" if is_secret else repr(str(detail["input"])[:80])
    kinds = {"int": ", no whole number", "float": ", no number"}
    return f"{source} is {value}{kinds.get(detail['type'].split('_')[0], '')}; allowed is {allowed_by(field)}"


def variables_of(name: str) -> tuple[str, ...]:
    """Return the variables of a setting, the deciding one first."""
    current = tuple(prefix + _NAMES.get(name, name.upper()) for prefix in PREFIXES)
    return (*current, _OLD_NAMES[name]) if name in _OLD_NAMES else current


def variable_in_use(name: str) -> str | None:
    """Return the variable that decides a setting now; None when none is set."""
    return next((each for each in variables_of(name) if os.environ.get(each, "").strip()), None)


def allowed_by(field: FieldInfo) -> str:
    """Return the values that a field takes, in words."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, Enum):
        return ", ".join(each.value for each in field.annotation)
    if field.annotation is bool:
        return "0 or 1"
    if field.annotation == MaxKl:
        return "a number above 0, rounding or unbounded"
    names = ("ge", "le", "max_length")
    bounds = {name: getattr(item, name) for item in field.metadata for name in names if hasattr(item, name)}
    if "ge" in bounds:
        return f"{bounds['ge']}..{bounds['le']}"
    return f"a text of 1..{bounds['max_length']} characters" if "max_length" in bounds else "a path"


def unknown_variables(names: Iterable[str]) -> dict[str, str | None]:
    """Return those of `names` with one of our prefixes that belong to no setting, each with the name most like it."""
    known = [variable for name in Settings.model_fields for variable in variables_of(name)]
    unknown = sorted(name for name in names if name.startswith(PREFIXES) and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None) for name in unknown}


def why_ignored(name: str) -> str | None:
    """Return why the setting with this name, or the variable, is accepted and ignored; None for every other name."""
    return _RETIRED.get(name.upper().removeprefix("TRTLLM_").removeprefix("SEMBLEND_"))
