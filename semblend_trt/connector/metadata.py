"""What the scheduler tells every rank each iteration. Picklable; the worker takes no decision of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semblend_trt.donors.placement import Tier

if TYPE_CHECKING:
    from semblend_trt.plan import SemanticKvPlan


@dataclass(frozen=True, slots=True)
class SaveIntent:
    """Should the request finish, its leading `max_tokens` written tokens may be kept as donor `donor_id` in `tier`."""

    request_id: int
    donor_id: str
    max_tokens: int
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """Blocks that the request gained, and the tokens whose KV is written once this iteration's forward is done."""

    request_id: int
    new_block_ids: tuple[int, ...]
    written_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class SemBlendConnectorMetadata:
    """Plans to load, requests to follow, donors to keep, to drop and then to move down, requests to forget.

    An empty one does nothing. Room that an intent counts on is made by drops and demotions of the same metadata or an
    earlier one.
    """

    plans: tuple[SemanticKvPlan, ...] = ()
    intents: tuple[SaveIntent, ...] = ()
    progress: tuple[RequestProgress, ...] = ()
    drops: tuple[str, ...] = ()
    forgotten: tuple[int, ...] = ()
    demotions: tuple[str, ...] = ()
