"""The look-up of a request: the namespace of its KV, its plan with leased donors, and what it may leave as a donor."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.connector.engine_spec import text_of
from semblend_trt.connector.requests import Adapters, TrackedRequest
from semblend_trt.discovery.planner import Deadline, LookupRequest, Planned, Planner
from semblend_trt.donors.catalog import Lease, Tier
from semblend_trt.donors.offload import SaveIntent
from semblend_trt.errors import ConfigurationError, DonorUnavailableError, NamespaceError, ProfileError
from semblend_trt.model_files import DigestCache, snapshot, tokenizer_digest, weights_digest
from semblend_trt.namespace import MAX_REMEMBERED, CacheNamespace, content_value, is_unknown, unknown_value
from semblend_trt.plan import EngineMode, gaps
from semblend_trt.policy import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from kernels.layout import KvGeometry
    from semblend_trt.config import Settings
    from semblend_trt.connector.engine_spec import EngineRequest, EngineSpec
    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.donors.donor_index import DonorIndex
    from semblend_trt.donors.offload import DonorObserver
    from semblend_trt.pool_facts import PoolFacts
    from semblend_trt.reuse_profile import ProfileBound, ReuseProfile
    from semblend_trt.runtime import Runtime
    from semblend_trt.semantic.neighbours import Neighbours

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)  # a calibration opens an engine for each candidate

# Most tokens of a request's answer that its donor holds.
MAX_ANSWER_TOKENS = 1024


class DonorPlanner:
    """Plan look-ups with donors that can be read at once, and decide what their requests may leave as donors."""

    def __init__(self, settings: Settings, pool: PoolFacts, donors: DonorIndex) -> None:
        self._settings, self._donors, self._catalog = settings, donors, donors.catalog
        self._planner = Planner(
            donors.texts.spans,
            settings,
            settings.policy,
            pool.geometry.num_layers,
            lambda donor_id: self._catalog.tier(donor_id) is Tier.DEVICE,
            donors.texts.generations,
            pool.chunk,
            lambda *prompt: max((same for same, text in donors.texts.near(*prompt) if not text.generation), default=0),
        )

    def plan(self, lookup: LookupRequest) -> tuple[Planned, list[Lease]]:
        """Plan a look-up and lease its donors. If a lease fails, plan without that donor while the deadline allows.

        If a plan with donors on disk would reuse more, fetch them: a later look-up finds them in memory."""
        cold = 0.0 if lookup.costs is None else lookup.costs.cold(lookup.num_computed_tokens, len(lookup.tokens))
        # Half of what a plan has to save: on a slow host a long prompt's look-up takes more than the setting.
        least = self._settings.min_saving / 2 * cold
        deadline = Deadline(self._settings.lookup_deadline_ms, len(lookup.tokens), least)
        excluded, on_disk, reused_with_disk = frozenset[str](), list[str](), 0
        planned, leases = Planned(plan=None, outcome_reason="donor_unavailable", runs_found=0), list[Lease]()
        while True:
            found = self._planner.plan(replace(lookup, exclude=lookup.exclude | excluded), deadline, planned.scan)
            if found.plan is None or not found.plan.matched_tokens:
                planned = found
                break
            tokens = Counter[str]()
            for span in found.plan.spans:
                tokens[span.donor_id] += span.length
            donors = sorted(tokens, key=lambda donor_id: (-tokens[donor_id], donor_id))  # the most used first
            leases, missing = self._lease(donors)
            if not missing:
                planned = found
                self._donors.offload.promote(donors)
                break
            planned = replace(planned, runs_found=found.runs_found, scan=found.scan)
            resting = self._catalog.resting()
            if not on_disk and missing & resting:
                on_disk = [each for each in donors if each in missing & resting]
                reused_with_disk = found.plan.reused_tokens
                excluded |= resting
            excluded |= missing
            if deadline.is_over():
                break
        if on_disk and reused_with_disk > (planned.plan.reused_tokens if planned.plan is not None else 0):
            self._donors.offload.fetch(on_disk)
            if planned.plan is None:
                planned = replace(planned, outcome_reason="donor_on_disk")
        return planned, leases

    def intend(
        self, donor_id: str, tracked: TrackedRequest, max_new_tokens: int, generations: int = 0
    ) -> SaveIntent | None:
        """Return what the request may leave as a donor, which takes no room before its end. None if too short or held.

        That is its leading part up to generation `generations`, if text is computed there that no donor of its plan
        holds. Else it is its exact part. At most MAX_ANSWER_TOKENS of the answer come with it."""
        plan, generation = tracked.plan, 0
        limit = len(tracked.prompt) + min(max_new_tokens, MAX_ANSWER_TOKENS)
        if plan is not None and plan.matched_tokens and not plan.is_exact:
            end, generation = plan.donor_part(generations)
            taken = ((span.target_start, span.target_end) for span in plan.spans)
            longest = max(map(len, gaps(taken, plan.num_computed_tokens, end)), default=0)
            if longest < self._settings.min_donor_tokens:
                end, generation = plan.donor_part(0)
            limit = limit if end == plan.prompt_length else end
        prompt = tracked.prompt[:limit]
        intent = SaveIntent(tracked.request_id, donor_id, limit, generation=generation, prompt_tokens=len(prompt))
        if limit < self._settings.min_donor_tokens:
            return None
        near = self._donors.texts.near(tracked.namespace_key, prompt)
        return None if self._donors.is_kept(intent, near) else intent

    def _lease(self, donor_ids: Iterable[str]) -> tuple[list[Lease], frozenset[str]]:
        """Lease all of the donors, or none. Return the leases, and the donors that cannot be leased."""
        leases, missing = list[Lease](), set[str]()
        for donor_id in sorted(donor_ids):
            try:
                leases.append(self._catalog.lease(donor_id))
            except DonorUnavailableError:
                missing.add(donor_id)
        for lease in leases if missing else ():
            lease.release()
        return [] if missing else leases, frozenset(missing)


@dataclass(frozen=True, slots=True)
class ProfileMatch:
    """The `profile` that holds for a namespace, or why it does not: `refusal`, and the sentences for the log.
    `bound`: the profile's for the settings, if any."""

    profile: ReuseProfile | None
    refusal: str = "no_profile"
    differences: tuple[str, ...] = ()
    digest: str | None = None
    bound: ProfileBound | None = None


class ProfileMatcher:
    """Compares the profile of policy verified with namespaces. The constructor reads it once, and raises nothing."""

    def __init__(self, settings: Settings, lowest_check_layer: int = 1) -> None:
        self._lowest, self._path = lowest_check_layer, settings.profile_path
        self._read = ProfileMatch(None)  # before it is compared
        # By adapter: the match, and the mode in which it was logged.
        self.matches: dict[str | None, tuple[ProfileMatch, EngineMode]] = {}
        self._is_used = settings.enabled and settings.policy is ReusePolicy.VERIFIED
        if self._path is None:
            return
        if not self._is_used:
            logger.warning("SEMBLEND_PROFILE is set, but policy %s uses no profile", settings.policy.value)
            return
        from semblend_trt.reuse_profile import MAKE_AGAIN, ReuseProfile  # not without a profile

        try:
            profile, digest = ReuseProfile.read_with_digest(self._path)
            asked = settings.max_kl, settings.risk
            if settings.profile_trial:
                _warn_once("SEMBLEND_PROFILE_TRIAL is on: the reuse profile is used without its evidence")
            elif (lacking := profile.evidence_refusal(*asked)) is not None:
                raise ProfileError("profile_evidence", lacking)
            elif profile.terms is not None and not profile.bounds:
                logger.warning("reuse profile %s states no bound for answers; %s", self._path, MAKE_AGAIN)
            self._read = ProfileMatch(profile, digest=digest, bound=profile.bound_for(*asked))
        except ProfileError as error:
            self._read = ProfileMatch(None, error.reason, (str(error),))

    def match(self, namespace: CacheNamespace, geometry: KvGeometry, mode: EngineMode) -> ProfileMatch:
        """Return the match. It is logged once per adapter, and again when a self-check changes the engine's `mode`."""
        match, logged = self.matches.get(namespace.adapter, (self._read, None))
        if self._read.profile is not None and logged is None:
            if differences := self._read.profile.differences(namespace, geometry):
                match = ProfileMatch(None, "profile_mismatch", tuple(differences))
            elif (too_low := self._read.profile.check_refusal(self._lowest)) is not None:
                match = ProfileMatch(None, "profile_check_layer", (too_low,))
        # Requests differ from their engine by adapter only; further adapters are compared each time, unlogged.
        if logged is not mode and (logged is not None or len(self.matches) < MAX_REMEMBERED):
            self.matches[namespace.adapter] = match, mode
            if self._is_used:
                self._log(match, mode)
        return match

    def _log(self, match: ProfileMatch, mode: EngineMode) -> None:
        if mode is EngineMode.STOCK:
            logger.warning(
                "only identical text from position 0 is reused until plans are executed on this engine: any other text "
                "has to be checked"
            )
        elif match.profile is not None:
            logger.info("reuse profile %s holds: policy %s", self._path, match.profile.policy)
        elif match.differences:
            text = "only identical text from position 0 is reused, reuse profile %s does not hold: %s"
            logger.error(text, self._path, " ".join(match.differences))
        else:
            logger.warning(
                "only identical text from position 0 is reused: no reuse profile is set; make one with "
                "`python -m validation calibrate --model ...` and name it in SEMBLEND_PROFILE"
            )


class Lookup:
    """Bind requests to this engine's namespace, once block size and KV dtype are registered, and plan their reuse."""

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        pool: PoolFacts,
        donors: DonorIndex,
        namespace: CacheNamespace,
        adapters: Adapters,
        profiles: ProfileMatcher,
        observers: Sequence[DonorObserver],
        neighbours: Neighbours | None,
    ) -> None:
        """Take `namespace`, bound to no request, `observers` of new donors, and `neighbours` for near texts."""
        self.pool, self.donors = pool, donors
        self._take(namespace)
        self._runtime, self._adapters, self._profiles = runtime, adapters, profiles
        self._observers, self._neighbours = observers, neighbours
        self.planner = DonorPlanner(settings, pool, donors)
        self._first_revision = namespace.model_revision  # of the weights that the engine started with
        self._generation = uuid.uuid4().hex[:12]

    def look_up(self, request: EngineRequest, request_id: int, num_computed_tokens: int) -> TrackedRequest:
        """Return the request with plan, intent and leases; without them and with a reason, if it takes no part."""
        if (refusal := request.refusal) is not None:
            return TrackedRequest.refused(request_id, num_computed_tokens, refusal)
        try:
            salt, adapter = request.cache_salt, self._adapters.of(request)
            namespace = self._unsalted(adapter) if salt is None else self.namespace.for_request(salt, adapter)
        except NamespaceError as error:
            logger.warning("request %d is served cold: %s", request_id, error)
            return TrackedRequest.refused(request_id, num_computed_tokens, "salt_invalid")
        prompt = request.token_array(int(request.prompt_len))
        tracked = TrackedRequest(request_id, namespace.key, prompt, num_computed_tokens)
        match = self._profiles.match(namespace, self.pool.geometry, self._runtime.mode)
        digest = match.digest
        is_broken = digest is not None and any(each.is_broken(digest, namespace.key) for each in self._observers)
        if is_broken or digest in request.broken_profiles:
            match = replace(match, profile=None, refusal="bound_broken", bound=None)
        tracked.profile, tracked.bound = digest, match.bound
        planned, tracked.leases = self.planner.plan(
            LookupRequest(
                request_id=request_id,
                namespace_key=namespace.key,
                tokens=prompt,
                num_computed_tokens=num_computed_tokens,
                block_size=self.pool.geometry.block_size,
                mode=self._runtime.mode,
                publication_guard=self._runtime.publication_guard,
                profile=match.profile,
                profile_refusal=match.refusal,
                exact_only=request.exact_only,
                costs=self._runtime.costs,
                tokens_left=self._runtime.tokens_left,
            )
        )
        tracked.plan, tracked.reason, tracked.runs_found = planned.plan, planned.outcome_reason, planned.runs_found
        if num_computed_tokens and self._runtime.weights is not None and self._runtime.weights.prefix_is_stale:
            return tracked  # the engine's own prefix holds KV of the weights before
        try:
            self._intend(tracked, request, namespace, 0 if match.profile is None else match.profile.generations)
        except Exception:
            tracked.release_leases()
            if tracked.intent is not None:
                self.donors.cancel(tracked.intent)
            raise
        return tracked

    def forget_donors(self) -> None:
        """Reuse nothing that was computed until now. Running requests keep what they have."""
        # What is leased, or still to be saved, keeps a namespace that no request has from now on.
        self._take(replace(self.namespace, extra={**self.namespace.extra, "since": unknown_value()}))
        self.donors.lost_all()

    def change_weights(self, *, are_first: bool) -> None:
        """Drop all donors, and take a namespace without a profile; the first weights bring the first one back."""
        revision = self._first_revision if are_first else unknown_value()
        self._take(replace(self.namespace, model_revision=revision))
        self.donors.lost_all()
        self._profiles.matches.clear()  # they are compared and logged again

    def _take(self, namespace: CacheNamespace) -> None:
        self.namespace = namespace
        # Salts may be secrets, so only namespaces without one are remembered.
        self._unsalted = lru_cache(MAX_REMEMBERED)(partial(namespace.for_request, None))

    def _intend(
        self, tracked: TrackedRequest, request: EngineRequest, namespace: CacheNamespace, generations: int
    ) -> None:
        donor_id = f"{self._generation}-{tracked.request_id}"
        if self.donors.catalog.tier(donor_id) is not None:  # an earlier request with this id left it
            donor_id = f"{uuid.uuid4().hex[:12]}-{tracked.request_id}"
        tracked.intent = self.planner.intend(donor_id, tracked, int(request.max_new_tokens), generations)
        if tracked.intent is not None:
            for observer in self._observers:
                observer.intended(donor_id, namespace, request.cache_salt)
        if self._neighbours is not None:  # last, so that the thread which it wakes does not run beside this lookup
            self._neighbours.look_up(tracked.request_id, namespace.key, tracked.prompt)


def namespace_for(
    engine: EngineSpec,
    facts: ModelFacts,
    settings: Settings,
    block_size: int,
    pool_dtype: torch.dtype | str,
    adapters: Adapters | None = None,
    scales: str | None = None,
) -> CacheNamespace:
    """Return the namespace of an engine's KV, before a request's salt and adapter are bound; `scales` as in PoolFacts.

    What the engine does not say becomes a value that matches none. Call it at the engine's start: it reads all weights
    that the digest cache does not know."""
    quantization, asked = facts.quantization, engine.quantization
    if asked is not None and asked.algorithm is not None:
        quantization = f"{quantization or 'none'}+{asked.algorithm}"
    cache, caches = DigestCache.from_setting(settings.digest_cache_path), engine.read_caches()
    adapters = adapters or Adapters(engine.lora_dirs, settings.digest_cache_path)
    model_revision, tokenizer_revision = settings.model_revision, settings.tokenizer_revision
    if model_revision is None and engine.reads_own_weights:
        with suppress(ConfigurationError):
            if (directory := snapshot(engine.model, engine.revision)) is not None:
                model_revision = content_value(weights_digest(directory, cache))
    if tokenizer_revision is None and engine.tokenizer is not None:
        tokenizer_revision = tokenizer_digest(engine.tokenizer, engine.tokenizer_revision or engine.revision)
    extra = {
        "compute_dtype": _known(engine.dtype),
        "configuration": _configuration(engine, facts, adapters),
        "tenant": settings.donor_tenant,
        "template": settings.donor_template,
    }
    rotation = facts.rotation.kinds[0]
    rope = {**facts.rope_parameters, "rotary_dim": rotation.rotary_dim, "interleaved": rotation.interleaved}
    # What layers attend to and rotate by, where they do not all attend to everything and rotate alike.
    if len(facts.groups) > 1 or facts.groups[0].window is not None:
        described = json.dumps([asdict(group) for group in facts.groups], sort_keys=True)
        rope["layer_groups"] = hashlib.sha256(described.encode()).hexdigest()
    tp, pp, cp = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.context_parallel_size
    sizes = {"tp_size": tp, "pp_size": pp, "cp_size": cp}
    return CacheNamespace(
        model=_name(engine.model),
        model_revision=model_revision or unknown_value(),
        tokenizer=unknown_value() if engine.tokenizer is None else _name(engine.tokenizer),
        tokenizer_revision=tokenizer_revision or unknown_value(),
        kv_layout="HND",
        block_size=block_size,
        kv_dtype=_known(text_of(pool_dtype)),
        cache_dtype=_known(caches.dtype) + ("" if scales is None else f"+{scales}"),
        quantization=quantization,
        adapter=settings.adapter_id,
        rope_config=rope,
        tensor_parallel={name: unknown_value() if size is None else size for name, size in sizes.items()},
        backend_cache_layout=_known(caches.layout),
        extra={name: value for name, value in extra.items() if value is not None},
    )


def _configuration(engine: EngineSpec, facts: ModelFacts, adapters: Adapters) -> str:
    """Return a digest of the model's configuration, and of quantisation and adapters at the engine's start."""
    asked = "none" if engine.quantization is None else _known(engine.quantization.options)
    parts = [facts.configuration, asked, *sorted(adapters.identities)]
    if any(map(is_unknown, parts)):
        return unknown_value()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def tokenizer_folder(engine: EngineSpec) -> Path | None:
    """Return the tokenizer's folder on this machine, None without one. Raises ConfigurationError for a bad name."""
    revision = engine.tokenizer_revision or engine.revision
    return None if engine.tokenizer is None else snapshot(engine.tokenizer, revision)


def _name(model: str | Path) -> str:
    """Return a hub id as it is, of a directory its name alone: its place may differ between replicas."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def _known(value: str | None) -> str:
    return unknown_value() if value is None else value
