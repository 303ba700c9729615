"""The span index on real text: look-ups of 32k-token prompts among 100,000 donors, adding and removing a donor.

`python -m benchmarks.span_lookup --text FILE --json benchmarks/results/<machine>`; without a text it is a dry run on
random tokens. A text has fewer tokens than 100,000 donors need, so donors are cut from it at random offsets: a passage
is then in many donors. Documents, and the prompts' own text, come from parts that no other donor is cut from.

One thread. A look-up's time is that from int32 tokens to runs of 64 tokens and more, fingerprint included. Of every
prompt the fastest of several rounds counts, since a machine may have other work.
"""

import gzip
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from benchmarks.program import parser_of, seconds
from semblend_trt.config import load_settings
from semblend_trt.discovery.fingerprint import TokenArray
from semblend_trt.discovery.planner import DEADLINE_TOKENS, LookupRequest, Planner
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.plan import EngineMode
from semblend_trt.policy import ReusePolicy
from validation.models import shipped_model
from validation.results import Results, say

SPACE = "benchmark"
# Donors of the index that the full one is compared with; tokens of a prompt that many runs cover.
SMALL, LONG_PROMPT = 1_000, 1 << 18
DONOR_TOKENS, SLICE_TOKENS = 2_000, 500
DOCUMENT_TOKENS, DOCUMENT_DONOR_TOKENS = 6_000, 8_000
RUN_TOKENS = 64
_CHARACTERS_A_CALL = 1 << 16
# Factors of a window's tokens: a window's hash is their sum of products, modulo 2 ** 64.
_FACTORS = np.random.default_rng(3).integers(0, 1 << 64, RUN_TOKENS, dtype=np.uint64)


class Sizes(NamedTuple):
    """What one run measures. `checked` prompts have their recall checked; `long_lookups` are for each set of donors."""

    donors: int = 100_000
    prompts: int = 200
    prompt_tokens: int = 32_768
    rounds: int = 7
    checked: int = 40
    documents: int = 256
    changes: int = 50
    long_lookups: int = 40


QUICK = Sizes(donors=2_000, prompts=20, rounds=3, checked=10, documents=16, changes=10, long_lookups=2)


class Corpus:
    """A text's int32 tokens: `common` ones that donors are cut from, `documents` [n, DOCUMENT_TOKENS], and prompts'
    `own`. Raises ValueError if there are too few."""

    def __init__(self, source: str, tokens: TokenArray, num_documents: int) -> None:
        documents = num_documents * DOCUMENT_TOKENS
        common = (len(tokens) - documents) * 4 // 5
        if common < 4 * DOCUMENT_DONOR_TOKENS:
            raise ValueError(f"{source}: {num_documents} documents need more text beside them")
        self.source = source
        self.common, held, self.own = np.split(tokens, [common, common + documents])
        self.documents = held.reshape(num_documents, DOCUMENT_TOKENS)

    def donors(self, count: int) -> Iterator[TokenArray]:
        """Yield `count` donors. The first hold a document each in other text, the others four slices of text each."""
        rng = np.random.default_rng(2)
        for number in range(count):
            if number < len(self.documents):
                around = cut(rng, self.common, DOCUMENT_DONOR_TOKENS - DOCUMENT_TOKENS)
                yield np.insert(around, rng.integers(0, len(around) + 1), self.documents[number])
            else:
                yield np.concatenate([cut(rng, self.common, SLICE_TOKENS) for _ in range(DONOR_TOKENS // SLICE_TOKENS)])

    def prompts(self, count: int, length: int) -> list[TokenArray]:
        """Return `count` prompts of `length` tokens of own text; every other one holds a document at a random place."""
        rng = np.random.default_rng(1)
        prompts = [cut(rng, self.own, length) for _ in range(count)]
        for prompt in prompts[::2]:
            shift = rng.integers(0, length - DOCUMENT_TOKENS + 1)
            prompt[shift : shift + DOCUMENT_TOKENS] = rng.choice(self.documents)
        return prompts


def cut(rng: np.random.Generator, text: TokenArray, length: int) -> TokenArray:
    """Return a copy of `length` tokens from a random place."""
    begin = int(rng.integers(0, len(text) - length + 1))
    found: TokenArray = text[begin : begin + length].copy()
    return found


def read_corpus(path: Path, num_documents: int) -> Corpus:
    """Read and tokenise a text (UTF-8, or .gz) with the shipped model's tokenizer. Raises ValueError if too short."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", errors="replace") as file:
        parts = list(iter(partial(file.read, _CHARACTERS_A_CALL), ""))
    encoded = Tokenizer.from_file(str(shipped_model() / "tokenizer.json")).encode_batch(parts, add_special_tokens=False)
    tokens = np.concatenate([np.array(part.ids, np.int32) for part in encoded])
    return Corpus(f"{path.name}, {len(tokens)} tokens", tokens, num_documents)


def random_corpus(num_documents: int) -> Corpus:
    """Return random tokens, for a dry run."""
    count = num_documents * DOCUMENT_TOKENS + 5 * LONG_PROMPT + 5
    return Corpus("random tokens", np.random.default_rng(0).integers(0, 2_048, count, dtype=np.int32), num_documents)


def many_runs(prompt: TokenArray) -> Iterator[tuple[list[TokenArray], int]]:
    """Yield donors that hold a prompt in many runs, and how many of its tokens they hold.

    First three quarters of each of 256, 655 and 1,300 pieces in another order; then all but one token of 500, and of
    200. At last 655 pieces in two donors each, which hold a little of the piece before as well."""
    rng = np.random.default_rng(7)
    for count in (256, 655, 1_300):
        size = len(prompt) // count
        pieces = [prompt[at * size : at * size + size * 3 // 4] for at in rng.permutation(count)]
        yield [np.concatenate(pieces[each::8]) for each in range(8)], sum(map(len, pieces))
    for every in (500, 200):
        donor = prompt.copy()
        donor[every - 1 :: every] ^= 1
        yield [donor], int((donor == prompt).sum())
    size = len(prompt) // 655
    parts = [prompt[max(0, at - 20) : at + size] for at in range(0, len(prompt), size)]
    yield [np.concatenate([*parts[each::8], *parts[(each + 1) % 8 :: 8]]) for each in range(8)], len(prompt)


def reusable_tokens(prompts: Sequence[TokenArray], donors: Iterable[TokenArray]) -> list[npt.NDArray[np.bool_]]:
    """Return for every prompt which of its tokens lie in a window of RUN_TOKENS tokens that is in some donor."""
    hashes = [_window_hashes(prompt) for prompt in prompts]
    known = np.unique(np.concatenate(hashes))
    is_held = np.zeros(len(known), dtype=np.bool_)
    for donor in donors:
        of_donor = _window_hashes(donor)
        places = np.searchsorted(known, of_donor).clip(max=len(known) - 1)
        is_held[places[known[places] == of_donor]] = True
    window = np.ones(RUN_TOKENS, dtype=np.bool_)
    return [np.convolve(is_held[np.searchsorted(known, each)], window) for each in hashes]


def _window_hashes(tokens: TokenArray) -> npt.NDArray[np.uint64]:
    """Return hashes of all windows of RUN_TOKENS tokens, uint64 [n - RUN_TOKENS + 1]."""
    return np.convolve(tokens.astype(np.uint64), _FACTORS, mode="valid")


def measure(rows: Results, corpus: Corpus, sizes: Sizes) -> None:
    """Add all rows."""
    index, tokens, small = SpanIndex(), 0, np.empty((0, 0))
    prompts = corpus.prompts(sizes.prompts, sizes.prompt_tokens)
    for number, donor in enumerate(corpus.donors(sizes.donors)):
        if number == SMALL:
            small = lookup_times(index, prompts, sizes.rounds)
        changed(index, index.add, SPACE, f"donor-{number}", donor)
        tokens += len(donor)
    say(f"{sizes.donors:,} donors, {tokens:,} tokens; {corpus.source}; {sizes.prompts} prompts")
    large = lookup_times(index, prompts, sizes.rounds)
    where = f"{sizes.prompt_tokens}-token prompts, {sizes.donors} donors, {tokens} tokens of {corpus.source}"
    where += f"; fastest of {sizes.rounds} each"
    p50, p99 = np.percentile(large, [50, 99])
    rows.add("span_lookup_p50_ms", p50, "ms", where, goal=0.3)
    rows.add("span_lookup_p99_ms", p99, "ms", where, goal=0.5)
    few = float(np.median(small))
    rows.add("span_lookup_growth", p50 / few, "x", f"median with {SMALL} donors {few:.3f} ms", goal=2.0)
    add_recall(rows, index, prompts[: sizes.checked], corpus.donors(sizes.donors))
    add_changes(rows, index, corpus, sizes.changes)
    against = "tokens, table and records; 4 B are the tokens"
    rows.add("span_index_bytes_per_token", index.used_bytes() / tokens, "B", against, goal=8.0)
    add_many_runs(rows, corpus.own[:LONG_PROMPT], sizes.long_lookups)


def lookup_times(index: SpanIndex, prompts: Sequence[TokenArray], rounds: int) -> npt.NDArray[np.float64]:
    """Return the fastest look-up of each prompt in ms. Rounds over all prompts keep its part of the table uncached."""
    times = [[seconds(index.find, SPACE, prompt, RUN_TOKENS) for prompt in prompts] for _ in range(rounds)]
    fastest: npt.NDArray[np.float64] = np.min(times, axis=0) * 1e3
    return fastest


def add_recall(rows: Results, index: SpanIndex, prompts: Sequence[TokenArray], donors: Iterable[TokenArray]) -> None:
    """Add the tokens in runs that the index finds, over all the prompts' tokens that are in a run of some donor."""
    found = total = 0
    for prompt, possible in zip(prompts, reusable_tokens(prompts, donors), strict=True):
        total += int(possible.sum())
        for run in index.find(SPACE, prompt, RUN_TOKENS).runs:
            found += int(possible[run.target_start : run.target_end].sum())
            possible[run.target_start : run.target_end] = False
    against = f"{total} tokens of {len(prompts)} prompts in runs >= {RUN_TOKENS}, by comparison with every donor"
    rows.add("span_recall", found / total, "ratio", against, goal=0.99, better="higher")


def add_changes(rows: Results, index: SpanIndex, corpus: Corpus, count: int) -> None:
    """Measure adding and removing donors of 8k tokens when the index is full."""
    rng = np.random.default_rng(4)
    donors = {f"change-{number}": cut(rng, corpus.common, DOCUMENT_DONOR_TOKENS) for number in range(count)}
    added = [seconds(changed, index, index.add, SPACE, name, donor) for name, donor in donors.items()]
    removed = [seconds(changed, index, index.remove, name) for name in donors]
    for name, times in (("donor_add_ms", added), ("donor_remove_ms", removed)):
        against = f"median of {count} donors of {DOCUMENT_DONOR_TOKENS} tokens; slowest {max(times) * 1e3:.3f} ms"
        rows.add(name, statistics.median(times) * 1e3, "ms", against, goal=1.0)


def changed(index: SpanIndex, change: Callable[..., object], *arguments: object) -> None:
    """Make a change and wait until the index has done it."""
    change(*arguments)
    index.settle()


def add_many_runs(rows: Results, prompt: TokenArray, lookups: int) -> None:
    """Plan a long prompt that donors hold in hundreds of runs, at the default settings but for the policy."""
    times, shares = list[float](), list[float]()
    settings = load_settings(policy=ReusePolicy.POSITION_FIX)
    request = LookupRequest(7, SPACE, prompt, 0, 32, EngineMode.WRAPPER, True)
    for donors, held in many_runs(prompt):
        index = SpanIndex()
        for number, donor in enumerate(donors):
            index.add(SPACE, f"donor-{number}", donor)
        index.settle()
        planner = Planner(index, settings, settings.policy, 28)
        for _ in range(lookups):
            began = time.thread_time()
            plan = planner.plan(request).plan
            times.append(time.thread_time() - began)
            shares.append(0.0 if plan is None else plan.reused_tokens / held)
    against = f"of the tokens that donors hold of a prompt of {len(prompt)}; {len(times)} look-ups of 256 to 1311 runs"
    against += f", the worst {min(shares):.3f}"
    rows.add("lookup_262k_many_runs_reused_share", statistics.fmean(shares), "ratio", against, 0.95, "higher")
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    limit = settings.lookup_deadline_ms * len(prompt) / DEADLINE_TOKENS
    against = f"processor time of the same look-ups; median {p50:.1f} ms, the deadline is {limit:.0f} ms"
    rows.add("lookup_262k_many_runs_p99_ms", p99, "ms", against)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the index, then measure look-ups, recall, changes and memory."""
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, metavar="FILE", help="English text, UTF-8, may be gzipped")
    given = parser.parse_args(arguments)
    sizes = Sizes() if given.text else QUICK
    rows = Results(arguments, dry=given.text is None)
    corpus = read_corpus(given.text, sizes.documents) if given.text else random_corpus(sizes.documents)
    measure(rows, corpus, sizes)
    rows.write(given.json, "span_lookup")


if __name__ == "__main__":
    main()
