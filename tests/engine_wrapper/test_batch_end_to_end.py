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


@pytest.mark.promise(
    "engines", "A plan that computes more than `max_num_tokens` runs in several forwards, with the same result"
)
@pytest.mark.parametrize(
    ("policy", "prompts", "options"),
    [
        ("boundary", (SHIFTED, BEHIND_A_HOLE, COLD), {}),
        ("cacheblend", (COLD, SHIFTED, BEHIND_A_HOLE), {}),
        ("epic", (SHIFTED, BEHIND_A_HOLE), {}),
        ("verified", (SHIFTED, COLD, BEHIND_A_HOLE), {"contract": "1.2", "disable_overlap_scheduler": False}),
        ("verified", (SHIFTED, COLD, BEHIND_A_HOLE), {"contract": "1.4"}),
        ("position_fix", (SHIFTED,), {"loses": True}),
    ],
)
def test_plans_run_in_several_forwards_and_come_out_the_same(engine, profile, rows, policy, prompts, options):
    found, settings = [], {"RECOMPUTE_BOUNDARY_LAYER": 2, "MIN_REUSE_RATIO": 0.1, "POLICY": policy, **options}
    loses = settings.pop("loses", False)
    if policy == "verified":
        settings["PROFILE"] = profile(check=SOME_KEPT)
    for max_num_tokens in (UNBOUNDED, 64):
        rows.clear()
        llm = engine(max_num_tokens=max_num_tokens, **settings)
        teach(llm, DONOR)
        if loses:
            llm.connector_worker.store.clear()
        outputs = llm.generate(list(prompts), GREEDY)
        llm.settle()
        reports = [llm.connector_scheduler.reuse_of(output.request_id) for output in outputs]
        told = [{**each.figures, "outcome": each.outcome, "reason": each.reason} for each in reports]
        found.append((outputs, told, max(rows)))
    (expected, figures, most), (outputs, in_parts, bounded) = found
    assert most > 64 >= bounded, "something has to be divided"
    for output, other in zip(outputs, expected, strict=True):
        assert output.reused_tokens == other.reused_tokens
        assert_same(output, other)
    assert in_parts == [pytest.approx(each, abs=1e-4) for each in figures]
    assert loses or all(
        each["reused_tokens"] for prompt, each in zip(prompts, figures, strict=True) if prompt is not COLD
    )
