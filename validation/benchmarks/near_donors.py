"""Semantic neighbours: is a donor on disk in memory by the time that its text comes?

`python -m validation.benchmarks.near_donors` keeps passages of real prose as donors on disk and starts the engine anew.
Then each passage comes twice: first with the words of its sentences in another order, so that no run of tokens can be
reused, and at once behind it as the donor holds it. Counted are the second look-ups that find the donor in memory, with
an embedder and without one.
"""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.sampling import SamplingParams
from kernels.results import Count, Results, run_counted
from validation.documents import excerpt
from validation.embedded_engine import ONE_TOKEN, disk_tier, drain, evict_prefixes, find_donors, open_llm
from validation.models import shipped_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM

PASSAGES, CHARACTERS, POOL_TOKENS = 64, 2_000, 4_096
EMBEDDER = "static"
IN_MEMORY = 0.9
# What a request decodes while its neighbours are found and fetched.
_ANSWER = SamplingParams(max_tokens=16, ignore_eos=True)


def run(count: int, rows: Results) -> None:
    """Adds the row."""
    texts = [excerpt(random.Random(seed), CHARACTERS).text for seed in range(count)]
    runner = ModelRunner(shipped_model(), device="cpu")
    with tempfile.TemporaryDirectory(prefix="near-donors-") as folder:
        with _engine(runner, Path(folder), "off") as llm:
            find_donors(llm)
            for text in texts:
                llm.generate([text], ONE_TOKEN)
                drain(llm)
        near, alone = (_found_in_memory(runner, Path(folder), kind, texts) for kind in (EMBEDDER, "off"))
    baseline = (
        f"look-ups of {count} passages that donors on disk hold, each right behind one of the same words in another "
        f"order; without an embedder {alone / count:.3g}"
    )
    rows.add("semantic_fetched_ahead_share", near / count, "of look-ups", baseline, IN_MEMORY, "higher")


def _found_in_memory(runner: ModelRunner, folder: Path, embedder: str, texts: Sequence[str]) -> int:
    """Passages of which the second look-up reuses a donor's KV."""
    found = 0
    with _engine(runner, folder, embedder, MIN_DONOR_TOKENS=str(POOL_TOKENS)) as llm:
        find_donors(llm)
        neighbours = llm.connector_scheduler._neighbours
        if neighbours is not None:
            neighbours.drain()
        for seed, text in enumerate(texts):
            (first,) = llm.generate([_reworded(text, seed)], _ANSWER)
            assert not first.reused_tokens, "similarity alone has reused KV"
            (second,) = llm.generate([f"Read this. {text}"], _ANSWER)
            found += second.reused_tokens > 0
            llm.settle()
            evict_prefixes(llm)
    return found


def _engine(runner: ModelRunner, folder: Path, embedder: str, **variables: str) -> LLM:
    settings = {"POLICY": "position_fix", "EMBEDDER": embedder, "LOOKUP_DEADLINE_MS": "5000"}
    settings |= disk_tier(folder) | variables
    return open_llm(shipped_model(), runner.share(), settings, pool_tokens=POOL_TOKENS)


def _reworded(text: str, seed: int) -> str:
    """The words of each sentence in another order."""
    rng = random.Random(seed)
    sentences = [sentence.split() for sentence in text.split(". ")]
    return ". ".join(" ".join(rng.sample(words, len(words))) for words in sentences)


main = partial(run_counted, "near_donors", __doc__, [Count("passages", PASSAGES, "passages, each a donor")], run)


if __name__ == "__main__":
    main()
