"""A drafter of the model's own weights loses nothing with all KV, and some of it without KV of moved text."""

from benchmarks.evidence import drafts
from semblend_trt.plan import PlanSpan
from tests.benchmarks.dry_runs import dry_rows
from validation import models


def test_only_moved_kv_is_missing_from_a_drafter(tmp_path):
    rows = dry_rows(drafts, tmp_path, "--groups", "2")
    assert set(rows) == {f"drafts_accepted_{name}" for name in ("volatile", "instruction", "needle", "two_hop")}
    assert 0 < min(row.value for row in rows.values()) < 1
    model, prompt = models.load(None, "cpu", "float32").model, list(range(20, 120))
    assert drafts.accepted_share(model, prompt, [PlanSpan("0", 0, 0, 90, exact=True)]) == 1
    assert drafts.accepted_share(model, prompt, [PlanSpan("0", 5, 9, 90)]) < 1
