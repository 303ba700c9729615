"""What the scheduler tells every rank in each iteration. Picklable; workers only obey it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, cast

from semblend_trt import __version__
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.offload import OffloadCommands
from semblend_trt.errors import DonorUnavailableError
from semblend_trt.plan import are_counts

if TYPE_CHECKING:
    from semblend_trt.plan import SemanticKvPlan
    from semblend_trt.runtime import Runtime

logger = logging.getLogger(__name__)


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
    `version` is the sender's. Plans belong to the weights after `weights_changes` changes.
    """

    plans: tuple[SemanticKvPlan, ...] = ()
    followed: tuple[int, ...] = ()
    progress: tuple[RequestProgress, ...] = ()
    forgotten: tuple[int, ...] = ()
    commands: OffloadCommands = field(default_factory=OffloadCommands)
    grown: tuple[int, ...] = ()
    weights_changes: int = 0
    version: str = __version__


def readable_metadata(bound: object, runtime: Runtime) -> SemBlendConnectorMetadata | None:
    """`bound` as metadata; None when nothing of this version is bound.

    Metadata of another version, or with values that no scheduler sends, counts as the fault `metadata`, and nothing
    more is reused: ranks of two versions would decide differently. Raises DonorUnavailableError when it holds plans: no
    rank would place the tokens that the engine skips.
    """
    if bound is None or (wrong := _wrong_in(bound)) is None:
        return cast("SemBlendConnectorMetadata | None", bound)
    logger.error(
        "KV reuse is off from now on: the bound metadata is not that of a scheduler of version %s (%s); use one on "
        "every rank",
        __version__,
        wrong,
    )
    runtime.faults["metadata"] += 1
    runtime.refusal = runtime.refusal or "metadata_version"
    if getattr(bound, "plans", ()):
        raise DonorUnavailableError("this iteration's plans are of another version; use one version of the connector")
    return None


def _wrong_in(metadata: object) -> str | None:
    """What of metadata that came as bytes is no value of its field; None where all is right. The engine's ids may be
    negative."""
    if not isinstance(metadata, SemBlendConnectorMetadata) or getattr(metadata, "version", "") != __version__:
        return f"a {type(metadata).__name__} of version {getattr(metadata, 'version', 'unknown')}"
    try:
        progress, commands, intents = metadata.progress, metadata.commands, metadata.commands.saves
        for plan in metadata.plans:
            plan.check()
        ids = [*metadata.followed, *metadata.forgotten, *metadata.grown, *(each.request_id for each in intents)]
        ids += chain.from_iterable((each.request_id, *each.new_block_ids) for each in progress)
        counts = [*(each.written_tokens for each in progress), *(each.max_tokens for each in intents)]
        counts += [metadata.weights_changes, *(each.generation for each in intents)]
        names = [*commands.drops, *commands.offloads, *commands.releases, *commands.writes, *commands.fetches]
        names += [*commands.promotions, *(each.donor_id for each in intents)]
        names += [Tier(each.tier).value for each in intents]
        if not are_counts(counts) or set(map(type, ids)) - {int} or set(map(type, names)) - {str}:
            return "a number is none or negative, or a name no text"
    except Exception as error:
        return str(error) or type(error).__name__
    return None
