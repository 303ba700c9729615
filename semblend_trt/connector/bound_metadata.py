"""The metadata that a worker was bound to, read with care: its sender may be of another version."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING

from semblend_trt.connector.metadata import RequestProgress, SaveIntent, SemBlendConnectorMetadata
from semblend_trt.plan import SemanticKvPlan

if TYPE_CHECKING:
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)

_EMPTY = SemBlendConnectorMetadata()
_ITEMS = {"plans": SemanticKvPlan, "intents": SaveIntent, "progress": RequestProgress, "forgotten": int}


def readable_metadata(bound: object, runtime: Runtime) -> SemBlendConnectorMetadata | None:
    """`bound` as metadata of this version; None when it is none at all.

    Fields that are missing or of another form are left out, so that what was promised is still loaded. That is counted
    as `metadata`, and nothing more is reused from then on: ranks of two versions would decide differently.
    """
    if bound is None:
        return None
    if not isinstance(bound, SemBlendConnectorMetadata):
        _refuse(runtime, f"metadata is a {type(bound).__name__}")
        return None
    wrong = [each.name for each in fields(bound) if not _fits(bound, each.name)]
    if not wrong:
        return bound
    _refuse(runtime, f"metadata has no readable {', '.join(wrong)}")
    return SemBlendConnectorMetadata(**{f.name: getattr(bound, f.name) for f in fields(bound) if f.name not in wrong})


def _fits(bound: SemBlendConnectorMetadata, name: str) -> bool:
    value = getattr(bound, name, None)
    if not isinstance(value, type(getattr(_EMPTY, name))):
        return False
    item = _ITEMS.get(name)
    return item is None or all(isinstance(each, item) for each in value)


def _refuse(runtime: Runtime, what: str) -> None:
    logger.error("KV reuse is off from now on: the bound %s; use one version of the connector on every rank", what)
    runtime.faults["metadata"] += 1
    runtime.refusal = runtime.refusal or "metadata_version"
