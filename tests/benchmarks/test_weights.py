"""The benchmark of what watching weights costs."""

from benchmarks import weights
from validation.results import Results


def test_both_prices_are_measured(monkeypatch):
    monkeypatch.setattr(weights, "STEPS", 100)
    rows = Results()
    weights.run(1, rows)
    price, digest = rows.rows
    assert (price.name, price.goal) == ("weights_check_ms", 0.1)
    assert "308 tensors" in price.baseline
    assert digest.name == "weights_digest_gb_per_s"
    assert min(price.value, digest.value) > 0
