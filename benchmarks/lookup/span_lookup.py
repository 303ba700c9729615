"""The span index on real text: lookups of 32k-token prompts among 100,000 donors, adding and removing a donor.

`python -m benchmarks.lookup.span_lookup --text FILE --json benchmarks/results/<machine>`; `--quick` for a look.
One thread. A lookup's time is that from int32 tokens to runs of 64 tokens
and more, fingerprint included. Of every prompt the fastest of several rounds counts, since a machine may have other
work; a round goes through all prompts, so that none finds its own part of the table in the cache.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.lookup.span_corpus import (
    DOCUMENT_DONOR_TOKENS,
    RUN_TOKENS,
    Corpus,
    many_runs,
    read_corpus,
    reusable_tokens,
)
from benchmarks.program import parser_of, seconds
from semblend_trt.config import load_settings
from semblend_trt.discovery.planner import DEADLINE_TOKENS, LookupRequest, Planner
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.plan import EngineMode
from semblend_trt.policy import ReusePolicy
from validation.results import Results, say

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from semblend_trt.discovery.fingerprint import TokenArray

SPACE = "benchmark"
SMALL = 1_000
LONG_PROMPT = 1 << 18


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one run measures: donors, prompts, tokens of a prompt, rounds, prompts whose recall is checked, documents,
    changes, look-ups of a long prompt in each set of donors, and the tokens of text that are made where no file is
    given."""

    donors: int = 100_000
    prompts: int = 200
    prompt_tokens: int = 32_768
    rounds: int = 7
    checked: int = 40
    documents: int = 256
    changes: int = 50
    long_lookups: int = 40
    made_tokens: int = 16_000_000


QUICK = Sizes(
    donors=2_000,
    prompts=20,
    rounds=3,
    checked=10,
    documents=16,
    changes=10,
    long_lookups=2,
    made_tokens=2_000_000,
)


def main() -> None:
    """Builds the index, then measures lookups, recall, changes and memory."""
    arguments = parser_of(__doc__)
    arguments.add_argument("--text", type=Path, metavar="FILE", help="English text, UTF-8, may be gzipped")
    arguments.add_argument("--quick", action="store_true", help="2,000 donors and 20 prompts, without goals")
    given = arguments.parse_args()
    sizes = QUICK if given.quick else Sizes()
    rows = Results(dry=given.quick)
    measure(rows, read_corpus(given.text, sizes.documents, sizes.made_tokens), sizes)
    rows.write(given.json, "span_lookup")


def measure(rows: Results, corpus: Corpus, sizes: Sizes) -> None:
    """Adds all rows."""
    index = SpanIndex()
    prompts = corpus.prompts(sizes.prompts, sizes.prompt_tokens, seed=1)
    small = np.empty((0, 0))
    tokens = 0
    for number, (donor_id, donor) in enumerate(corpus.donors(sizes.donors, seed=2)):
        if number == SMALL:
            small = lookup_times(index, prompts, sizes.rounds)
        changed(index, index.add, SPACE, donor_id, donor)
        tokens += len(donor)
    say(f"{len(index):,} donors, {tokens:,} tokens; {corpus.source}; {sizes.prompts} prompts")
    add_lookups(rows, lookup_times(index, prompts, sizes.rounds), small, f"{tokens} tokens of {corpus.source}", sizes)
    add_recall(rows, index, corpus, sizes, prompts)
    add_changes(rows, index, corpus, sizes)
    against = "tokens, table and records; 4 B are the tokens"
    rows.add("span_index_bytes_per_token", index.used_bytes() / tokens, "B", against, goal=8.0)
    add_many_runs(rows, corpus, sizes)


def lookup_times(index: SpanIndex, prompts: list[TokenArray], rounds: int) -> npt.NDArray[np.float64]:
    """Seconds of every lookup, [rounds, prompts]."""
    times = np.empty((rounds, len(prompts)))
    for each in times:
        for number, prompt in enumerate(prompts):
            each[number] = seconds(index.find, SPACE, prompt, RUN_TOKENS)
    return times


def add_lookups(
    rows: Results, large: npt.NDArray[np.float64], small: npt.NDArray[np.float64], text: str, sizes: Sizes
) -> None:
    """The lookup's percentiles over prompts, and how they grow from `small` to `large`."""
    where = f"{sizes.prompt_tokens}-token prompts, {sizes.donors} donors, {text}; fastest of {sizes.rounds} each"
    p50, p99 = np.percentile(large.min(axis=0), [50, 99]) * 1e3
    rows.add("span_lookup_p50_ms", p50, "ms", where, goal=0.3)
    rows.add("span_lookup_p99_ms", p99, "ms", where, goal=0.5)
    few = float(np.median(small.min(axis=0))) * 1e3
    rows.add("span_lookup_growth", p50 / few, "x", f"median with {SMALL} donors {few:.3f} ms", goal=2.0)


def add_recall(rows: Results, index: SpanIndex, corpus: Corpus, sizes: Sizes, prompts: list[TokenArray]) -> None:
    """Tokens in runs that the index finds, over all tokens of the prompts that stand in a run of some donor."""
    checked = prompts[: sizes.checked]
    possible = reusable_tokens(checked, (donor for _, donor in corpus.donors(sizes.donors, seed=2)))
    found = sum(int((covered(index, each) & mask).sum()) for each, mask in zip(checked, possible, strict=True))
    total = sum(int(mask.sum()) for mask in possible)
    against = f"{total} tokens of {len(checked)} prompts in runs >= {RUN_TOKENS}, by comparison with every donor"
    rows.add("span_recall", found / total, "ratio", against, goal=0.99, better="higher")


def covered(index: SpanIndex, prompt: TokenArray) -> npt.NDArray[np.bool_]:
    """Which tokens lie in a run that the index finds."""
    mask = np.zeros(len(prompt), dtype=np.bool_)
    for run in index.find(SPACE, prompt, RUN_TOKENS):
        mask[run.target_start : run.target_end] = True
    return mask


def add_changes(rows: Results, index: SpanIndex, corpus: Corpus, sizes: Sizes) -> None:
    """Adding and removing donors of 8k tokens when the index is full."""
    donors = corpus.crowded_prompts(sizes.changes, DOCUMENT_DONOR_TOKENS, seed=4)
    added = [seconds(changed, index, index.add, SPACE, f"change-{number}", each) for number, each in enumerate(donors)]
    removed = [seconds(changed, index, index.remove, f"change-{number}") for number in range(len(donors))]
    for name, times in (("donor_add_ms", added), ("donor_remove_ms", removed)):
        against = f"median of {len(times)} donors of {DOCUMENT_DONOR_TOKENS} tokens; slowest {max(times) * 1e3:.3f} ms"
        rows.add(name, statistics.median(times) * 1e3, "ms", against, goal=1.0)


def changed(index: SpanIndex, change: Callable[..., object], *arguments: object) -> None:
    """Makes a change and waits until the index has done it."""
    change(*arguments)
    index.wait()


def add_many_runs(rows: Results, corpus: Corpus, sizes: Sizes) -> None:
    """Plans of a long prompt that donors hold in hundreds of runs, at the default settings but for the policy."""
    prompt, times, shares = corpus.own[:LONG_PROMPT], list[float](), list[float]()
    settings = load_settings(policy=ReusePolicy.POSITION_FIX)
    request = LookupRequest(7, SPACE, prompt, 0, 32, EngineMode.WRAPPER, True)
    for donors, held in many_runs(prompt, seed=7):
        index = SpanIndex()
        for number, donor in enumerate(donors):
            index.add(SPACE, f"donor-{number}", donor)
        index.wait()
        planner = Planner(index, settings, settings.policy, 28)
        for _ in range(sizes.long_lookups):
            begun = time.thread_time()
            plan = planner.plan(request).plan
            times.append(time.thread_time() - begun)
            shares.append(0.0 if plan is None else plan.reused_tokens / held)
    against = (
        f"of the tokens that donors hold of a prompt of {len(prompt)}; {len(times)} look-ups of 256 to 1311 runs, the "
        f"worst {min(shares):.3f}"
    )
    rows.add(
        "lookup_262k_many_runs_reused_share", statistics.mean(shares), "ratio", against, goal=0.95, better="higher"
    )
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    limit = settings.lookup_deadline_ms * len(prompt) / DEADLINE_TOKENS
    against = (
        f"processor time of the same look-ups, without passes of Python's garbage collector; median {p50:.1f} ms, the "
        f"deadline is {limit:.0f} ms"
    )
    rows.add("lookup_262k_many_runs_p99_ms", p99, "ms", against)


if __name__ == "__main__":
    main()
