"""The index against brute force on 10,000 random cases: every run it must find, no other, none of another namespace.

Indexes are shared by many cases, each in a namespace of its own, so that adding and removing is tested along.
"""

import numba
import numpy as np
import pytest

from semblend_trt.discovery.span_index import Run, ScanBounds, SpanIndex

CASES, CASES_AN_INDEX = 10_000, 250
# Far above anything these small cases need, so that every run has to be found.
UNBOUNDED = ScanBounds(
    max_repeats=1 << 20, max_bucket=1 << 20, max_pairs=1 << 40, max_extensions=1 << 40, max_compared=1 << 40
)
VOCABULARIES = (2, 3, 8, 1_000, 2**31)
LENGTHS = (32, 32, 33, 48, 64, 64, 100)
MASKS = ((1 << 64) - 1, (1 << 64) - 1, 3 << 40, 0)


@numba.njit(cache=False)
def maximal_runs(donor: np.ndarray, prompt: np.ndarray, shortest: int) -> list[tuple[int, int, int, bool]]:
    """All maximal equal runs, diagonal by diagonal: donor start, prompt start, tokens, whether the tokens differ."""
    runs = [(0, 0, 0, False)]
    for shift in range(1 - len(prompt), len(donor)):
        length, varied = 0, False
        for target in range(max(0, -shift), min(len(prompt), len(donor) - shift) + 1):
            inside = target < len(prompt) and target + shift < len(donor)
            if inside and prompt[target] == donor[target + shift]:
                varied = varied or (length > 0 and prompt[target] != prompt[target - 1])
                length += 1
                continue
            if length >= shortest:
                runs.append((target - length + shift, target - length, length, varied))
            length, varied = 0, False
    return runs[1:]


def random_case(rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Up to three donors, and a prompt of pieces of them, of noise, of repetition and of one token."""
    vocabulary = int(rng.choice(VOCABULARIES))
    longest = 400 if rng.integers(0, 20) == 0 else 150
    donors = [rng.integers(0, vocabulary, rng.integers(0, longest), dtype=np.int64) for _ in range(rng.integers(1, 4))]
    pieces = [np.empty(0, dtype=np.int64)]
    for kind in rng.integers(0, 6, rng.integers(0, 5)):
        source = donors[rng.integers(0, len(donors))]
        if kind == 0 or not len(source):
            pieces.append(rng.integers(0, vocabulary, rng.integers(0, 40), dtype=np.int64))
        elif kind == 1:
            pattern = rng.integers(0, vocabulary, rng.integers(1, 5), dtype=np.int64)
            pieces.append(np.tile(pattern, rng.integers(1, 20)))
        else:
            begin = int(rng.integers(0, len(source)))
            pieces.append(source[begin : begin + int(rng.integers(1, 160))])
    if rng.integers(0, 2):
        donors.append(np.concatenate(pieces[::-1]))
    return [donor.astype(np.int32) for donor in donors], np.concatenate(pieces).astype(np.int32)


def check(index: SpanIndex, space: str, donors: list[np.ndarray], prompt: np.ndarray, shortest: int) -> int:
    """Raises when the index finds anything else than brute force; returns the number of runs found."""
    found = index.find(space, prompt, shortest)
    every: set[Run] = set()
    needed: set[Run] = set()
    for number, donor in enumerate(donors):
        for donor_start, target_start, length, varied in maximal_runs(donor, prompt, shortest):
            run = Run(f"{space}/{number}", donor_start, target_start, length)
            every.add(run)
            # A run of one repeated token need not be found on every diagonal.
            if varied:
                needed.add(run)
    assert len(set(found)) == len(found)
    assert needed <= set(found) <= every
    assert found == sorted(found, key=lambda run: (run.target_start, -run.length, run.donor_id, run.donor_start))
    return len(found)


@pytest.mark.parametrize("part", range(4))
def test_equals_brute_force_on_random_cases(part: int) -> None:
    rng = np.random.default_rng(part)
    runs = 0
    for _ in range(CASES // 4 // CASES_AN_INDEX):
        index = SpanIndex(UNBOUNDED, hash_mask=MASKS[part])
        for case in range(CASES_AN_INDEX):
            space, shortest = f"space-{case}", int(rng.choice(LENGTHS))
            donors, prompt = random_case(rng)
            for number, donor in enumerate(donors):
                index.add(space, f"{space}/{number}", donor)
            runs += check(index, space, donors, prompt, shortest)
            assert index.find("elsewhere", prompt, shortest) == []
            # Every other case leaves its donors, which the later ones must not see.
            if case % 2:
                for number in range(len(donors)):
                    assert index.remove(f"{space}/{number}")
                assert index.find(space, prompt, shortest) == []
    assert runs > CASES // 8
