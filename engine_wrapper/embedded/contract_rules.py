"""Rules of the contract that a connector can break, each with its short name."""

from __future__ import annotations

from typing import Any

from semblend_trt.connector.contract import KvCacheConnectorScheduler
from semblend_trt.connector.contract_versions import GROUPED_SCHEDULER_METHODS
from semblend_trt.errors import SemBlendError


class ConnectorContractError(SemBlendError, RuntimeError):
    """The connector broke `rule`, the contract's short name for it. The engine cannot go on."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"connector contract, {rule}: {message}")
        self.rule = rule


def check_grouped_methods(scheduler: Any, num_groups: int) -> None:
    """Refuses a scheduler that takes flat block ids only where there are several layer groups, which have none."""
    if num_groups < 2:
        return
    flat = [
        name
        for name in sorted(GROUPED_SCHEDULER_METHODS)
        if getattr(type(scheduler), name, None) is getattr(KvCacheConnectorScheduler, name, None)
    ]
    if flat:
        raise ConnectorContractError(
            "grouped_methods",
            f"the cache has {num_groups} layer groups, and the scheduler must implement {' and '.join(flat)}",
        )


def matched_pair(request_id: int, answer: Any) -> tuple[int, bool]:
    """The answer to the query, checked for its form."""
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise ConnectorContractError(
            "matched_is_pair", f"request {request_id} was answered with {answer!r}; (tokens, asynchronous) is needed"
        )
    matched, asynchronous = answer
    if isinstance(matched, bool) or not isinstance(matched, int) or not isinstance(asynchronous, bool):
        raise ConnectorContractError(
            "matched_is_pair", f"request {request_id} was answered with {answer!r}; (int, bool) is needed"
        )
    return matched, asynchronous
