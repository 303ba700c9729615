"""What an engine measures of plans and cold prompts at its start, and that reuse which does not pay is left out."""

from dataclasses import replace

import pytest
import torch

from engine_wrapper import timing
from engine_wrapper.timing import measured, tokens_of
from kernels.layout import KvGeometry, PagedKv
from kernels.rope import still
from semblend_trt.cost import LoadCost
from semblend_trt.ranks import Ranks
from tests.engine_wrapper.serving import DONOR, SHIFTED, serve, teach


class Clock:
    """Each row of a layer takes a second, and each forward a hundred; loads take none."""

    def __init__(self, monkeypatch):
        self.now, self.ran = 0.0, []
        monkeypatch.setattr(timing, "seconds_of", self.seconds_of)

    def seconds_of(self, call, _):
        begin = self.now
        call()
        return self.now - begin or 1e-9

    def run(self, begin, end, plan):
        rows = end - begin if plan is None else end - sum(span.length for span in plan.spans)
        self.ran.append((begin, end, plan))
        self.now += 100 + rows


def measure(run, longest=300, max_rows=None, samples=True):
    geometry = KvGeometry(1, 2, 16, 8)
    kv = PagedKv(torch.zeros(4, 1, 2, geometry.row_elements), torch.arange(4), geometry)
    return measured(run, [1, 2, 3], kv, still(16), Ranks(), max_rows, longest, samples=samples)


def test_prices_are_those_of_the_forwards_that_ran(monkeypatch):
    clock = Clock(monkeypatch)
    found = measure(clock.run, samples=False)
    assert found.cold_prices == pytest.approx((100, 1, 0), abs=1e-6)
    assert found.cold(1000) == pytest.approx(1100)
    assert found.load == LoadCost(1e-9, 0.0, 0.0)


@pytest.mark.parametrize(("longest", "max_rows", "last"), [(300, None, 256), (300, 100, 96), (20, None, 20)])
def test_no_prompt_is_longer_than_the_engine_takes(monkeypatch, longest, max_rows, last):
    clock = Clock(monkeypatch)
    measure(clock.run, longest, max_rows)
    assert max(end for _, end, _ in clock.ran) == last


def test_what_fails_is_not_measured(caplog):
    def fails(*_):
        raise RuntimeError("no forward")

    assert measure(fails) is None
    assert "could not be measured" in caplog.text


def test_tokens_come_again_and_again():
    assert tokens_of([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.usefixtures("position_fix")
@pytest.mark.parametrize(("share", "reason"), [(0.0, None), (1.0, "does_not_pay")])
def test_reuse_in_an_engine_has_to_pay(engine, share, reason):
    llm = engine(MIN_SAVING=share)
    runtime = llm.connector_scheduler._runtime
    assert (runtime.costs is None) is (share == 0)
    assert not llm.executor.pool.tensor.any()
    teach(llm, DONOR)
    answer = serve(llm, SHIFTED)
    assert answer.reuse_reason == reason
    assert (answer.reused_tokens == 0) is (reason is not None)
    cold = serve(engine.cold(), SHIFTED)
    assert reason is None or answer.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.usefixtures("position_fix")
def test_reuse_that_pays_is_done(engine):
    llm = engine(MIN_SAVING=0.1)
    runtime = llm.connector_scheduler._runtime
    runtime.costs = replace(runtime.costs, cold_prices=(0, 1, 0), plan_prices=(0, 1, 0, 0), load=LoadCost())
    teach(llm, DONOR)
    assert serve(llm, SHIFTED).reused_tokens == 200
