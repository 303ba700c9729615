"""Whether the reuse profile that SEMBLEND_PROFILE names holds for a request, and what differs where it does not."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import EngineMode
from semblend_trt.policy import CACHEBLEND_LAYER, ReusePolicy
from semblend_trt.reuse_profile import ReuseProfile

if TYPE_CHECKING:
    from kernels.layout import KvGeometry
    from semblend_trt.config import Settings
    from semblend_trt.namespace import CacheNamespace

logger = logging.getLogger(__name__)

# Requests differ from their engine by adapter only; more adapters than this are compared anew each time, unlogged.
_MAX_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class ProfileMatch:
    """`profile` holds for the namespace; where it is None `refusal` counts why, and `differences` says it.

    Refusals: no_profile (SEMBLEND_PROFILE is not set), profile_unreadable, profile_mismatch.
    """

    profile: ReuseProfile | None
    refusal: str = "no_profile"
    differences: tuple[str, ...] = ()


class ProfileMatcher:
    """Compares the profile with namespaces. The file is read once, here; nothing is raised for it.

    Policies other than verified use no profile.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = settings.profile_path
        self._profile: ReuseProfile | None = None
        self._problem: str | None = None
        self._matches: dict[str | None, ProfileMatch] = {}
        self._told: dict[str | None, EngineMode] = {}
        self._policy = settings.policy
        self._is_used = settings.enabled and settings.policy is ReusePolicy.VERIFIED
        if self._path is None:
            return
        if not self._is_used:
            logger.warning("SEMBLEND_PROFILE is set, but policy %s uses no profile", settings.policy.value)
            return
        try:
            self._profile = ReuseProfile.read(self._path)
        except ConfigurationError as error:
            self._problem = str(error)

    @property
    def check_layers(self) -> tuple[int, ...]:
        """Layers in which plans of these settings may check their spans, whether the profile will hold or not."""
        if self._policy is ReusePolicy.CACHEBLEND:
            return (CACHEBLEND_LAYER,)
        terms = None if self._profile is None else self._profile.terms
        return () if terms is None or terms.check is None else (terms.check.layer,)

    def match(self, namespace: CacheNamespace, geometry: KvGeometry, mode: EngineMode) -> ProfileMatch:
        """What holds for `namespace`. What it means is logged once an adapter, and again when the engine's `mode`
        changes: a wrapper begins to execute plans after its self-check."""
        match = self._matches.get(namespace.adapter) or self._compare(namespace, geometry)
        if namespace.adapter in self._matches or len(self._matches) < _MAX_REMEMBERED:
            self._matches[namespace.adapter] = match
            if self._is_used and self._told.get(namespace.adapter) is not mode:
                self._told[namespace.adapter] = mode
                self._tell(match, mode)
        return match

    def _compare(self, namespace: CacheNamespace, geometry: KvGeometry) -> ProfileMatch:
        if self._problem is not None:
            return ProfileMatch(None, "profile_unreadable", (self._problem,))
        if self._profile is None:
            return ProfileMatch(None)
        differences = self._profile.differences(namespace, geometry)
        if differences:
            return ProfileMatch(None, "profile_mismatch", tuple(differences))
        return ProfileMatch(self._profile)

    def _tell(self, match: ProfileMatch, mode: EngineMode) -> None:
        if mode is EngineMode.STOCK:
            logger.warning(
                "only identical text from position 0 is reused: any other has to be checked, and that needs the "
                "wrapper on this engine, with its self-check passed"
            )
        elif match.profile is not None:
            logger.info("reuse profile %s holds: policy %s", self._path, match.profile.policy)
        elif match.differences:
            logger.error(
                "only identical text from position 0 is reused, reuse profile %s does not hold: %s",
                self._path,
                " ".join(match.differences),
            )
        else:
            logger.warning(
                "only identical text from position 0 is reused: no reuse profile is set; make one with "
                "`python -m validation calibrate --model ...` and name it in SEMBLEND_PROFILE"
            )
