"""The benchmark runs from the repository alone, makes every row, and measures recall by another way than the index."""

import numpy as np
import pytest

from benchmarks.span_lookup import RUN_TOKENS, Sizes, measure, random_corpus, read_corpus, reusable_tokens
from validation.results import Results

TINY = Sizes(donors=1_020, prompts=4, prompt_tokens=8_192, rounds=2, checked=4, documents=4, changes=3, long_lookups=1)
ROWS = {"span_lookup_p50_ms", "span_lookup_p99_ms", "span_lookup_growth", "span_recall", "span_index_bytes_per_token"}
ROWS |= {"donor_add_ms", "donor_remove_ms", "lookup_262k_many_runs_reused_share", "lookup_262k_many_runs_p99_ms"}


def test_every_row_is_made_and_all_that_is_reusable_is_found():
    # Half of the prompts hold a document that a donor holds.
    corpus = random_corpus(TINY.documents)
    reusable = [int(mask.sum()) >= 6_000 for mask in reusable_tokens(corpus.prompts(4, 8_192), corpus.donors(6))]
    assert reusable == [True, False, True, False]
    results = Results(dry=True)
    measure(results, corpus, TINY)
    values = {row.name: row.value for row in results.rows}
    assert set(values) == ROWS
    assert values["span_recall"] >= 0.99
    assert values["span_index_bytes_per_token"] >= 4
    assert all(row.goal is None and row.holds for row in results.rows)


def test_the_truth_is_every_token_of_an_equal_window():
    rng = np.random.default_rng(1)
    prompt, donor = (rng.integers(0, 50, 500, dtype=np.int32) for _ in range(2))
    prompt[100:200] = donor[300:400]
    prompt[300 : 299 + RUN_TOKENS] = donor[: RUN_TOKENS - 1]
    donor[[299, 400]] = prompt[[99, 200]] + 1  # or neighbours may be equal by chance
    (mask,) = reusable_tokens([prompt], [donor])
    assert np.flatnonzero(mask).tolist() == [*range(100, 200)]


def test_a_short_text_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("A few words.", "utf-8")
    with pytest.raises(ValueError, match=r"short\.txt, \d+ tokens: 4 documents need more text"):
        read_corpus(short, 4)
