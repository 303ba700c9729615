"""Tokens between their sampling and their handling: the overlap scheduler handles them one iteration late."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from engine_wrapper.embedded.decoding import BatchLogits, finish_reason, next_token
from engine_wrapper.embedded.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
    from engine_wrapper.embedded.request import LlmRequest
    from engine_wrapper.embedded.sampling import SamplingParams

logger = logging.getLogger(__name__)


class Finish(Protocol):
    """Ends a running request."""

    def __call__(self, request: LlmRequest, reason: str, *, publish: bool) -> None: ...


class TokenResults:
    """Samples tokens and hands them to their requests when `take` is called; `finish` ends requests."""

    def __init__(
        self, eos_token_ids: Collection[int], connector: KvCacheConnectorManager | None, finish: Finish
    ) -> None:
        self._sampler = Sampler()
        self._eos_token_ids = eos_token_ids
        self._connector = connector
        self._finish = finish
        self._unread: list[LlmRequest] = []

    def __len__(self) -> int:
        """Requests whose newest token is not handled."""
        return len(self._unread)

    def generator(self, params: SamplingParams) -> torch.Generator | None:
        """The random numbers of one request; None where it needs none."""
        return self._sampler.generator(params)

    def sample(self, request: LlmRequest, logits: BatchLogits, row: int) -> None:
        """Chooses the request's next token from its row of `logits`. A request for which that fails ends."""
        try:
            request.pending_token = next_token(request, logits, row, self._sampler)
        except Exception as error:
            logger.exception("request %d failed", request.request_id)
            request.error = f"request {request.request_id} failed while its next token was chosen: {error}"
            self._finish(request, "error", publish=False)
            return
        self._unread.append(request)

    def take(self) -> None:
        """Handles the tokens sampled since the last call."""
        unread, self._unread = self._unread, []
        for request in unread:
            self.accept(request)

    def accept(self, request: LlmRequest) -> None:
        """Handles the request's newest token, if there is one; that may end the request."""
        token = request.pending_token
        if token is None or request.is_finished:
            return
        request.pending_token = None
        request.add_new_token(token)
        if request.first_token_time is None:
            request.first_token_time = perf_counter()
            if self._connector is not None:
                request.reuse_report = self._connector.reuse_of(request.request_id)
        reason = finish_reason(request, token, self._eos_token_ids)
        if reason is not None:
            self._finish(request, reason, publish=True)

    def clear(self) -> None:
        self._unread.clear()
