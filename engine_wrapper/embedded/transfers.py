"""Transfers: requests that a connector loads or saves beside the iterations, until every rank's worker is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_wrapper.embedded.contract_rules import ConnectorContractError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_wrapper.embedded.request import LlmRequest
    from semblend_trt.ranks import Ranks


class Transfers:
    """Transfers of one kind, named by `what` in errors. `begun` are those that no worker has been told of, by request
    id. They are the same on all `ranks`, so that none waits in vain."""

    def __init__(self, what: str, ranks: Ranks) -> None:
        self.begun: dict[int, LlmRequest] = {}
        self._what, self._ranks = what, ranks
        self._handed_in: dict[int, LlmRequest] = {}
        # Done here, and not yet on another rank.
        self._done_here: dict[int, LlmRequest] = {}

    @property
    def ids(self) -> set[int]:
        """Requests whose transfer has not ended."""
        return {*self.begun, *self._handed_in, *self._done_here}

    def begin(self, request: LlmRequest) -> None:
        self.begun[request.request_id] = request

    def hand_in(self) -> list[int]:
        """The ids that the worker is told of now."""
        handed_in = list(self.begun)
        self._handed_in.update(self.begun)
        self.begun.clear()
        return handed_in

    def ended(self, reported: Iterable[int]) -> list[LlmRequest]:
        """Takes the ids that this rank's worker reports; returns the requests that all ranks' have.

        Only ids that were handed in may be named, and once; raises ConnectorContractError.
        """
        for request_id in reported:
            request = self._handed_in.pop(request_id, None)
            if request is None:
                raise ConnectorContractError(
                    "finished_id_handed_in",
                    f"get_finished reported request {request_id} as done {self._what}, but it was never handed in for "
                    "that or has been reported before",
                )
            self._done_here[request_id] = request
        if not self._handed_in and not self._done_here:
            return []  # on every rank alike: nothing has to be said
        everywhere = set.intersection(*self._ranks.gather(set(self._done_here)))
        return [self._done_here.pop(request_id) for request_id in list(self._done_here) if request_id in everywhere]
