"""No forward has more than `max_num_tokens` rows, however many plans add to those that were scheduled."""

import pytest

from engine_wrapper import batch as batch_module
from tests.builders.engine import DOCUMENT, DONOR, GREEDY, SHIFTED, SOME_KEPT, assert_same, teach, text
from tests.engine_wrapper.watching import watched

UNBOUNDED = 4096
BEHIND_A_HOLE = text(5, 150) + DOCUMENT + text(6, 20)
COLD = text(7, 130)


@pytest.fixture
def rows(monkeypatch):
    counted = []
    for name in ("schedule_of", "lowest_schedule"):
        watched(monkeypatch, batch_module, name, lambda schedule, *_: counted.append(len(schedule.positions)))
    return counted


class Serving:
    def __init__(self, engine, policy, lose=False, **options):
        self._engine, self._options, self._lose = engine, {"POLICY": policy, **options}, lose

    def __call__(self, max_num_tokens, *prompts):
        """The answers to the prompts at once, and what the engine reports of each."""
        settings = {"RECOMPUTE_BOUNDARY_LAYER": 2, "MIN_REUSE_RATIO": 0.1, **self._options}
        llm = self._engine(max_num_tokens=max_num_tokens, **settings)
        teach(llm, DONOR)
        if self._lose:
            llm.connector_worker.store.clear()
        outputs = llm.generate(list(prompts), GREEDY)
        llm.settle()
        reports = [llm.connector_scheduler.reuse_of(output.request_id) for output in outputs]
        return outputs, [{**each.figures, "outcome": each.outcome, "reason": each.reason} for each in reports]


def compare(served, rows, max_num_tokens, *prompts):
    """Bounded and unbounded engines answer and report the same; returns the reports."""
    expected, told = served(UNBOUNDED, *prompts)
    assert max(rows) > max_num_tokens, "nothing has to be divided"
    rows.clear()
    outputs, figures = served(max_num_tokens, *prompts)
    assert 0 < max(rows) <= max_num_tokens
    for output, other in zip(outputs, expected, strict=True):
        assert output.reused_tokens == other.reused_tokens
        assert_same(output, other)
    assert figures == [pytest.approx(each, abs=1e-4) for each in told]
    return figures


@pytest.mark.promise(
    "engines",
    "A plan that computes more than `max_num_tokens` runs in several forwards, with the same result",
)
@pytest.mark.parametrize(
    ("policy", "prompts", "max_num_tokens"),
    [
        ("position_fix", (BEHIND_A_HOLE,), 64),
        ("boundary", (SHIFTED,), 280),
        ("boundary", (SHIFTED, BEHIND_A_HOLE, COLD), 100),
        ("cacheblend", (SHIFTED, BEHIND_A_HOLE), 400),
        ("cacheblend", (COLD, SHIFTED, BEHIND_A_HOLE), 64),
        ("cacheblend", (SHIFTED + text(8, 150),), 100),
        ("verified", (BEHIND_A_HOLE, SHIFTED), 220),
        ("epic", (SHIFTED, BEHIND_A_HOLE), 64),
    ],
)
def test_plans_run_in_several_forwards_and_come_out_the_same(engine, profile, rows, policy, prompts, max_num_tokens):
    options = {"PROFILE": profile(check=SOME_KEPT)} if policy == "verified" else {}
    figures = compare(Serving(engine, policy, **options), rows, max_num_tokens, *prompts)
    assert all(each["reused_tokens"] for prompt, each in zip(prompts, figures, strict=True) if prompt is not COLD)


@pytest.mark.parametrize(
    "options",
    [
        {"contract": "1.2", "disable_overlap_scheduler": False},
        {"contract": "1.4"},
        {"max_batch_size": 1},
    ],
    ids=["1.2", "v2", "one by one"],
)
def test_every_kind_of_engine_runs_plans_in_parts(engine, profile, rows, options):
    served = Serving(engine, "verified", PROFILE=profile(check=SOME_KEPT), **options)
    figures = compare(served, rows, 64, SHIFTED, COLD, BEHIND_A_HOLE)
    assert 0 < figures[0]["reused_tokens"] < figures[0]["checked_tokens"] == len(DOCUMENT)


def test_a_lost_donor_is_computed_in_several_forwards(engine, rows):
    compare(Serving(engine, "position_fix", lose=True), rows, 64, SHIFTED)
