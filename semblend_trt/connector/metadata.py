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
    """If the request finishes, its first `max_tokens` written tokens may be kept as donor `donor_id`; its prompt is
    `prompt_tokens` of them. `generation` is above 0 where these tokens' KV will be built from approximate KV.

    To the workers it goes once the request has ended: then there is room for all of its tokens in `tier`, and with
    `is_written` the donor gets a file on disk as well.
    """

    request_id: int
    donor_id: str
    max_tokens: int
    tier: Tier = Tier.HOST
    is_written: bool = False
    generation: int = 0
    prompt_tokens: int = 0


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
    """Plans to load, requests to follow since they may become donors, commands for the tiers, requests to forget.

    An empty one does nothing. `grown` are requests that gained one token and no block, as most do in most iterations.
    `version` is the sender's.
    """

    plans: tuple[SemanticKvPlan, ...] = ()
    followed: tuple[int, ...] = ()
    progress: tuple[RequestProgress, ...] = ()
    forgotten: tuple[int, ...] = ()
    commands: OffloadCommands = field(default_factory=OffloadCommands)
    grown: tuple[int, ...] = ()
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
