"""What the scheduler tells every rank each iteration. Picklable; the worker takes no decision of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from semblend_trt.connector.tier_orders import TierOrders
from semblend_trt.donors.placement import Tier

if TYPE_CHECKING:
    from semblend_trt.plan import SemanticKvPlan


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

    An empty one does nothing. Room that an intent counts on is made by orders of the same metadata or an earlier one.
    `grown` are requests that gained one token and no block: in most iterations, all that may become donors.
    `form` is `bound_metadata.FORM` of the version that wrote it; without it a worker reads every field with care.
    """

    plans: tuple[SemanticKvPlan, ...] = ()
    intents: tuple[SaveIntent, ...] = ()
    progress: tuple[RequestProgress, ...] = ()
    forgotten: tuple[int, ...] = ()
    orders: TierOrders = field(default_factory=TierOrders)
    grown: tuple[int, ...] = ()
    form: str = ""
