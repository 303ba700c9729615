"""A layer is waited for once, no later than it is needed and no sooner than its group arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.layer_readiness import LayerReadiness


class RecordingStream:
    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


def expecting(*ends):
    readiness = LayerReadiness()
    readiness.expect((end, f"below {end}") for end in ends)
    return readiness


def test_each_layer_waits_for_its_own_group_only():
    readiness, stream = expecting(3, 5, 6), RecordingStream()
    waited = []
    for layer in range(6):
        readiness.wait(layer, stream)
        waited.append(len(stream.waited))
    assert waited == [1, 1, 1, 2, 2, 3]
    assert stream.waited == ["below 3", "below 5", "below 6"]
    assert not readiness.is_arriving


def test_a_layer_further_up_waits_for_all_below():
    readiness, stream = expecting(2, 4, 6), RecordingStream()
    readiness.wait(3, stream)
    assert stream.waited == ["below 2", "below 4"]
    assert readiness.is_arriving


def test_join_waits_for_what_is_left_and_a_second_load_starts_anew():
    readiness, stream = expecting(2, 4), RecordingStream()
    readiness.wait(0, stream)
    readiness.join(stream)
    assert stream.waited == ["below 2", "below 4"]
    readiness.expect([(1, "again")])
    readiness.wait(0, stream)
    assert stream.waited[-1] == "again"


def test_on_the_cpu_nothing_is_ever_on_its_way():
    readiness = LayerReadiness()
    readiness.expect([(2, None), (4, None)])
    assert not readiness.is_arriving
    readiness.wait(0, None)
    readiness.join(None)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True).map(sorted), st.data())
def test_whoever_has_waited_for_a_layer_has_waited_for_its_group(ends, data):
    readiness, stream = expecting(*ends), RecordingStream()
    for layer in data.draw(st.lists(st.integers(0, ends[-1] - 1), max_size=10)):
        readiness.wait(layer, stream)
        assert f"below {next(end for end in ends if end > layer)}" in stream.waited
    readiness.join(stream)
    assert stream.waited == [f"below {end}" for end in ends]


@pytest.mark.parametrize("layer", [0, 7])
def test_waiting_with_nothing_expected_waits_for_nothing(layer):
    stream = RecordingStream()
    LayerReadiness().wait(layer, stream)
    assert stream.waited == []
