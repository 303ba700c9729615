"""How running requests end: what is published, what the connector is told, and when their blocks are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_wrapper.embedded.request import LlmRequestState
from semblend_trt.connector.contract_versions import contract_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine_wrapper.embedded.block_manager import BlockManager
    from engine_wrapper.embedded.connector_manager import KvCacheConnectorManager
    from engine_wrapper.embedded.llm_args import LlmArgs
    from engine_wrapper.embedded.request import LlmRequest


class RequestEnds:
    """Ends the requests of `active` as the contract's version does, and lets go of what the connector has saved.

    A request that is saved keeps its blocks until the save has ended, or only what the reuse tree has of them: which,
    the version says. `prompts_only`: generated tokens are not published (V2).
    """

    def __init__(
        self,
        llm_args: LlmArgs,
        active: dict[int, LlmRequest],
        blocks: BlockManager,
        connector: KvCacheConnectorManager | None,
        *,
        prompts_only: bool,
    ) -> None:
        self._version = contract_version(llm_args.contract)
        self._pins_saved = self._version.pins_with_transceiver or llm_args.cache_transceiver_config is None
        self._active, self._blocks, self._connector = active, blocks, connector
        self._prompts_only = prompts_only

    def finish(self, request: LlmRequest, reason: str, *, publish: bool) -> None:
        """Ends a running request: with `publish` its blocks are offered for reuse; then they are freed or saved."""
        request_id = request.request_id
        request.finish_reason = reason
        del self._active[request_id]
        if publish:
            written = request.num_written_tokens
            end = min(written, request.prompt_len) if self._prompts_only else written
            self._blocks.publish(request_id, request.tokens(0, end))
        if not self._tell(request, reason):
            self._blocks.release(request_id)
            complete(request, reason)
            return
        request.state = LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        if self._version.holds_saved_blocks:
            self._blocks.stop_growing(request_id)
        elif self._pins_saved:
            self._blocks.pin(request_id)
        else:
            self._blocks.release(request_id)

    def cut_short(self, request: LlmRequest, reason: str) -> None:
        """Ends a running request before its time; one whose load is under way, as soon as the connector reports it,
        where the version waits for that."""
        connector = self._connector
        if connector is not None and self._version.defers_cancel and connector.is_loading(request.request_id):
            request.finish_reason = reason
        else:
            self.finish(request, reason, publish=False)

    def fail_running(self, error: Exception) -> None:
        """Ends all running requests because of an error in their forward; those that wait are left alone."""
        for request in list(self._active.values()):
            if not request.is_finished:
                request.error = f"request {request.request_id} ran in a forward that failed: {error}"
                self.cut_short(request, "error")

    def poll_transfers(self) -> None:
        """Asks the connector which transfers have ended, and lets go of what they held."""
        if self._connector is None:
            return
        saved, loaded = self._connector.get_finished()
        self._let_go(saved)
        for request in loaded:
            if request.finish_reason is not None and request.request_id in self._active:
                self.finish(request, request.finish_reason, publish=False)

    def _tell(self, request: LlmRequest, reason: str) -> bool:
        """Tells the connector that the request has ended; True when it saves from the request's blocks."""
        if self._connector is None:
            return False
        is_whole = reason in ("length", "stop")
        tell = self._connector.request_finished if is_whole else self._connector.request_cut_short
        return tell(request, self._blocks.block_ids(request.request_id))

    def _let_go(self, saved: Iterable[LlmRequest]) -> None:
        for index, request in enumerate(saved):
            if self._version.holds_saved_blocks:
                self._blocks.release(request.request_id)
            elif index == 0 or self._version.unpins_every_save:
                self._blocks.unpin(request.request_id)
            request.state = LlmRequestState.GENERATION_COMPLETE


def complete(request: LlmRequest, reason: str) -> None:
    """Marks a request that holds nothing any more as ended."""
    request.finish_reason = reason
    request.state = LlmRequestState.GENERATION_COMPLETE
