"""Random lives of an engine with our connector: whatever is asked of it, nobody is served a stale byte."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from engine_wrapper.embedded.batch_scheduler import ScheduledBatch
from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig
from engine_wrapper.embedded.request import LlmRequest
from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.connector.request_table import MAX_SILENT_ITERATIONS
from validation.benchmarks.bench_model import make_runner
from validation.benchmarks.pattern_runner import PatternRunner, chain, owner_number
from validation.engines import environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS, BLOCK, BLOCKS = 3, 8, 60
TEXTS, TEXT_TOKENS, VOCABULARY = 5, 160, 251
MOST_LIVE = 12
QUIET_EVERY, TREE_EVERY = 250, 20
# Tokens that each tier holds: a few donors, so that all of them push others out.
HOST_TOKENS, DEVICE_TOKENS, DISK_BYTES = 900, 300, 4 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """An engine. With `wrapper` documents are reused wherever they stand, with all tiers; without, identical prompts
    from the start, from host memory."""

    contract: str
    v2: bool
    overlap: bool
    wrapper: bool = False

    @property
    def name(self) -> str:
        parts = ("v2" if self.v2 else "v1", "overlap" * self.overlap, "wrapper" * self.wrapper)
        return "-".join(filter(None, (self.contract, *parts)))


CASES = (
    Case("1.1", v2=False, overlap=False),
    Case("1.2", v2=False, overlap=True),
    Case("1.3rc", v2=False, overlap=True),
    Case("main", v2=False, overlap=False),
    Case("main", v2=True, overlap=False),
    Case("main", v2=True, overlap=True),
    Case("1.2", v2=False, overlap=True, wrapper=True),
    Case("main", v2=False, overlap=False, wrapper=True),
    Case("main", v2=True, overlap=True, wrapper=True),
)


@contextmanager
def random_life(case: Case, folder: Path) -> Iterator[Life]:
    """An engine of the case with nothing in it; `folder` is for its model and its donors' files."""
    runner = make_runner(folder, "cpu", LAYERS)
    pattern = cast("PatternRunner", PatternRunner.from_model(runner.model, folder))
    facts = runner.facts
    token_bytes = LAYERS * 2 * facts.kv_heads * facts.head_dim * 4
    variables = {
        "POLICY": "exact",
        "MODEL_REVISION": "random",
        "TOKENIZER_REVISION": "none",
        "MIN_SPAN": "32",
        "MIN_REUSE_RATIO": "0.1",
        "MIN_DONOR_TOKENS": "32",
        "HOST_BYTES": str(HOST_TOKENS * token_bytes),
        "EMBEDDER": "off",
        "METRICS": "0",
    }
    if case.wrapper:
        variables |= {
            "POLICY": "position_fix",
            "DEVICE_BYTES": str(DEVICE_TOKENS * token_bytes),
            "DISK_BYTES": str(DISK_BYTES),
            "DISK_PATH": str(folder),
        }
    with environment({f"SEMBLEND_{name}": value for name, value in variables.items()}):
        llm = LLM(
            model=folder,
            runner=pattern,
            contract=case.contract,
            disable_overlap_scheduler=not case.overlap,
            layer_hooks=case.contract == "1.1",
            max_num_tokens=48,
            max_batch_size=6,
            kv_cache_config=KvCacheConfig(
                tokens_per_block=BLOCK, max_tokens=BLOCK * BLOCKS, use_kv_cache_manager_v2=case.v2
            ),
            kv_connector_config=KvCacheConnectorConfig(
                connector_module="engine_wrapper.connector" if case.wrapper else "semblend_trt.connector",
                connector_scheduler_class="SemBlendKvConnectorScheduler",
                connector_worker_class="SemBlendKvConnectorWorker",
            ),
        )
    with llm:
        yield Life(llm, case)


class Life:
    """One engine, what is asked of it, and what must hold at any time.

    `counts` tells what happened; of its `steps` nothing went wrong. `step` and `quiet` raise AssertionError where
    something does not hold.
    """

    def __init__(self, llm: LLM, case: Case) -> None:
        self.counts: Counter[str] = Counter()
        self._llm, self._random = llm, random.Random(case.name)
        self._pauses, self._moves = case.v2, case.wrapper
        self._executor = llm.executor
        self._runner = cast("PatternRunner", llm.executor.model_runner)
        self._texts = [self._tokens(TEXT_TOKENS) for _ in range(TEXTS)]
        self._live: list[LlmRequest] = []

    def step(self) -> None:
        """Asks one thing of the engine."""
        action = self._random.random()
        if action < 0.22 and len(self._live) < MOST_LIVE:
            self._admit()
        elif action < 0.26 and self._live:
            self.counts["aborts"] += self._executor.abort(self._random.choice(self._live))
        elif action < 0.30 and self._live and self._pauses:
            self._executor.pause(self._random.choice(self._live))
        elif action < 0.32:
            self._evict()
        elif action < 0.36:
            self._executor.poll_transfers()
        else:
            self._executor.step()
        self._settle_finished()
        number = self.counts["steps"] + 1
        if number % TREE_EVERY == 0:
            self._check_tree()
        if number % QUIET_EVERY == 0:
            self.quiet()
        self.counts["steps"] = number

    def quiet(self) -> None:
        """Once everything has ended, nobody holds anything."""
        self._llm.run_until(lambda: all(request.is_finished for request in self._live))
        self._llm.settle()
        self._settle_finished()
        scheduler, worker = self._llm.connector_scheduler, self._llm.connector_worker
        connector = self._executor.connector
        assert connector is not None
        for _ in range(MAX_SILENT_ITERATIONS + 1 if len(scheduler._requests) else 0):  # cancelled, and not told of
            connector.build_scheduler_output(ScheduledBatch(), self._llm.block_manager.block_ids)
            connector.handle_metadata()
            connector.start_load_kv(None)
        assert self._llm.block_manager.num_free_blocks == BLOCKS
        assert self._executor.num_unfinished == 0
        assert (self._executor.pending_transfers, connector._asked, connector._reported) == ([], set(), {})
        assert len(scheduler._requests) == 0
        assert set(worker._followed) <= set(scheduler._forgotten)
        assert not scheduler._runtime.faults
        assert scheduler.outcomes.reasons().get("internal_error", 0) == 0
        scheduler._drain()  # otherwise it hears of ended saves with the next request
        assert (len(scheduler._runtime.active_plans), scheduler._runtime.active_plans._exact_tokens) == (0, {})
        if scheduler.library is not None:
            stats = scheduler.library.catalog.stats()
            assert (stats.leases, stats.saving) == (0, 0)
            for name in ("evicted", "demoted", "released", "lifted", "fetched"):
                self.counts[f"donors_{name}"] = getattr(stats, name)
        self.counts["starts_again"] = self._runner.started_again

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]

    def _admit(self) -> None:
        text = self._random.choice(self._texts)
        head = self._tokens(self._random.choice((0, 5, 13)) if self._moves else 0)
        tokens = head + text[: self._random.randrange(1, TEXT_TOKENS)] + self._tokens(self._random.choice((1, 3, 30)))
        request = LlmRequest(
            self.counts["admissions"] + 1,
            tokens,
            SamplingParams(max_tokens=8, ignore_eos=True),
            max_new_tokens=self._random.randrange(1, 9),
            cache_salt=self._random.choice((None, None, "a", "b")),
            lora_task_id=self._random.choice((None, None, None, 7)),
        )
        self.counts["admissions"] += 1
        self._runner.requests[request.request_id] = request
        self._executor.enqueue([request])
        self._live.append(request)

    def _evict(self) -> None:
        """Other prompts push blocks out of the reuse tree."""
        for _ in range(self._random.randrange(1, 30)):
            self.counts["evictions"] += evict_block(self._llm)

    def _settle_finished(self) -> None:
        for request in [each for each in self._live if each.is_finished]:
            self._live.remove(request)
            assert request.finish_reason in ("length", "cancelled"), request.error
            rows = self._runner.rows.pop(request.request_id, None)
            if rows is None:
                continue  # it was cancelled before it ran
            rows.check_answer(request.all_tokens)
            self.counts["hits"] += request.py_num_connector_matched_tokens > 0
            self.counts["moved_hits"] += not rows.is_cold
            self.counts["reused_tokens"] += request.py_num_connector_matched_tokens

    def _check_tree(self) -> None:
        """Every block that is offered for reuse holds what a cold run would have written."""
        for key, node in self._llm.block_manager._tree.walk():
            tokens: tuple[int, ...] = ()
            step = node
            while step.parent is not None:
                tokens, step = step.tokens + tokens, step.parent
            numbers = chain(owner_number(key), tokens)[-BLOCK:]
            self._runner.check((node.block_id,), 0, numbers, [False] * BLOCK)
            self.counts["published_blocks_checked"] += 1


def evict_block(llm: LLM) -> bool:
    """Takes the block that was not used for longest out of the engine's own prefix cache; False when it is empty."""
    manager = llm.block_manager
    block = manager._tree.evict()
    if block is None:
        return False
    manager._free.append(block)
    return True
