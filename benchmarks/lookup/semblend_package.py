"""Lookups of the SemBlend package beside ours: the same prompts and donors, one after the other in one run.

`python -m benchmarks.lookup.semblend_package --python /path/of/its/environment/bin/python --text FILE
--json benchmarks/results/<machine>`, after `pip install semblend` in an environment of its own.

Prompts have 8,192 tokens. A third hold one of 20 documents of 6,000 tokens behind 32 to 512 other ones, a third begin
with one, a third hold none; of the donors a half hold a document, which begins half of these.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lookup.span_corpus import DOCUMENT_TOKENS, RUN_TOKENS, Corpus, read_corpus
from benchmarks.lookup.span_lookup import SPACE
from benchmarks.program import Count, run_counted, seconds
from semblend_trt.discovery.span_index import SpanIndex
from validation.results import Results, say

if TYPE_CHECKING:
    import numpy.typing as npt

LENGTH, DOCUMENTS, MADE_TOKENS = 8_192, 20, 4_000_000
KINDS = ("shifted", "first", "unrelated")
ARMS = {"embedding": "an embedder that knows the document and costs nothing", "jaccard": "no embedding model"}
SAID = {**ARMS, "token_prefix": "the knowing embedder, and its fast path for equal tokens"}


@dataclass(frozen=True, slots=True)
class Case:
    """Donors and prompts int32 [n, LENGTH], and the number of the document that each holds, negative for none."""

    donors: npt.NDArray[np.int32]
    donor_documents: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int32]
    prompt_documents: npt.NDArray[np.int64]


def run(prompts: int, results: Results, python: str, text: Path | None, donors: list[int], arms: list[str]) -> None:
    """Measures the package's arms, then ours, and adds the rows of both."""
    counts = sorted(donors)
    corpus = read_corpus(text, DOCUMENTS, MADE_TOKENS)
    case = make_case(corpus, counts[-1], prompts)
    try:
        measured = {arm: run_package(python, arm, case, counts) for arm in arms}
    except subprocess.CalledProcessError as error:
        sys.exit(f"{python} could not run the package: {error.stderr.strip().splitlines()[-1]}")
    results.measured.versions["semblend"] = next(iter(measured.values()))["version"]
    add_rows(results, measured, own_lookups(case, counts), corpus.source)


def make_case(corpus: Corpus, donors: int, prompts: int) -> Case:
    """Seeded; every other donor holds a document, and of three prompts two do."""
    rng = np.random.default_rng(8)
    donor_documents = np.where(np.arange(donors) % 2 == 0, np.arange(donors) // 2 % DOCUMENTS, -1 - np.arange(donors))
    kinds = np.arange(prompts) % len(KINDS)
    prompt_documents = np.where(kinds == 2, -1_000_000 - np.arange(prompts), rng.integers(0, DOCUMENTS, prompts))
    donor_texts = [
        _text(corpus.common, corpus, rng, document, number % 4 == 0) for number, document in enumerate(donor_documents)
    ]
    prompt_texts = [
        _text(corpus.own, corpus, rng, document, kind == 1)
        for document, kind in zip(prompt_documents, kinds, strict=True)
    ]
    return Case(np.stack(donor_texts), donor_documents, np.stack(prompt_texts), prompt_documents)


def _text(
    around: npt.NDArray[np.int32], corpus: Corpus, rng: np.random.Generator, document: int, first: bool
) -> npt.NDArray[np.int32]:
    begin = int(rng.integers(0, len(around) - LENGTH))
    text: npt.NDArray[np.int32] = around[begin : begin + LENGTH].copy()
    if document >= 0:
        shift = 0 if first else int(rng.integers(32, 513))
        text[shift : shift + DOCUMENT_TOKENS] = corpus.documents[document]
    return text


def run_package(python: str, arm: str, case: Case, counts: list[int]) -> dict[str, Any]:
    """The results of `package_lookups` for one arm. Raises CalledProcessError when it fails."""
    say(f"registering {len(case.donors):,} donors with the package: {ARMS[arm]}")
    with tempfile.TemporaryDirectory() as folder:
        np.savez(
            Path(folder) / "case.npz", donors=case.donors, donor_documents=case.donor_documents, prompts=case.prompts,
            prompt_documents=case.prompt_documents, counts=np.asarray(counts),
        )  # fmt: skip
        program = Path(__file__).with_name("package_lookups.py")
        subprocess.run([python, str(program), folder, arm], check=True, capture_output=True, text=True)
        result: dict[str, Any] = json.loads((Path(folder) / f"{arm}.json").read_text("utf-8"))
    return result


def own_lookups(case: Case, counts: list[int]) -> dict[str, Any]:
    """The same by our index: `found` where a run holds the whole document."""
    index = SpanIndex()
    registered, lookups = [], {}
    for number, donor in enumerate(case.donors):
        registered.append(seconds(index.add, SPACE, f"donor-{number}", donor))
        if number + 1 in counts:
            index.find(SPACE, case.prompts[0], RUN_TOKENS)
            times = [seconds(index.find, SPACE, each, RUN_TOKENS) for each in case.prompts]
            longest = [
                max((run.length for run in index.find(SPACE, each, RUN_TOKENS)), default=0) for each in case.prompts
            ]
            lookups[f"ours {number + 1}"] = {"times": times, "found": [each >= DOCUMENT_TOKENS for each in longest]}
    return {"registered": registered[-50:], "lookups": lookups}


def add_rows(results: Results, measured: dict[str, dict[str, Any]], ours: dict[str, Any], source: str) -> None:
    """A row for every arm and number of donors; ours first."""
    every = {key: value for each in (ours, *measured.values()) for key, value in each["lookups"].items()}
    for key, lookups in every.items():
        arm, count = key.split()
        name = f"own_lookup_8k_{count}_ms" if arm == "ours" else f"semblend_package_{arm}_{count}_ms"
        against = f"{count} donors; {SAID.get(arm, 'exact spans')}; {_found(lookups)}"
        results.add(name, _median_ms(lookups["times"]), "ms", baseline=f"{against}; {source}")
    last = max(int(key.split()[1]) for key in ours["lookups"])
    own = _median_ms(ours["lookups"][f"ours {last}"]["times"])
    for arm in SAID:
        if f"{arm} {last}" in every:
            theirs = _median_ms(every[f"{arm} {last}"]["times"])
            against = f"{SAID[arm]}: {theirs:.1f} ms over ours {own:.3f} ms, {last} donors"
            results.add(f"semblend_package_{arm}_over_own", theirs / own, "x", better="higher", baseline=against)
    against = f"median of the last {len(ours['registered'])} of {last} donors of {LENGTH} tokens"
    for arm, each in measured.items():
        value = _median_ms(each["registered"])
        results.add(f"semblend_package_{arm}_add_ms", value, "ms", baseline=f"{against}; {ARMS[arm]}")
    results.add("own_add_8k_ms", _median_ms(ours["registered"]), "ms", baseline=against)


def _median_ms(times: list[float]) -> float:
    return float(np.median(times)) * 1e3


def _found(lookups: dict[str, Any]) -> str:
    """For each kind of prompt, how many found a donor, and how many have a prefix that can be used."""
    parts = []
    for number, kind in enumerate(KINDS):
        found = lookups["found"][number :: len(KINDS)]
        promised = sum(prefix > 0 for prefix in lookups.get("prefixes", [])[number :: len(KINDS)])
        usable = f", {promised} with a usable prefix" if "prefixes" in lookups else ""
        parts.append(f"{kind}: {sum(found)} of {len(found)} found{usable}")
    return "; ".join(parts)


main = partial(
    run_counted,
    "semblend_package",
    __doc__,
    [Count("prompts", 15, "look-ups for each number of donors")],
    run,
    python={"required": True, "metavar": "PYTHON", "help": "interpreter with the package"},
    text={"type": Path, "metavar": "FILE", "help": "English text, UTF-8, may be gzipped"},
    donors={"type": int, "nargs": "+", "default": [100, 1_000, 6_000], "help": "where to look up"},
    arms={"nargs": "+", "choices": ARMS, "default": list(ARMS), "help": "ways to run the package"},
)

if __name__ == "__main__":
    main()
