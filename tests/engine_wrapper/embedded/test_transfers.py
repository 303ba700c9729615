"""A transfer has ended when the workers of all ranks have reported it."""

from __future__ import annotations

import pytest

from engine_wrapper.embedded.connector_manager import ConnectorContractError, Transfers
from engine_wrapper.embedded.request import LlmRequest
from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.ranks import Ranks
from tests.semblend_trt.rank_threads import on_ranks


def request(request_id: int) -> LlmRequest:
    return LlmRequest(request_id, [1, 2], SamplingParams(), max_new_tokens=1)


def test_a_transfer_passes_from_begun_to_handed_in_to_ended() -> None:
    saves = Transfers("saving", Ranks())
    saves.begin(request(1))
    assert (list(saves.begun), saves.ids) == ([1], {1})
    assert saves.hand_in() == [1]
    assert (list(saves.begun), saves.ids) == ([], {1})
    assert saves.ended([]) == []
    assert [each.request_id for each in saves.ended([1])] == [1]
    assert not saves.ids


@pytest.mark.parametrize("reported", [[2], [1, 1]])
def test_only_what_was_handed_in_may_be_reported_and_once(reported: list[int]) -> None:
    saves = Transfers("saving", Ranks())
    saves.begin(request(1))
    saves.hand_in()
    with pytest.raises(ConnectorContractError, match="finished_id_handed_in"):
        saves.ended(reported)


def test_all_ranks_must_have_reported_a_request() -> None:
    reports = [([1], [2], []), ([1, 2], [], [3])]  # by rank, one call after another

    def work(ranks: Ranks) -> list[list[int]]:
        loads = Transfers("loading", ranks)
        for request_id in (1, 2, 3):
            loads.begin(request(request_id))
        loads.hand_in()
        ended = [[each.request_id for each in loads.ended(now)] for now in reports[ranks.rank]]
        assert loads.ids == {3}
        return ended

    assert on_ranks(2, work) == [[[1], [2], []]] * 2
