"""The span index on real text: lookups of 32k-token prompts among 100,000 donors, adding and removing a donor.

`python -m benchmarks.lookup.span_lookup --text FILE --json benchmarks/results/<machine>`; `--quick` for a look.
One thread, but for the lookups beside a growing index. A lookup's time is that from int32 tokens to runs of 64 tokens
and more, fingerprint included. Of every prompt the fastest of several rounds counts, since a machine may have other
work; a round goes through all prompts, so that none finds its own part of the table in the cache.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
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
from semblend_trt.discovery.span_index import ScanBounds, SpanIndex
from semblend_trt.plan import EngineMode
from semblend_trt.policy import ReusePolicy
from validation.results import Results, say

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from semblend_trt.discovery.fingerprint import TokenArray

SPACE = "benchmark"
SMALL = 1_000
MEBIBYTE_OF_TOKENS = LONG_PROMPT = (1 << 20) // 4
FIRST_USE = """
import time
began = time.perf_counter()
import numpy as np
from semblend_trt.discovery.span_index import SpanIndex
index = SpanIndex()
index.add("", "", np.arange(64))
index.find("", np.arange(64))
index.remove("")
print(time.perf_counter() - began)
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one run measures: donors, prompts, tokens of a prompt, rounds, prompts whose recall is checked, documents,
    changes, donors with boilerplate, look-ups of a long prompt in each set of donors, and the tokens of text that are
    made where no file is given."""

    donors: int = 100_000
    prompts: int = 200
    prompt_tokens: int = 32_768
    rounds: int = 7
    checked: int = 40
    documents: int = 256
    changes: int = 50
    boilerplate_donors: int = 64
    long_lookups: int = 40
    made_tokens: int = 16_000_000


QUICK = Sizes(
    donors=2_000,
    prompts=20,
    rounds=3,
    checked=10,
    documents=16,
    changes=10,
    boilerplate_donors=8,
    long_lookups=2,
    made_tokens=2_000_000,
)


def main() -> None:
    """Builds the index, then measures lookups, recall, changes, memory and the first use."""
    arguments = parser_of(__doc__)
    arguments.add_argument("--text", type=Path, metavar="FILE", help="English text, UTF-8, may be gzipped")
    arguments.add_argument("--quick", action="store_true", help="2,000 donors and 20 prompts, without goals")
    given = arguments.parse_args()
    sizes = QUICK if given.quick else Sizes()
    rows = Results(dry=given.quick)
    measure(rows, read_corpus(given.text, sizes.documents, sizes.made_tokens), sizes)
    if not given.quick:
        add_first_use(rows)
    rows.write(given.json, "span_lookup")


def measure(rows: Results, corpus: Corpus, sizes: Sizes) -> None:
    """Adds all rows but that of the first use."""
    index = SpanIndex()
    prompts = corpus.prompts(sizes.prompts, sizes.prompt_tokens, seed=1)
    small = np.empty((0, 0))
    adds: list[float] = []
    tokens = 0
    for number, (donor_id, donor) in enumerate(corpus.donors(sizes.donors, seed=2)):
        if number == SMALL:
            small = lookup_times(index, prompts, sizes.rounds)
        adds.append(seconds(changed, index, index.add, SPACE, donor_id, donor))
        tokens += len(donor)
    say(f"{len(index):,} donors, {tokens:,} tokens; {corpus.source}; {sizes.prompts} prompts")
    add_lookups(rows, lookup_times(index, prompts, sizes.rounds), small, f"{tokens} tokens of {corpus.source}", sizes)
    add_recall(rows, index, corpus, sizes, prompts)
    add_crowded(rows, index, corpus, sizes)
    add_planning(rows, index, prompts, sizes)
    add_changes(rows, index, corpus, sizes)
    against = "tokens, table and records; 4 B are the tokens"
    rows.add("span_index_bytes_per_token", index.used_bytes() / tokens, "B", against, goal=8.0)
    worst = f"adding one of {len(adds)} donors while the index grows; median {statistics.median(adds) * 1e3:.3f} ms"
    rows.add("donor_add_worst_ms", max(adds) * 1e3, "ms", worst)
    add_growing(rows, index, corpus, sizes, prompts)
    add_boilerplate(rows, corpus, sizes)
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
    every = np.percentile(large, [50, 99]) * 1e3
    machine = f"all {large.size} lookups, with all else that the machine did; their median is {every[0]:.3f} ms"
    rows.add("span_lookup_every_p99_ms", every[1], "ms", machine)
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


def add_crowded(rows: Results, index: SpanIndex, corpus: Corpus, sizes: Sizes) -> None:
    """Prompts that consist of nothing but text that many donors hold."""
    prompts = corpus.crowded_prompts(max(4, sizes.prompts // 10), sizes.prompt_tokens, seed=3)
    times = lookup_times(index, prompts, sizes.rounds).min(axis=0)
    runs = statistics.median(len(index.find(SPACE, prompt, RUN_TOKENS)) for prompt in prompts)
    against = f"prompts all of which stands in many donors: {runs:g} runs found in the median prompt"
    rows.add("span_lookup_crowded_p50_ms", float(np.median(times)) * 1e3, "ms", against)


def add_planning(rows: Results, index: SpanIndex, prompts: list[TokenArray], sizes: Sizes) -> None:
    """From prompt to plan: lookup, cover with every other donor on the card, plan and its diagnostics."""
    settings = load_settings(policy=ReusePolicy.POSITION_FIX, min_reuse_ratio=0)
    planner = Planner(index, settings, settings.policy, 28, lambda donor_id: donor_id[-1] in "02468")
    requests = [LookupRequest(7, SPACE, prompt, 0, 32, EngineMode.WRAPPER, True) for prompt in prompts]
    times = np.array([[seconds(planner.plan, each) for each in requests] for _ in range(sizes.rounds)]).min(axis=0)
    planned = sum(planner.plan(each).plan is not None for each in requests)
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    against = f"lookup, cover and plan: {planned} plans of {len(prompts)} prompts; p99 {p99:.3f} ms"
    rows.add("span_plan_p50_ms", p50, "ms", against)


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


def add_growing(rows: Results, index: SpanIndex, corpus: Corpus, sizes: Sizes, prompts: list[TokenArray]) -> None:
    """Lookups while another thread adds donors as fast as it can, beside as many with a still index."""
    still = lookup_times(index, prompts, sizes.rounds)
    stop = threading.Event()
    before = len(index)

    def grow() -> None:
        for donor_id, donor in corpus.donors(sizes.donors, seed=6):
            if stop.is_set():
                return
            index.add(SPACE, f"growing-{donor_id}", donor)

    writer = threading.Thread(target=grow)
    writer.start()
    growing = lookup_times(index, prompts, sizes.rounds)
    stop.set()
    writer.join()
    added = len(index) - before
    for name, value, rest in (
        ("span_lookup_growing_p50_ms", np.median(growing), np.median(still)),
        ("span_lookup_growing_worst_ms", growing.max(), still.max()),
    ):
        against = f"{growing.size} lookups while {added} donors were added; with a still index {rest * 1e3:.3f} ms"
        rows.add(name, value * 1e3, "ms", against)


def add_boilerplate(rows: Results, corpus: Corpus, sizes: Sizes) -> None:
    """A prompt of 1 MiB of tokens that every donor holds, and what its lookup does at most."""
    boilerplate = np.resize(corpus.common, MEBIBYTE_OF_TOKENS)
    index, bounds = SpanIndex(), ScanBounds()
    for number in range(sizes.boilerplate_donors):
        index.add(SPACE, f"donor-{number}", np.concatenate([boilerplate, corpus.documents[0][: 100 + number]]))
    times = lookup_times(index, [boilerplate], sizes.rounds)
    work = index.find_counting(SPACE, boilerplate, RUN_TOKENS)[1]
    limit = min(work.anchors * bounds.max_bucket, bounds.max_pairs)
    against = (
        f"{MEBIBYTE_OF_TOKENS} tokens that {len(index)} donors hold; {work.places} places read of at most {limit}, "
    )
    against += (
        f"{work.extensions} of them compared of at most {bounds.max_extensions}, {work.compared} tokens found equal"
    )
    rows.add("span_lookup_boilerplate_ms", times.min() * 1e3, "ms", against)


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


def add_first_use(rows: Results) -> None:
    """What the first index of a process waits for, its imports among it."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=True)
    rows.add(
        "span_index_first_use_s",
        float(done.stdout),
        "s",
        "import, make an index, add a donor, find it and remove it",
        goal=5.0,
    )


if __name__ == "__main__":
    main()
