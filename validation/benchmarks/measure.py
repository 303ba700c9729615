"""One figure after another, in milliseconds: Transformers cold, the engine cold, and the engine with donors."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig
from engine_wrapper.embedded.sampling import SamplingParams
from validation.benchmarks.stopwatch import Stopwatch
from validation.engines import environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from engine_wrapper.embedded.model_runner import ModelRunner
    from validation.benchmarks.prompts import Prompts

ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
WARM_UPS = 2
PARTS = ("lookup", "move", "forward", "rest")


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements share. `folder` holds the model's configuration; `repeats` runs count for a median;
    `longest` and `sizes` are tokens of the prompts."""

    runner: ModelRunner
    folder: Path
    repeats: int
    prompts: Prompts
    sizes: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.sizes)

    @contextmanager
    def engine(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        warm: bool = True,
        room: int = 2,
        batch: int = 8,
        max_num_tokens: int | None = None,
        contract: str = "embedded",
    ) -> Iterator[LLM]:
        """An engine with `room` for so many of the longest prompts, and of at most `batch` requests at once.

        A prompt runs in one forward, or in chunks of `max_num_tokens`.

        `variables`, without SEMBLEND_, set its connector; none means none. `warm` prepares it for the sizes that are
        measured.
        """
        connector = None
        if variables:
            connector = KvCacheConnectorConfig(
                connector_module="engine_wrapper.connector",
                connector_scheduler_class="SemBlendKvConnectorScheduler",
                connector_worker_class="SemBlendKvConnectorWorker",
            )
        # Random weights have no revision; every engine of the run holds the same ones.
        named = {"MODEL_REVISION": "random", "TOKENIZER_REVISION": "none", **(variables or {})}
        with environment({f"SEMBLEND_{name}": value for name, value in named.items()}):
            llm = LLM(
                self.folder,
                runner=self.runner,
                tensor_parallel_size=self.runner.ranks.size,
                max_num_tokens=max_num_tokens or self.longest,
                enable_chunked_prefill=max_num_tokens is not None,
                max_batch_size=batch,
                max_seq_len=self.longest + 64,
                kv_cache_config=KvCacheConfig(max_tokens=room * (self.longest + 64)),
                kv_connector_config=connector,
                contract=contract,
            )
        with llm:
            if warm:
                llm.warm_up(self.sizes)
            yield llm

    def donor_bytes(self, donors: int) -> int:
        """Bytes of so many donors of the longest prompt."""
        facts = self.runner.facts
        token = facts.num_layers * 2 * facts.kv_heads * facts.head_dim * self.runner.dtype.itemsize
        return donors * (self.longest + 64) * token


@dataclass(slots=True)
class Hits:
    """Times to the first token of prompts behind a donor, and the median split of some more runs.

    `first` is the very first one's, which captures a graph where no shorter prompt has done so.
    """

    times: list[float]
    first: float
    reused: int
    computed: int
    split: dict[str, float] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return statistics.median(self.times)


def ttft_ms(llm: LLM, prompt: list[int]) -> float:
    """From the call to the first token on the host, with the card idle before; transfers have ended after."""
    synchronize()
    output = llm.generate(prompt, ONE_TOKEN)[0]
    assert output.time_to_first_token is not None
    synchronize()
    llm.settle()
    return output.time_to_first_token * 1e3


def transformers_cold(bench: Bench, size: int) -> float:
    """The model itself under SDPA, cache on, logits of the last row, until its token is on the host."""
    model, device = bench.runner.model, bench.runner.device
    model.set_attn_implementation("sdpa")
    times = []
    for _ in range(WARM_UPS + bench.repeats):
        ids = torch.tensor([bench.prompts.fresh(size)], device=device)
        synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[WARM_UPS:])


def engine_cold(bench: Bench, llm: LLM, size: int) -> float:
    times = [ttft_ms(llm, bench.prompts.fresh(size)) for _ in range(WARM_UPS + bench.repeats)]
    return statistics.median(times[WARM_UPS:])


def miss_overhead(bench: Bench, plain: LLM, connected: LLM, size: int, pairs: int) -> float:
    """What a connector without a donor adds, in percent: the median of neighbouring runs, each first in turn."""
    extra = []
    for index in range(WARM_UPS + pairs):
        order = (plain, connected) if index % 2 else (connected, plain)
        times = {id(llm): ttft_ms(llm, bench.prompts.fresh(size)) for llm in order}
        extra.append(100 * (times[id(connected)] / times[id(plain)] - 1))
    return statistics.median(extra[WARM_UPS:])


def hits(
    bench: Bench, llm: LLM, size: int, stopwatch: type[Stopwatch] = Stopwatch, parts: Sequence[str] = PARTS
) -> Hits:
    """Serves a donor, then prompts with its document behind another instruction; `parts` are the stopwatch's.

    Raises AssertionError when a prompt was not served from the donor: its time would say nothing.
    """
    document = bench.prompts.document(size)
    ttft_ms(llm, bench.prompts.donor(document))
    times = []
    for _ in range(WARM_UPS + bench.repeats):
        synchronize()
        output = llm.generate(bench.prompts.shifted(document), ONE_TOKEN)[0]
        assert output.reused_tokens >= len(document), f"{output.reused_tokens} tokens reused, {output.reuse_reason}"
        assert output.time_to_first_token is not None
        times.append(output.time_to_first_token * 1e3)
        llm.settle()
    found = Hits(times[WARM_UPS:], times[0], output.reused_tokens, output.computed_tokens)
    watch = stopwatch(llm)
    splits = [watch.read(ttft_ms(llm, bench.prompts.shifted(document))) for _ in range(bench.repeats)]
    watch.remove()
    found.split = {part: statistics.median([split[part] for split in splits]) for part in parts}
    return found


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
