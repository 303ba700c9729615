"""What a lookup costs is bounded, counted in cells, places and tokens, whatever the donors hold; answers stay right."""

import numpy as np
import pytest

from semblend_trt.discovery.run import Run, ScanBounds, ScanWork
from semblend_trt.discovery.span_index import SpanIndex

MEBIBYTE_OF_TOKENS = (1 << 20) // 4
BOUNDS = ScanBounds()


def random_tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 32_000, length, dtype=np.int32)


def assert_bounded(work: ScanWork, prompt: np.ndarray, bounds: ScanBounds = BOUNDS) -> None:
    """As `ScanBounds` says."""
    assert work.anchors <= len(prompt)
    assert work.cells <= 2 * work.anchors * (bounds.max_bucket + 7)
    assert work.extensions <= bounds.max_extensions
    assert work.compared <= bounds.max_compared + len(prompt) + 2


def assert_equal_tokens(runs: list[Run], donors: dict[str, np.ndarray], prompt: np.ndarray) -> None:
    for run in runs:
        donor = donors[run.donor_id][run.donor_start : run.donor_start + run.length]
        assert np.array_equal(donor, prompt[run.target_start : run.target_end])


def indexed(donors: dict[str, np.ndarray], hash_mask: int = (1 << 64) - 1) -> SpanIndex:
    index = SpanIndex(BOUNDS, hash_mask)
    for donor_id, tokens in donors.items():
        index.add("space", donor_id, tokens)
    return index


def test_a_mebibyte_of_boilerplate_in_all_donors_hides_nothing_and_costs_no_more_with_more_donors() -> None:
    boilerplate = random_tokens(1, MEBIBYTE_OF_TOKENS)
    donors = {f"donor-{i}": np.concatenate([boilerplate, random_tokens(2 + i, 500)]) for i in range(48)}
    prompt = np.concatenate([random_tokens(1000, 100), boilerplate, donors["donor-3"][-500:]])
    index = indexed(donors)
    runs, work = index.find_counting("space", prompt, 64)
    assert Run("donor-3", 0, 100, MEBIBYTE_OF_TOKENS + 500) in runs
    assert_equal_tokens(runs, donors, prompt)
    assert_bounded(work, prompt)
    for number in range(12):
        index.remove(f"donor-{number + 4}")
    fewer = index.find_counting("space", prompt, 64)[1]
    assert fewer.cells >= work.cells / 2
    assert_bounded(fewer, prompt)


@pytest.mark.parametrize("hash_mask", [0, 3 << 40, 0xFF], ids=["one-hash", "four-hashes", "low-byte"])
def test_forced_collisions_cost_bounded_work_and_no_wrong_answer(hash_mask: int) -> None:
    donors = {f"donor-{i}": random_tokens(i, 4_000) for i in range(60)}
    index = indexed(donors, hash_mask)
    prompt = np.concatenate([donors["donor-7"][1_000:3_000], random_tokens(99, 5_000), donors["donor-59"][:2_000]])
    runs, work = index.find_counting("space", prompt)
    assert_bounded(work, prompt)
    assert_equal_tokens(runs, donors, prompt)
    for donor_id in donors:
        assert index.remove(donor_id)
    assert index.find("space", prompt) == []


@pytest.mark.parametrize("length", [1_000, 100_000])
def test_one_repeated_token_costs_two_anchors(length: int) -> None:
    donors = {f"donor-{i}": np.full(10_000 + i, 7, dtype=np.int32) for i in range(200)}
    prompt = np.full(length, 7, dtype=np.int32)
    runs, work = indexed(donors).find_counting("space", prompt)
    assert max(run.length for run in runs) == min(length, 10_199)
    assert_equal_tokens(runs, donors, prompt)
    assert work.anchors == 2
    assert_bounded(work, prompt)


@pytest.mark.parametrize("period", [2, 17, 200])
def test_periodic_text_in_every_donor_costs_bounded_work(period: int) -> None:
    text = np.tile(random_tokens(5, period), 30_000 // period)
    donors = {f"donor-{i}": np.concatenate([random_tokens(10 + i, i), text]) for i in range(100)}
    prompt = np.concatenate([random_tokens(6, 333), text])
    runs, work = indexed(donors).find_counting("space", prompt)
    assert max(run.length for run in runs) >= len(text)
    assert_equal_tokens(runs, donors, prompt)
    assert_bounded(work, prompt)


@pytest.mark.known_defect(17)
def test_tight_bounds_hold() -> None:
    bounds = ScanBounds(max_repeats=2, max_bucket=3, max_pairs=40, max_extensions=5, max_compared=500)
    index = SpanIndex(bounds)
    text = random_tokens(7, 5_000)
    for number in range(30):
        index.add("space", f"donor-{number}", np.concatenate([random_tokens(50 + number, number), text]))
    runs, work = index.find_counting("space", text)
    assert 1 <= len(runs) <= 5
    assert_bounded(work, text, bounds)
    assert work.extensions <= 5


def test_an_empty_prompt_costs_nothing() -> None:
    index = indexed({"donor": random_tokens(1, 100)})
    assert index.find_counting("space", np.empty(0, dtype=np.int32)) == ([], ScanWork())
    assert index.find_counting("space", []) == ([], ScanWork())


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31, 2**40, 2**62])
def test_ids_outside_31_bits_are_refused_wherever_they_stand(token: int) -> None:
    index = indexed({"donor": random_tokens(1, 100)})
    prompt = [*range(50), token, *range(50)]
    with pytest.raises(ValueError, match=r"token ids span .* they must lie in 0\.\.2147483647"):
        index.find("space", prompt)
    with pytest.raises(ValueError, match="token ids span"):
        index.add("space", "other", prompt)
    assert "other" not in index
