"""What an embedding costs, and what it adds to a scheduler call that does not wait for it.

`python -m benchmarks.lookup.embedding --json benchmarks/results/<machine>`. Texts are random syllables. Rows that
need ONNX Runtime or the sentence model are skipped, with a line, where these are not installed.
"""

from __future__ import annotations

import itertools
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.program import run_counted, seconds
from kernels.layout import KvGeometry
from semblend_trt.config import EmbedderKind
from semblend_trt.connector.scheduler import SemBlendKvConnectorScheduler
from semblend_trt.errors import ConfigurationError
from semblend_trt.runtime import PoolFacts, runtime_for
from semblend_trt.semantic.embedders import embedder_for
from validation.results import Results, say

if TYPE_CHECKING:
    import numpy.typing as npt

    from semblend_trt.semantic.embedders import Embedder

PROMPT_TOKENS = 8192
CALLS = 300
PAUSE_S = 0.02
EXTRA_GOAL_MS = 0.1
MODEL = Path(__file__).resolve().parents[2] / "validation" / "assets" / "model"

SYLLABLES = (
    "ba", "cor", "del", "en", "fi", "gra", "hol", "in", "ju", "ker", "lam", "mo", "ner", "or", "pa", "ri", "st", "tu",
)  # fmt: skip


def text_of_tokens(count: int) -> str:
    """Text of `count` tokens of the sentence model's tokenizer. Raises ConfigurationError without the model."""
    from semblend_trt.model_tokenizer import tokenizer_file
    from semblend_trt.semantic.sentence_model import sentence_model

    tokenizer = tokenizer_file(sentence_model(None, "onnx", "onnx").folder)
    rng = np.random.default_rng(0)
    text = " ".join("".join(rng.choice(SYLLABLES, rng.integers(1, 4)).tolist()) for _ in range(count))
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return text[: encoding.offsets[count - 1][1]]


def milliseconds(embedder: Embedder, text: str, rounds: int) -> float:
    """The time of the fastest round, in milliseconds: machines have other work."""
    embedder.embed([text])
    return min(seconds(embedder.embed, [text]) for _ in range(rounds)) * 1e3


def measure_embedders(results: Results) -> None:
    """Adds the row of the ONNX embedder, with the other embedders' times in its baseline; those without their model are
    skipped."""
    rounds = {EmbedderKind.STATIC: 20, EmbedderKind.JACCARD: 20, EmbedderKind.MINILM: 2, EmbedderKind.ONNX: 3}
    taken = {}
    for kind in rounds:
        try:
            taken[kind] = milliseconds(embedder_for(kind), text_of_tokens(PROMPT_TOKENS), rounds[kind])
        except ConfigurationError as error:
            say(f"{kind.value}: skipped: {error}")
    value = taken.pop(EmbedderKind.ONNX, None)
    if value is not None:
        beside = ", ".join(f"{kind.value} {each:.1f} ms" for kind, each in taken.items())
        baseline = f"all-MiniLM-L6-v2 by ONNX Runtime on half of the cores, windows of 256 tokens; beside it: {beside}"
        results.add("embed_8k_ms", value, "ms", baseline)


class Arguments:
    """An engine's arguments, by which its runtime is found."""

    model = str(MODEL)


class Engine:
    """The parts of an engine that a scheduler uses: arguments, a registered pool, and requests."""

    def __init__(self, embedder: str) -> None:
        self._llm_args = Arguments()
        runtime_for(self._llm_args).pool = PoolFacts(KvGeometry(8, 2, 64, 32), 4096, torch.float32)
        os.environ["SEMBLEND_EMBEDDER"] = embedder
        self.scheduler = SemBlendKvConnectorScheduler(self._llm_args)
        self._ids = itertools.count()

    def call(self, prompt: npt.NDArray[np.int32]) -> float:
        """Milliseconds of one look-up of a request that is then ended."""
        request: Any = SimpleNamespace(
            request_id=next(self._ids),
            prompt_len=len(prompt),
            token_array=lambda count: prompt[:count],
            cache_salt=None,
        )
        elapsed = seconds(self.scheduler.get_num_new_matched_tokens, request, 0)
        self.scheduler.request_finished(request, [])
        return elapsed * 1e3


def measure_scheduler(results: Results) -> None:
    """Adds the row of the time that the embedder adds to a scheduler call: medians of alternating calls with and
    without it."""
    vocabulary = 4096
    rng = np.random.default_rng(0)
    off, on = Engine("off"), Engine("static")
    times: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(CALLS + CALLS // 10):
        prompt = rng.integers(300, vocabulary, PROMPT_TOKENS, dtype=np.int32)
        for name, engine in (("off", off), ("on", on)):
            # A request every 20 ms: the last one's text is being embedded while some calls run, not while all do.
            time.sleep(PAUSE_S / 2)
            elapsed = engine.call(prompt)
            if number >= CALLS // 10:
                times[name].append(elapsed)
    for engine in (off, on):
        if set(engine.scheduler.outcomes.reasons()) != {"no_donor_match"}:
            raise SystemExit(f"look-ups ended as {engine.scheduler.outcomes.reasons()}, not as no_donor_match")
        engine.scheduler.close()
    middle, high = ({name: float(np.percentile(each, q)) for name, each in times.items()} for q in (50, 95))
    baseline = (
        f"median of {CALLS} look-ups of {PROMPT_TOKENS:,} tokens with static {middle['on']:.3f} ms, without "
        f"{middle['off']:.3f} ms; p95 {high['on']:.3f} and {high['off']:.3f} ms"
    )
    results.add("scheduler_extra_ms", max(0.0, middle["on"] - middle["off"]), "ms", baseline, EXTRA_GOAL_MS)


def run(results: Results) -> None:
    measure_scheduler(results)
    measure_embedders(results)


main = partial(run_counted, "embedding", __doc__, [], run)

if __name__ == "__main__":
    main()
