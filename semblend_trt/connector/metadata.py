"""What the scheduler tells every rank in each iteration. Picklable; workers only obey it."""

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
    """If the request finishes, its first `max_tokens` written tokens may be kept as donor `donor_id` in `tier`.

    With `is_written` the donor then gets a file on disk as well. `generation` is above 0 where these tokens' KV will be
    built from approximate KV.
    """

    request_id: int
    donor_id: str
    max_tokens: int
    tier: Tier = Tier.HOST
    is_written: bool = False
    generation: int = 0


class RequestProgress(NamedTuple):
    """The blocks that the request gained, and its tokens whose KV is written once this iteration's forward is done.

    A tuple, because there may be many in an iteration, and Python pickles a dataclass many times slower.
    """

    request_id: int
    new_block_ids: tuple[int, ...]
    written_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class SemBlendConnectorMetadata:
    """Plans to load, requests to follow, donors to keep, commands for the tiers, requests to forget.

    An empty one does nothing. Room for an intent is made by commands of the same metadata or an earlier one. `grown`
    are requests that gained one token and no block, as most do in most iterations. `version` is the sender's.
    Plans and intents belong to the weights after `weights_changes` changes.
    """

    plans: tuple[SemanticKvPlan, ...] = ()
    intents: tuple[SaveIntent, ...] = ()
    progress: tuple[RequestProgress, ...] = ()
    forgotten: tuple[int, ...] = ()
    commands: OffloadCommands = field(default_factory=OffloadCommands)
    grown: tuple[int, ...] = ()
    weights_changes: int = 0
    version: str = __version__


def readable_metadata(bound: object, runtime: Runtime) -> SemBlendConnectorMetadata | None:
    """`bound` as metadata; None when nothing of this version is bound.

    Metadata of another version counts as the fault `metadata`, and nothing more is reused: ranks of two versions would
    decide differently. Raises DonorUnavailableError when it holds plans: no rank would place the tokens that the engine
    skips.
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
