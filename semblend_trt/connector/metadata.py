"""What the scheduler tells every rank each iteration. Picklable; the worker takes no decision of its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from semblend_trt import __version__
from semblend_trt.donors.donor_table import Tier
from semblend_trt.donors.offload import OffloadCommands
from semblend_trt.errors import DonorUnavailableError

if TYPE_CHECKING:
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveIntent:
    """Should the request finish, its leading `max_tokens` written tokens may be kept as donor `donor_id` in `tier`.

    `is_written`: from there it goes on to disk.
    """

    request_id: int
    donor_id: str
    max_tokens: int
    tier: Tier = Tier.HOST
    is_written: bool = False


class RequestProgress(NamedTuple):
    """Blocks that the request gained, and the tokens whose KV is written once this iteration's forward is done.

    There may be many in an iteration: Python would pickle a dataclass many times slower.
    """

    request_id: int
    new_block_ids: tuple[int, ...]
    written_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class SemBlendConnectorMetadata:
    """Plans to load, requests to follow, donors to keep, what the tiers have to do, requests to forget.

    An empty one does nothing. Room that an intent counts on is made by commands of the same metadata or an earlier one.
    `grown` are requests that gained one token and no block: in most iterations, all that may become donors.
    `version` is the sender's.
    """

    plans: tuple[SemanticKvPlan, ...] = ()
    intents: tuple[SaveIntent, ...] = ()
    progress: tuple[RequestProgress, ...] = ()
    forgotten: tuple[int, ...] = ()
    commands: OffloadCommands = field(default_factory=OffloadCommands)
    grown: tuple[int, ...] = ()
    version: str = __version__


def readable_metadata(bound: object, runtime: Runtime) -> SemBlendConnectorMetadata | None:
    """`bound` as metadata; None when nothing is bound, or nothing of this version.

    The latter is counted as `metadata`, and nothing more is reused from then on: ranks of two versions would decide
    differently. Raises DonorUnavailableError when it holds plans: the engine skips tokens that are placed by no rank.
    """
    if bound is None or (isinstance(bound, SemBlendConnectorMetadata) and getattr(bound, "version", "") == __version__):
        return bound
    logger.error(
        "KV reuse is off from now on: the bound metadata is a %s of version %s, this connector is %s; use one version "
        "on every rank",
        type(bound).__name__,
        getattr(bound, "version", "unknown"),
        __version__,
    )
    runtime.faults["metadata"] += 1
    runtime.refusal = runtime.refusal or "metadata_version"
    if getattr(bound, "plans", ()):
        raise DonorUnavailableError("this iteration's plans are of another version; use one version of the connector")
    return None
