"""Attaching changes an engine only where it offers both places; otherwise the engine and the mode stay as they are."""

from types import SimpleNamespace

import pytest
import torch

from engine_wrapper.connector import attach
from engine_wrapper.publication import PublicationGuard
from kernels.layout import KvGeometry
from semblend_trt.plan import CheckEvidence, EngineMode
from semblend_trt.runtime import PoolFacts, Runtime

POOL = PoolFacts(KvGeometry(2, 1, 8, 16), 4, torch.float32)


class Engine:
    def __init__(self, runner, blocks):
        self.model_runner, self.block_manager = runner, blocks


def test_attach_sets_plan_source_guard_and_mode():
    engine = Engine(SimpleNamespace(plan_source=None), SimpleNamespace(publication=None))
    runtime = Runtime(pool=POOL)
    runtime.engine = engine
    assert attach(runtime)
    assert engine.model_runner.plan_source == runtime.active_plans.take
    assert isinstance(engine.block_manager.publication, PublicationGuard)
    assert (runtime.mode, runtime.publication_guard) == (EngineMode.WRAPPER, True)


def test_evidence_goes_to_the_runtime_and_a_dropped_plan_limits_nothing(make_plan):
    runtime = Runtime(pool=POOL)
    runtime.engine = engine = Engine(
        SimpleNamespace(plan_source=None, evidence_sink=None), SimpleNamespace(publication=None)
    )
    assert attach(runtime)
    for request_id in (1, 2):
        runtime.active_plans.put(
            make_plan(tuple(range(40)), [(4, 20)], num_layers=2, block_size=16, request_id=request_id)
        )
    found = [
        CheckEvidence(1, offered_tokens=16, checked_tokens=16, reused_tokens=0, recomputed_tokens=16, largest_kept=0.0,
                      is_dropped=True),
        CheckEvidence(2, offered_tokens=16, checked_tokens=16, reused_tokens=9, recomputed_tokens=7, largest_kept=0.1,
                      is_dropped=False),
    ]  # fmt: skip
    for evidence in found:
        engine.model_runner.evidence_sink(evidence)
    assert list(runtime.evidence) == found
    assert runtime.active_plans.publishable_tokens(1) is None
    assert runtime.active_plans.publishable_tokens(2) == 4


@pytest.mark.parametrize(
    ("runner", "blocks", "pool"),
    [
        (SimpleNamespace(), SimpleNamespace(publication=None), POOL),
        (SimpleNamespace(plan_source=None), SimpleNamespace(), POOL),
        (SimpleNamespace(plan_source=None), SimpleNamespace(publication=None), None),
    ],
)
def test_incomplete_engine_is_left_untouched(runner, blocks, pool):
    engine, before = Engine(runner, blocks), (dict(vars(runner)), dict(vars(blocks)))
    runtime = Runtime(pool=pool)
    runtime.engine = engine
    assert not attach(runtime)
    assert (vars(runner), vars(blocks)) == before
    assert (runtime.mode, runtime.publication_guard) == (EngineMode.STOCK, False)


def test_no_engine_at_all():
    runtime = Runtime(pool=POOL)
    assert not attach(runtime)
    assert runtime.mode is EngineMode.STOCK
