"""The scheduler's memory of requests is bounded, and what falls out is handed back to be settled."""

import numpy as np
import pytest

from semblend_trt.connector.request_table import RequestTable, TrackedRequest


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
