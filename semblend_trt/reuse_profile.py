"""ReuseProfile: what a calibration found safe for one model on the engines that it lists, as a JSON file.

The profile holds for its own namespace only: all fields that decide what the KV is bind. Block size, tenant, template
and cache salt decide who may share it, and do not bind. Names of model and tokenizer bind only where no digest
identifies their content. A field that either side does not know counts as a difference."""

from __future__ import annotations

import datetime
import grp
import hashlib
import json
import logging
import os
import pwd
import stat
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from semblend_trt import __version__
from semblend_trt.errors import ConfigurationError, NamespaceError, ProfileError
from semblend_trt.files import read_input, write_bytes
from semblend_trt.namespace import MAX_TEXT, PARALLEL_SIZES, REVISION_OF, CacheNamespace, is_content, is_unknown
from semblend_trt.plan import WINDOW_TOKENS, BudgetLevel, ReuseTerms, SpanCheck
from semblend_trt.policy import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import KvGeometry
    from semblend_trt.policy import MaxKl

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
# A deviation of 1 is as large as the KV itself: a threshold above it would accept anything.
MAX_THRESHOLD = 1.0
_MAX_LAYERS = 4096
_MAX_WINDOW_TOKENS = 1 << 10
# Of an earlier version's profile, which is refused if it was found safe with another value.
_Retired = Annotated[Literal[0], Field(exclude=True)]
MAKE_AGAIN = "make it again with `python -m validation calibrate`"
# A profile that leaves text unchecked must have shown each of these within the margin.
EVIDENCE_FAMILIES = (
    *("reordered", "system_prompt", "prose", "header_trap", "far_header_trap", "mid_sentence_trap", "alias_trap"),
    *("pronoun_trap", "unit_trap", "date_trap", "near_duplicates", "planted"),
)
EVIDENCE_MARGIN = 0.1
_CONFIDENCE = 0.95

# Field of the profile: what the sentences call it.
_BOUND = {
    "model": "model",
    "model_revision": "weights",
    "tokenizer": "tokenizer",
    "tokenizer_revision": "tokenizer revision",
    "kv_layout": "KV layout",
    "kv_dtype": "KV dtype",
    "cache_dtype": "cache dtype",
    "compute_dtype": "compute dtype",
    "configuration": "configuration",
    "quantization": "quantisation",
    "adapter": "adapter",
    "rope_config": "RoPE",
    "tensor_parallel": "parallel layout",
}
_OF_EXTRA = ("compute_dtype", "configuration")
_ENGINE = "engine and cache layout"
_NONE_IS_KNOWN = ("quantization", "adapter")  # None there says that none is in use


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ProfileCheck(_Part):
    """The check of policy verified (`SpanCheck`). Layer 0 is refused: K and V of equal tokens never deviate there."""

    layer: Annotated[int, Field(ge=1, lt=_MAX_LAYERS)]
    threshold: Annotated[float, Field(ge=0.0, le=MAX_THRESHOLD)]
    max_span_share: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    min_saved_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    window_threshold: Annotated[float, Field(ge=0.0, le=MAX_THRESHOLD)] | None = None
    window_tokens: Annotated[int, Field(ge=1, le=_MAX_WINDOW_TOKENS)] = WINDOW_TOKENS
    sample_every: Annotated[int, Field(ge=0, le=_MAX_WINDOW_TOKENS)] = 0
    sample_threshold: Annotated[float, Field(ge=0.0, le=MAX_THRESHOLD)] = 0.0
    compares_all: bool = True

    @model_validator(mode="before")
    @classmethod
    def _without_witnesses(cls, value: Any) -> Any:
        """Drop an earlier version's fields. A check with witnesses is refused: it was found safe with them alone."""
        if not isinstance(value, dict):
            return value
        every = value.get("witness_every", 0)
        if type(every) is not int or every != 0:
            raise ValueError(f"witness_every is {every!r:.80}, and only 0 is allowed: this version has no witnesses")
        return {name: each for name, each in value.items() if name not in ("witness_every", "witness_bounds")}


class ProfileLevel(_Part):
    """If a sample estimates a mean of at most `deviation`, the `share` of a plan's checked tokens is computed."""

    deviation: Annotated[float, Field(ge=0.0)]
    share: Annotated[float, Field(ge=0.0, le=1.0)]


class ProfileBound(_Part):
    """With these levels, at most the share `risk` of the answers is further than `max_kl` nats from a cold run's.

    That distance is the mean KL over cold's own answer. Beyond the last level everything is computed. Without levels
    nothing may be reused that was moved."""

    max_kl: Annotated[float, Field(gt=0.0)]
    risk: Annotated[float, Field(gt=0.0, lt=1.0)]
    levels: list[ProfileLevel]

    @field_validator("levels")
    @classmethod
    def _check_order(cls, value: list[ProfileLevel]) -> list[ProfileLevel]:
        for below, above in pairwise(value):
            if below.deviation >= above.deviation or below.share > above.share:
                raise ValueError(f"level {above} follows {below}; the deviation must rise, and the share must not fall")
        return value


class ProfileGeometry(_Part):
    """Sizes of one rank's KV; they decide whether the layers of a profile exist."""

    num_layers: Annotated[int, Field(ge=1, le=_MAX_LAYERS)]
    kv_heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=1)]


class _Figure(BaseModel):
    """The keys of one of a profile's figures that count as evidence; the others are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    what: str
    margin: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    confidence: Annotated[float, Field(ge=_CONFIDENCE)] = _CONFIDENCE
    family: str = ""
    groups: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    likelihood_vs_cold: dict[str, float] | None = None
    stage: str = ""
    candidate: str = ""
    holds: bool = False
    max_kl: float = 0.0
    risk: float = 0.0
    prompts: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    broken: Annotated[int, Field(ge=0)] = 0

    def shows(self, margin: float) -> bool:
        """Return whether a family loses at most the margin, in enough groups to have shown a larger loss."""
        lower = (self.likelihood_vs_cold or {}).get("lower", -1.0)
        return self.what == "confirmed" and lower >= -margin and (1.0 - margin) ** self.groups <= 1.0 - _CONFIDENCE

    def refutes(self, bound: ProfileBound) -> bool:
        """Return whether the share of broken answers has a lower limit above the bound's risk (Clopper and Pearson,
        Biometrika 1934)."""
        more, odds = np.arange(1, self.prompts + 1), bound.risk / (1.0 - bound.risk)
        # Of the chances of `more` broken answers to those of none.
        logarithms = np.cumsum(np.log((self.prompts + 1 - more) / more * odds))
        tail = np.exp(logarithms + self.prompts * np.log1p(-bound.risk))[max(0, self.broken - 1) :].sum()
        return self.broken > 0 and bool(tail < 1.0 - _CONFIDENCE)


class ReuseProfile(_Part):
    """The cheapest `policy` that a calibration found as good as cold. Build one with `made_for`.

    The first `head_tokens` tokens of every run are always computed. KV computed after checked KV becomes a donor of the
    next generation, up to `generations`; such a donor is always checked. `engines` are engines with their cache
    layouts, as a namespace names them. `bounds` say how much of a plan is computed for a stated distance from cold;
    `floor` is the KL of two cold runs, in nats, that few answers exceed by rounding alone. `template`: SHA-256 of the
    chat template that they were measured with. `digest` is that of all other fields, as `write` made it."""

    schema_version: Literal[2] = 2
    version: str
    namespace: dict[str, JsonValue]
    engines: Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]], Field(min_length=1)]
    geometry: ProfileGeometry
    policy: Literal["exact", "verified", "position_fix"]
    check: ProfileCheck | None = None
    boundary: _Retired = 0
    head_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    generations: Annotated[int, Field(ge=0, le=64)] = 0
    bounds: list[ProfileBound] = Field(default_factory=list)
    floor: Annotated[float, Field(ge=0.0)] | None = None
    template: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    figures: list[JsonValue] = Field(default_factory=list)
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}")]
    versions: dict[str, str] = Field(default_factory=dict)
    command: str = ""
    digest: str | None = None

    @field_validator("namespace")
    @classmethod
    def _normalise_namespace(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if set(value) != set(_BOUND):
            missing, unexpected = sorted(set(_BOUND) - set(value)), sorted(set(value) - set(_BOUND))
            raise ValueError(f"fields {missing} are missing and {unexpected} are not known")
        known: dict[str, Any] = dict(value)
        extra = {name: known.pop(name) for name in _OF_EXTRA}
        try:
            unbound = {"block_size": 1, "backend_cache_layout": "any", "extra": extra}
            return _bound_fields(CacheNamespace.from_dict({**known, **unbound}))
        except NamespaceError as error:
            raise ValueError(str(error)) from None

    @field_validator("engines")
    @classmethod
    def _check_engines(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError(f"{value} names an engine twice; name each once")
        return value

    @model_validator(mode="after")
    def _check_layers(self) -> ReuseProfile:
        layers, check = self.geometry.num_layers, self.check
        if check is not None and check.layer >= layers:
            raise ValueError(f"check layer {check.layer} is outside 1..{layers - 1}, the layers of the model")
        if check is not None and check.sample_every > check.window_tokens:
            raise ValueError(
                f"sample_every is {check.sample_every}; it may be at most window_tokens, {check.window_tokens}, so "
                "that each window has a token of the sample"
            )
        if (self.policy == "verified") != (check is not None):
            raise ValueError(f"policy {self.policy} and check {check} do not fit; verified, and only it, has one")
        if check is not None and not (check.compares_all or check.sample_every):
            raise ValueError("compares_all is false and sample_every is 0; a check has to compare some tokens")
        if self.bounds and (check is None or not check.sample_every or self.generations):
            raise ValueError(
                f"bounds need a check with a sample and 0 generations; policy {self.policy} has check {check} and "
                f"{self.generations} generations"
            )
        for name in ("head_tokens", "generations"):
            if getattr(self, name) and self.policy != "verified":
                raise ValueError(f"policy {self.policy} has {name} {getattr(self, name)}; only verified may have some")
        return self

    @classmethod
    def made_for(
        cls, namespace: CacheNamespace, geometry: KvGeometry, *, policy: ReusePolicy | str, **fields: Any
    ) -> ReuseProfile:
        """Make the profile of an engine's own namespace, dated today (UTC), with these `fields`. Raises
        ConfigurationError for a value out of range, or an unknown field of the namespace: it would match nothing."""
        own = _bound_fields(namespace)
        unknown = [_BOUND[name] for name, value in own.items() if _is_unknown(name, value)]
        unknown += [_ENGINE] if _is_unknown("", namespace.backend_cache_layout) else []
        if unknown:
            raise ConfigurationError(
                f"a reuse profile cannot be made: {', '.join(unknown)} of this engine cannot be determined; "
                "SEMBLEND_MODEL_REVISION and SEMBLEND_TOKENIZER_REVISION name what the files do not tell"
            )
        try:
            return cls(
                version=__version__,
                namespace=own,
                engines=[namespace.backend_cache_layout],
                geometry=ProfileGeometry.model_validate(geometry, from_attributes=True),
                policy=ReusePolicy(policy).value,  # type: ignore[arg-type]
                date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
                **fields,
            )
        except ValidationError as error:
            raise ConfigurationError(f"a reuse profile cannot be made: {_sentence(error)}") from error

    @classmethod
    def read(cls, path: str | Path) -> ReuseProfile:
        """Read a profile. Raises ProfileError for one that is not valid, was edited, or that others can write."""
        return cls.read_with_digest(path)[0]

    @classmethod
    def read_with_digest(cls, path: str | Path) -> tuple[ReuseProfile, str]:
        """Read a profile as `read` does, with the SHA-256 of the file in hex."""
        try:
            content = read_input(path, MAX_BYTES)
            writers = writers_of(Path(path))
        except OSError as error:
            message = f"reuse profile {path} cannot be read: {error.strerror or error}"
            raise ProfileError("profile_unreadable", message) from error
        if writers is not None:
            message = f"reuse profile {path} decides what is served unchecked, and {writers}"
            raise ProfileError("profile_writable", message)
        try:
            profile = cls.model_validate_json(content)
            values = json.loads(content)
            found = _digest_of(values)
        except ValueError as error:
            told = _sentence(error) if isinstance(error, ValidationError) else error
            raise ProfileError("profile_unreadable", f"reuse profile {path}: {told}; {MAKE_AGAIN}") from error
        if profile.digest not in (None, found):
            raise ProfileError("profile_evidence", f"reuse profile {path} was edited after it was made; {MAKE_AGAIN}")
        if profile.check is not None and "witness_bounds" in values["check"]:
            logger.warning("reuse profile %s: witness_bounds is ignored; this version has no witnesses", path)
        return profile, hashlib.sha256(content).hexdigest()

    def confirmed_in(self, engine: str, figures: list[JsonValue] | None = None) -> ReuseProfile:
        """Return the profile with `engine` among its engines and other `figures`, where they are given."""
        engines = self.engines if engine in self.engines else [*self.engines, engine]
        return self.model_copy(update={"engines": engines, "figures": self.figures if figures is None else figures})

    def write(self, path: str | Path) -> None:
        """Write the profile with its digest, whole or not at all. Raises OSError."""
        values = self.model_dump(mode="json")
        values["digest"] = _digest_of(values)
        write_bytes(Path(path), (json.dumps(values, indent=2) + "\n").encode())

    def differences(self, namespace: CacheNamespace, geometry: KvGeometry) -> list[str]:
        """Return why the profile does not hold for this namespace and one rank's `geometry`, a sentence each."""
        found = [] if self.version == __version__ else [_difference("version", self.version, __version__)]
        running = _bound_fields(namespace)
        for name, title in _BOUND.items():
            if is_content(running.get(REVISION_OF.get(name, ""))):
                continue
            ours, theirs = self.namespace[name], running[name]
            if _is_unknown(name, ours) or _is_unknown(name, theirs) or _canonical(ours) != _canonical(theirs):
                found.append(_difference(title, _shown(name, ours), _shown(name, theirs)))
        engine = namespace.backend_cache_layout
        is_known = not _is_unknown("", engine)
        if not is_known or engine not in self.engines:
            hint = ", which `python -m validation confirm` can add" if is_known else ""
            found.append(_difference(_ENGINE, " or ".join(self.engines), _shown("", engine) + hint))
        for size, value in self.geometry.model_dump().items():
            if value != getattr(geometry, size):
                found.append(_difference(size, str(value), str(getattr(geometry, size))))
        return found

    def check_refusal(self, lowest: int) -> str | None:
        """Return why the check sees too little: below `lowest` no layer's K and V depend on full attention."""
        if self.check is None or self.check.layer >= lowest:
            return None
        return (
            f"The profile's check layer {self.check.layer} has no layer with full attention below it; {lowest} is the "
            f"lowest of this model that has; {MAKE_AGAIN}."
        )

    def evidence_refusal(self, max_kl: MaxKl = "rounding", risk: float = 0.05) -> str | None:
        """Return what the figures lack to justify these terms. All but exact need a digest and the confirmation of
        these very terms. With bounds that is the confirmation of the one for these settings. Without, terms that leave
        text unchecked also need every family of EVIDENCE_FAMILIES within the margin of a rule, at most
        EVIDENCE_MARGIN."""
        if self.policy == ReusePolicy.EXACT.value:
            return None
        figures = list[_Figure]()
        for figure in self.figures:
            with suppress(ValidationError):
                figures.append(_Figure.model_validate(figure))
        if self.bounds:
            return self._bound_refusal(self.bound_for(max_kl, risk), figures)
        margin = next((each.margin for each in figures if each.what == "rule"), 0.0)
        shown = {each.family for each in figures if each.shows(margin)}
        name, check, parts = terms_name(self.policy, self.check), self.check, list[str]()
        if check is not None and check.sample_every:
            parts = [f" one in {check.sample_every} ", f" under {check.sample_threshold:.4g} "]
        confirmed = (f"{each.candidate} " for each in figures if each.stage == "confirm" and each.holds)
        found = {
            "a digest": self.digest is not None,
            "a confirmation": any(f.startswith(f"{name} ") and all(p in f for p in parts) for f in confirmed),
        }
        # Moved tokens that no check compares, or that any check lets pass.
        if check is None or check.sample_every or check.threshold >= MAX_THRESHOLD:
            found[f"a rule with a margin of at most {EVIDENCE_MARGIN:g}"] = 0.0 < margin <= EVIDENCE_MARGIN
            found |= {family: family in shown for family in EVIDENCE_FAMILIES}
        lacking = ", ".join(each for each, is_found in found.items() if not is_found)
        return f"The profile's evidence for its terms ({name}) lacks {lacking}; {MAKE_AGAIN}." if lacking else None

    def _bound_refusal(self, bound: ProfileBound | None, figures: Sequence[_Figure]) -> str | None:
        lacking = [] if self.digest is not None else ["a digest"]
        if bound is not None:
            own = [each for each in figures if each.what == "bound_confirmed" and each.prompts]
            own = [each for each in own if (each.max_kl, each.risk) == (bound.max_kl, bound.risk)]
            if not own or any(each.refutes(bound) for each in own):
                lacking.append(f"a confirmation of its bound, {bound.max_kl:.4g} nats at a risk of {bound.risk:.4g}")
        return f"The profile's evidence lacks {' and '.join(lacking)}; {MAKE_AGAIN}." if lacking else None

    def bound_for(self, max_kl: MaxKl, risk: float) -> ProfileBound | None:
        """Return the loosest bound within `max_kl` nats and `risk`; None where none is, or no bound is asked for."""
        if max_kl == "rounding":
            max_kl = 0.0 if self.floor is None else 2.0 * self.floor
        if isinstance(max_kl, str):
            return None
        fitting = [each for each in self.bounds if each.max_kl <= max_kl and each.risk <= risk]
        return max(fitting, key=lambda each: (each.max_kl, each.risk), default=None)

    def terms_for(self, max_kl: MaxKl, risk: float) -> ReuseTerms | None:
        """Return how runs that are not exact are executed within `max_kl` nats and `risk`; None for exact spans only.

        A profile without bounds has its own terms for `rounding`, the default, and none for a number."""
        if max_kl == "unbounded":
            return ReuseTerms()
        own, bound = self.terms, self.bound_for(max_kl, risk)
        if not self.bounds and max_kl == "rounding":
            return own
        if bound is None or not bound.levels or own is None or own.check is None:
            return None
        levels = tuple(BudgetLevel(each.deviation, each.share) for each in bound.levels)
        return replace(own, check=replace(own.check, levels=levels))

    @property
    def terms(self) -> ReuseTerms | None:
        """How runs that are not exact are executed without a bound; None for exact spans only."""
        if self.policy == "exact":
            return None
        check = None if self.check is None else SpanCheck(**self.check.model_dump())
        return ReuseTerms(0, check, self.head_tokens, self.generations)


def terms_name(policy: str, check: ProfileCheck | None) -> str:
    """Return how a calibration's figures begin the name of a candidate with these terms."""
    return policy if check is None else f"{policy} layer {check.layer} threshold {check.threshold:.4g}"


def _digest_of(values: dict[str, Any]) -> str:
    told = _canonical({name: value for name, value in values.items() if name != "digest"})
    return hashlib.sha256(told.encode()).hexdigest()


def _bound_fields(namespace: CacheNamespace) -> dict[str, JsonValue]:
    fields = namespace.to_dict()
    sizes = {name: fields["tensor_parallel"][name] for name in PARALLEL_SIZES}
    fields.update(tensor_parallel=sizes, **{name: fields["extra"].get(name) for name in _OF_EXTRA})
    return {name: fields[name] for name in _BOUND}


def _is_unknown(name: str, value: object) -> bool:
    if isinstance(value, dict):
        return not value or any(_is_unknown("", item) for item in value.values() if item is not None)
    if value is None:
        return name not in _NONE_IS_KNOWN
    return is_unknown(value) or (isinstance(value, str) and value.strip().lower() == "unknown")


def _canonical(value: JsonValue) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _shown(name: str, value: JsonValue) -> str:
    if _is_unknown(name, value):
        return "what is not known"
    if value is None:
        return "none"
    return value[:160] if isinstance(value, str) else _canonical(value)[:400]


def _difference(what: str, made_for: str, running: str) -> str:
    return f"The profile was made for {what} {made_for}; this engine runs {running}."


def writers_of(path: Path) -> str | None:
    """Return who but this user and root can write the file that `path` leads to, or put another in its place. Folders
    above the file and above `path` count by their modes, unless they are mounted read-only."""
    user, real, named = os.geteuid(), Path(os.path.realpath(path)), Path(os.path.abspath(path))
    for each in (real, *real.parents, named, *named.parents):
        about = each.lstat()
        mode, rights = about.st_mode, stat.S_IWOTH if _is_private(about.st_gid) else stat.S_IWOTH | stat.S_IWGRP
        # A folder's owner can put a file of his own there, which is refused.
        if about.st_uid not in (0, user) and not stat.S_ISDIR(mode):
            return f"user {about.st_uid} owns {each}; give it to user {user}, who runs this process, or to root"
        is_kept = stat.S_ISDIR(mode) and (mode & stat.S_ISVTX or os.statvfs(each).f_flag & os.ST_RDONLY)
        if mode & rights and not is_kept and not stat.S_ISLNK(mode):
            return f"others can write {each}, whose mode is {stat.S_IMODE(mode):03o}; take that from them: chmod go-w"
    return None


def _is_private(group: int) -> bool:
    """Return whether it is the user's own group, of the same name and without others, as Debian makes them."""
    with suppress(KeyError):
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return user.pw_uid != 0 and (user.pw_gid, user.pw_name) == (group, found.gr_name) and not found.gr_mem
    return False


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        return f"{where}: {message}" if where else message
    value = "" if first["type"] in ("missing", "json_invalid") else f" is {first['input']!r:.80}"
    return f"{where or 'the file'}{value}: {first['msg']}"
