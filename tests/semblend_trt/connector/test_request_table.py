"""The scheduler's memory of requests is bounded, and what falls out is handed back to be settled."""

from types import SimpleNamespace

import numpy as np
import pytest

from semblend_trt.connector.request_table import MAX_SILENT_ITERATIONS, RequestTable, TrackedRequest


def tracked(request_id):
    return TrackedRequest(request_id, "namespace", np.arange(4, dtype=np.int32), 0)


@pytest.mark.known_defect(19)
def test_oldest_request_makes_room():
    table = RequestTable(limit=2)
    assert table.add(tracked(1)) == []
    assert table.add(tracked(2)) == []
    assert [request.request_id for request in table.add(tracked(3))] == [1]
    assert table.get(1) is None
    assert len(table) == 2


def test_adding_again_keeps_one_entry():
    table = RequestTable(limit=2)
    table.add(tracked(1))
    table.add(tracked(1))
    assert len(table) == 1
    assert table.pop(1).request_id == 1
    assert table.pop(1) is None


def promised(request_id):
    request = tracked(request_id)
    request.plan = SimpleNamespace(matched_tokens=2)
    return request


def ids(requests):
    return [request.request_id for request in requests]


def test_a_request_that_is_silent_is_given_up():
    table = RequestTable()
    for request in (tracked(1), tracked(2)):
        table.add(request)
    for _ in range(MAX_SILENT_ITERATIONS):
        assert table.begin_iteration() == []
        table.scheduled(2)
    assert ids(table.begin_iteration()) == [1]
    assert (table.get(1), len(table)) == (None, 1)


def test_what_was_promised_and_not_loaded_is_never_given_up():
    """The engine would skip the tokens, and nobody would place them."""
    table = RequestTable(limit=2)
    for request in (promised(1), promised(2), tracked(3)):
        given_up = table.add(request)
    assert ids(given_up) == [3]
    for _ in range(2 * MAX_SILENT_ITERATIONS):
        assert table.begin_iteration() == []
    table.scheduled(1, loads=True)
    for _ in range(MAX_SILENT_ITERATIONS):
        assert table.begin_iteration() == []
    assert ids(table.begin_iteration()) == [1]
    assert len(table) == 1


def test_a_failed_forward_ends_the_requests_that_were_in_it():
    table = RequestTable()
    for request in (tracked(1), tracked(2)):
        table.add(request)
    table.begin_iteration()
    table.scheduled(1)
    table.scheduled(2)
    table.begin_iteration()
    table.scheduled(1)
    table.add(promised(3))  # asked about behind the failure
    ended = table.begin_iteration(last_failed=True)
    assert [(request.request_id, request.forward_failed) for request in ended] == [(1, True)]
    assert [table.get(each) is None for each in (1, 2, 3)] == [True, False, False]


def test_whose_blocks_are_anothers_now_has_ended():
    table = RequestTable()
    first, second, third = tracked(1), tracked(2), tracked(3)
    for request, blocks in ((first, [5, 6, 7]), (second, [5, 8])):
        table.add(request)
        table.holds(request, blocks)
    table.add(third)
    assert table.displaced([9], third) == []
    assert table.displaced([6, 7, -1], third) == [first]
    table.holds(third, [6, 7])
    assert table.displaced([6, 7], third) == []
    table.pop(2)
    assert table.displaced([5, 8], third) == []  # it has ended, and was told of
    assert ids([table.get(3)]) == [3]
