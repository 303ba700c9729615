"""The benchmark of two tenants: nothing that is counted tells one of the other's donor, and one's own is told."""

from benchmarks.evidence import tenants
from semblend_trt.namespace import CacheNamespace
from tests.benchmarks.dry_runs import dry_rows


def test_no_count_tells_of_another_tenants_donor():
    arms = tenants.arms_of(8)
    assert [len(arm) for arm in arms.values()] == [8, 8, 8]
    counts = {holder: [each.counts for each in arm] for holder, arm in arms.items()}
    assert len(set(counts["none"] + counts["other"])) == 1
    assert min(report.reused_tokens for *_, report in counts["own"]) >= 384
    assert {report.reused_tokens for *_, report in counts["other"]} == {0}


def test_a_salt_that_binds_nothing_is_seen(tmp_path, monkeypatch):
    bind = CacheNamespace.for_request
    monkeypatch.setattr(CacheNamespace, "for_request", lambda self, salt, adapter: bind(self, None, adapter))
    rows = dry_rows(tenants, tmp_path, "--samples", "8", "--salts", "1")
    assert set(rows) == {"tenant_ks_p", "tenant_own_donor_ks_p", "tenant_counts_differing", "salts_3000_memory_mb"}
    assert rows["tenant_counts_differing"].value == 8
