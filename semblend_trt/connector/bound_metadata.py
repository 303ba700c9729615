"""The metadata that a worker was bound to, read with care: its sender may be of another version."""

from __future__ import annotations

import hashlib
import logging
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.metadata import RequestProgress, SaveIntent, SemBlendConnectorMetadata
from semblend_trt.connector.tier_orders import TierOrders
from semblend_trt.donors.placement import Tier
from semblend_trt.errors import DonorUnavailableError
from semblend_trt.plan import (
    AttentionMode,
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    PublicationPolicy,
    SemanticKvPlan,
    SpanCheck,
)
from semblend_trt.token_ids import TokenIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

_MISSING = object()
# What the fields of each class hold, in their order; a list stands for a tuple of such values.
_FORMS: dict[Any, tuple[Any, ...]] = {
    SemBlendConnectorMetadata: ([SemanticKvPlan], [SaveIntent], [RequestProgress], [int], TierOrders, [int], str),
    SaveIntent: (int, str, int, Tier, bool),
    RequestProgress: (int, [int], int, bool),
    TierOrders: ([str], [str], [str], [str], [str], [str]),
    SemanticKvPlan: (
        *(int, str, PlanKind, PublicationPolicy, [PlanSpan], TokenIds, int, int, int),
        *(EngineExecution, (tuple, NoneType), dict),
    ),
    PlanSpan: (str, int, int, int, bool),
    EngineExecution: (EngineMode, AttentionMode, int, int, int, (SpanCheck, NoneType), int),
}
# What this version's metadata looks like. That it looks so is read off it in every iteration at no cost.
FORM = hashlib.blake2b(
    repr([(kind, kind.__match_args__, form) for kind, form in _FORMS.items()]).encode(), digest_size=8
).hexdigest()


def readable_metadata(bound: object, runtime: Runtime) -> SemBlendConnectorMetadata | None:
    """`bound` as metadata of this version; None when it is none at all.

    Fields that are missing or of another form are left out, so that what was promised is still loaded. That is counted
    as `metadata`, and nothing more is reused from then on: ranks of two versions would decide differently. Raises
    DonorUnavailableError where the plans are of another form: the engine skips tokens that nobody can place.
    """
    if bound is None:
        return None
    if not isinstance(bound, SemBlendConnectorMetadata):
        _refuse(runtime, f"metadata is a {type(bound).__name__}")
        return None
    if getattr(bound, "form", None) == FORM:
        return bound
    names = bound.__match_args__
    given: dict[str, object] = {name: getattr(bound, name, _MISSING) for name in names}
    forms = zip(names, _FORMS[SemBlendConnectorMetadata], strict=True)
    held: dict[str, Any] = {name: given[name] for name, form in forms if _are((given[name],), form)}
    if len(held) == len(names):
        return bound
    _refuse(runtime, f"metadata has no readable {', '.join(name for name in names if name not in held)}")
    if "plans" not in held and given["plans"] is not _MISSING:
        raise DonorUnavailableError("this iteration's plans cannot be read; use one version of the connector")
    return SemBlendConnectorMetadata(**held)


def _are(values: Sequence[object], form: Any) -> bool:
    """Whether each of `values`, with all that it holds, is of the form; told field by field, for there may be many."""
    kind = tuple if isinstance(form, list) else form
    if not all(issubclass(each, kind) for each in set(map(type, values))):
        return False
    if isinstance(form, list):
        inner: Any = chain.from_iterable(values)  # type: ignore[arg-type]
        return _are(tuple(inner), form[0])
    if not values or form not in _FORMS:
        return True
    try:
        columns = list(zip(*map(attrgetter(*form.__match_args__), values), strict=True))
    except AttributeError:
        return False
    return all(map(_are, columns, _FORMS[form]))


def _refuse(runtime: Runtime, what: str) -> None:
    logger.error("KV reuse is off from now on: the bound %s; use one version of the connector on every rank", what)
    runtime.faults["metadata"] += 1
    runtime.refusal = runtime.refusal or "metadata_version"
