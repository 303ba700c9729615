"""What saving donors costs the requests that run meanwhile: their decoding, and the next prompt's prefill.

In `python -m benchmarks.embedded.saving` two engines of one random model decode a steady batch while long prompts
come one after the other; one engine saves each prompt to host memory, the other saves none. They take turns, and every
figure is the median over pairs of turns. It is measured a second time as TensorRT-LLM 1.2 serves, whose saves are
read from snapshots. `--layers` is a dry run with a narrow model, which needs no card.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.embedded.bench_model import WARM_UPS, Bench, label, run_model, synchronize
from engine_wrapper.embedded.sampling import SamplingParams
from validation.embedded_engine import ONE_TOKEN

if TYPE_CHECKING:
    from engine_wrapper.embedded.llm import LLM
    from validation.results import Results

SAVING_SLOWDOWN = 1.02
SIZE = 8_192
# Requests that decode, tokens of each of their prompts, and decode steps that are timed behind a donor's end: they take
# about as long as the prefill of the next donor.
DECODING, DECODING_PROMPT, STEPS = 8, 1_024, 32
DONORS = 6
PARTS = ("prefill", "decode", "worst_step")
# The version that gives an ended request's blocks to others, and the name of its rows.
SNAPSHOT_CONTRACT, SNAPSHOT_ROWS = "1.2", "snapshot_"


@dataclass(frozen=True, slots=True)
class Turn:
    """Milliseconds of one turn: `prefill`, a prompt's time to the first token while another's KV is saved; `decode`,
    all decode steps behind its end; `worst_step`, the slowest of them."""

    prefill: float
    decode: float
    worst_step: float


class Load:
    """An engine with a batch that decodes until the end, and long prompts one after the other."""

    def __init__(self, llm: LLM, bench: Bench, size: int, steps: int, turns: int) -> None:
        self._llm, self._bench, self._size, self._steps = llm, bench, size, steps
        # A turn has two prefills, and an iteration at the end of each.
        enough = SamplingParams(max_tokens=turns * (steps + 4), ignore_eos=True)
        prompt = min(DECODING_PROMPT, size // 2)
        self._decoding = [
            llm.generate_async(bench.prompts.fresh(prompt), enough, streaming=False) for _ in range(DECODING)
        ]
        self.turn()

    def turn(self) -> Turn:
        """Two prompts, and then some steps of the batch alone. Raises AssertionError when the batch has ended."""
        gc.collect()
        synchronize()
        self._prefill()
        prefill = self._prefill()
        steps = [self._step() for _ in range(self._steps)]
        assert not any(stream.has_news() for stream in self._decoding), "the decoding batch has ended"
        self._llm.settle()
        synchronize()
        return Turn(prefill, sum(steps), max(steps))

    def _prefill(self) -> float:
        begin = perf_counter()
        stream = self._llm.generate_async(self._bench.prompts.fresh(self._size), ONE_TOKEN, streaming=False)
        self._llm.run_until(stream.has_news)
        return (perf_counter() - begin) * 1e3

    def _step(self) -> float:
        begin = perf_counter()
        assert self._llm.executor.step()
        return (perf_counter() - begin) * 1e3


def run(bench: Bench, rows: Results, size: int, steps: int) -> None:
    """Measures all rows."""
    measure(bench, rows, size, steps)
    measure(bench, rows, size, steps, SNAPSHOT_CONTRACT, SNAPSHOT_ROWS)


def measure(bench: Bench, rows: Results, size: int, steps: int, contract: str = "embedded", kind: str = "") -> None:
    """Measures the rows of an engine that keeps to `contract`; `kind` is part of their names."""
    turns = WARM_UPS + bench.repeats
    decoding = DECODING * (DECODING_PROMPT + (turns + 1) * (steps + 4))
    room = 3 + -(-decoding // bench.longest)
    saving = bench.donors_in("HOST", DONORS)
    without = saving | {"MIN_DONOR_TOKENS": str(2 * bench.longest)}
    batch = DECODING + 1
    with (
        bench.engine(saving, room=room, batch=batch, contract=contract) as kept,
        bench.engine(without, room=room, batch=batch, contract=contract) as dropped,
    ):
        loads = [Load(llm, bench, size, steps, turns + 1) for llm in (kept, dropped)]
        pairs = []
        for index in range(turns):
            order = loads if index % 2 else loads[::-1]
            found = {id(load): load.turn() for load in order}
            pairs.append([found[id(load)] for load in loads])
        saved = list(kept.connector_worker.saver.save_seconds)
        assert not dropped.connector_worker.saver.save_seconds, "the engine without saving has saved"
    assert len(saved) >= 2 * turns, f"{len(saved)} donors were saved in {turns} turns of two"
    rows_of(pairs[WARM_UPS:], size, steps, rows, kind)
    seconds = statistics.median(saved[-2 * bench.repeats :])
    rows.add(
        f"saving_{kind}{label(size)}_ms", seconds * 1e3, "ms", "from the end of a request to its donor in host memory"
    )


def rows_of(pairs: list[list[Turn]], size: int, steps: int, rows: Results, kind: str = "") -> None:
    """Adds the rows of `pairs`, each the turns of the engine that saves and of the one that does not."""
    told = {
        "prefill": f"time to first token of {label(size)} tokens while as many are saved, {DECODING} requests decoding",
        "decode": f"{steps} steps of {DECODING} requests behind the end of {label(size)} tokens that are saved",
        "worst_step": "the slowest of those steps",
    }
    slowdowns = {}
    for part in PARTS:
        ratios = [getattr(kept, part) / getattr(dropped, part) for kept, dropped in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        usual = statistics.median(getattr(dropped, part) for _, dropped in pairs)
        baseline = (
            f"{told[part]}; {usual:,.1f} ms without saving; median of {len(ratios)} neighbouring pairs, half of them "
            f"within {low:.3f} and {high:.3f}"
        )
        slowdowns[part] = middle
        rows.add(f"saving_{kind}slowdown_{part}", middle, "x", baseline)
    largest = max(("prefill", "decode"), key=lambda part: slowdowns[part])
    baseline = f"the same engine and load without saving; {largest}, the larger of prefill and decode"
    rows.add(f"saving_{kind}slowdown", slowdowns[largest], "x", baseline, SAVING_SLOWDOWN)


_SETTINGS = {
    "size": (SIZE, "tokens of the prompts that become donors"),
    "steps": (STEPS, "decode steps that are timed in a turn"),
}
# A prompt runs at once beside the batch that decodes.
main = partial(run_model, "saving", __doc__, run, "--layers 2 --size 512", _SETTINGS, repeats=20, beside=DECODING)


if __name__ == "__main__":
    main()
