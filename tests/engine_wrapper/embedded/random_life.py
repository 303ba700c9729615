"""Random lives of engines, in which no stale byte may be served and nothing may leak."""

import logging
import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

from engine_wrapper.embedded.request import LlmRequest, SamplingParams, ScheduledBatch
from kernels.layout import pool_view
from semblend_trt.connector.requests import MAX_SILENT_ITERATIONS
from semblend_trt.errors import SemBlendError
from tests.builders.engine import Engines, disk_tier, drain, drop_batch, evict_block, published_nodes, unfinished
from tests.engine_wrapper.embedded.pattern_runner import INJECTED, PatternRunner, chain, owner_number
from tests.random_models import random_model
from tests.semblend_trt.held_donors import SaverGate, whole

BLOCK, BLOCKS = 8, 60
POOL = {"tokens_per_block": BLOCK, "max_tokens": BLOCK * BLOCKS}
TEXTS, TEXT_TOKENS, VOCABULARY = 5, 160, 251
MOST_LIVE = 12
QUIET_EVERY, ROUGH_QUIET_EVERY, TREE_EVERY = 250, 50, 20
# Each tier holds a few donors only, so that new ones evict others.
HOST_TOKENS, DEVICE_TOKENS, DISK_BYTES = 900, 300, 4 << 20
# Of a rough life: rows of a forward, so that prompts that begin alike run together, and shares of steps.
ROUGH_ROWS = 256
SAVES_GO_ON, FORWARD_FAILS, EVICTS, BEGINS_ALIKE, DROPS = 0.12, 0.03, 0.06, 0.4, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of engine; in a `rough` life prompts begin alike, saves lag, and forwards fail where that is survived."""

    contract: str
    overlap: bool
    wrapper: bool = False
    rough: bool = False

    @property
    def name(self):
        parts = ("overlap" * self.overlap, "wrapper" * self.wrapper, "rough" * self.rough)
        return "-".join(filter(None, (self.contract, *parts)))

    v2 = property(lambda self: self.contract == "1.4")
    survives = property(lambda self: self.contract == "1.2" or (self.v2 and not self.overlap))
    # Whether a request keeps its own blocks until its save has ended.
    holds_saved_blocks = property(lambda self: self.contract != "1.2")


CASES = (
    Case("1.2", overlap=True),
    Case("1.4", overlap=False),
    Case("1.4", overlap=True),
    Case("1.2", overlap=True, wrapper=True),
    Case("1.4", overlap=False, wrapper=True),
    Case("1.4", overlap=True, wrapper=True),
)
HABIT_CASES = (
    Case("1.2", overlap=True, rough=True),
    Case("1.2", overlap=False, wrapper=True, rough=True),
    Case("1.4", overlap=False, rough=True),
    Case("1.4", overlap=True, rough=True),
    Case("1.4", overlap=False, wrapper=True, rough=True),
    Case("1.4", overlap=True, wrapper=True, rough=True),
    Case("embedded", overlap=True, rough=True),
)


@contextmanager
def random_life(case, folder):
    """A new engine of the case; `folder` is for its model and its donors' files."""
    executor_logger = logging.getLogger("engine_wrapper.embedded.executor")
    level = executor_logger.level
    model = random_model("qwen2")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    pattern = PatternRunner(folder, model=model)
    facts = pattern.facts
    token_bytes = facts.num_layers * 2 * facts.kv_heads * facts.head_dim * 4
    least = {"MIN_SPAN": "32", "MIN_REUSE_RATIO": "0.1", "MIN_DONOR_TOKENS": "32"}
    variables = least | {"EMBEDDER": "off", "METRICS": "0", "AUDIT_PATH": ""}
    variables |= {"POLICY": "exact", "HOST_BYTES": str(HOST_TOKENS * token_bytes)}
    if case.wrapper:
        variables |= {"POLICY": "position_fix", "DEVICE_BYTES": str(DEVICE_TOKENS * token_bytes)}
        variables |= disk_tier(folder, DISK_BYTES)
    llm = Engines(None, model=folder, runner=pattern)(
        "engine_wrapper.connector" if case.wrapper else "semblend_trt.connector",
        POOL,
        contract=case.contract,
        disable_overlap_scheduler=not case.overlap,
        max_num_tokens=ROUGH_ROWS if case.rough else 48,
        max_batch_size=6,
        **variables,
    )
    with llm:
        life = Life(llm, case)
        executor_logger.setLevel(logging.CRITICAL)  # forwards fail by the hundred
        try:
            yield life
        finally:
            executor_logger.setLevel(level)
            life.gate.open()  # otherwise the connector would wait for its saves at its end


class Life:
    """One engine and random requests to it; `counts` says what happened."""

    def __init__(self, llm, case):
        self.counts = Counter()
        self._llm, self._random = llm, random.Random(case.name)
        self._case = case
        self.leaked_blocks = 0
        self._executor = llm.executor
        self._runner = llm.executor.model_runner
        self._texts = [self._tokens(TEXT_TOKENS) for _ in range(TEXTS)]
        self._live = []
        self.gate = SaverGate(llm.connector_worker)
        self._freed = {}
        self._watch_pins()
        self._watch_saves()

    @property
    def wrong_tokens(self):
        """Wrong tokens in answers, and in KV that was attended to, offered for reuse or held by donors."""
        return self._runner.wrong_tokens

    def step(self):
        if self._case.rough:
            self._roughen()
        action = self._random.random()
        if action < 0.22 and len(self._live) < MOST_LIVE:
            self._admit()
        elif action < 0.26 and self._live:
            self.counts["aborts"] += self._executor.abort(self._random.choice(self._live))
        elif action < 0.30 and self._executor._active and self._case.v2:
            self._executor._pause(self._random.choice(list(self._executor._active.values())))
        elif action < 0.32:
            self._evict()
        elif action < 0.36:
            self._executor.poll_transfers()
        else:
            self._executor.step()
        self._take_finished()
        number = self.counts["steps"] + 1
        if number % TREE_EVERY == 0:
            self._check_tree()
        if number % (ROUGH_QUIET_EVERY if self._case.rough else QUIET_EVERY) == 0:
            self.quiet()
        self.counts["steps"] = number

    def let_saves_go_on(self):
        behind = self._executor.pending_transfers
        self.counts["saves_behind"] += len(behind)
        self.counts["saves_together"] += len(behind) > 1
        free = set(self._llm.block_manager._free)
        self.counts["blocks_handed_on"] += sum(len(self._freed.get(each, free) - free) for each in behind)
        self._freed.clear()
        self.gate.open()

    def quiet(self):
        """Waits for the end of everything: then nothing is held, and donors hold the right KV."""
        self.gate.open()
        try:
            self._llm.run_until(lambda: all(request.is_finished for request in self._live))
        except SemBlendError:
            for request in self._live:
                self._executor.abort(request)
            self.leaked_blocks = BLOCKS - self._llm.block_manager.num_free_blocks
            raise
        self._llm.settle()
        self._take_finished()
        scheduler, worker = self._llm.connector_scheduler, self._llm.connector_worker
        connector = self._executor.connector
        for _ in range(MAX_SILENT_ITERATIONS + 1 if len(scheduler._requests) else 0):  # cancelled, and not told of
            connector.handle_metadata(ScheduledBatch(), self._llm.block_manager.block_ids)
            connector.worker.start_load_kv(None)
        self.leaked_blocks = BLOCKS - self._llm.block_manager.num_free_blocks
        assert not self.leaked_blocks
        assert unfinished(self._executor) == 0
        assert (self._executor.pending_transfers, connector._reported) == ([], {})
        assert len(scheduler._requests) == 0
        assert set(worker._followed) <= set(scheduler._forgotten)
        assert not scheduler._runtime.faults, scheduler._runtime.faults
        assert "internal_error" not in {report.reason for report in scheduler.outcomes._reports.values()}
        scheduler.take_events()  # otherwise it hears of ended saves with the next request
        assert (len(scheduler._runtime.active_plans), scheduler._runtime.active_plans._exact_tokens) == (0, {})
        stats = scheduler.donor_index.catalog.stats()
        assert (stats.leases, stats.saving) == (0, 0)
        self._check_donors()
        self.counts["starts_again"] = self._runner.started_again
        self.counts["failed_forwards"] = self._runner.failed_forwards

    def _tokens(self, count):
        return [self._random.randrange(VOCABULARY) for _ in range(count)]

    def _roughen(self):
        if self._random.random() < SAVES_GO_ON:
            self.let_saves_go_on()
        self.gate.close()
        if self._random.random() < EVICTS:
            self._evict()
        if self._case.survives and self._random.random() < FORWARD_FAILS:
            self._runner.fails_behind = self._random.choice((0.0, 0.5))
        if self._case.v2 and self._random.random() < DROPS:
            self.counts["dropped_batches"] += 1
            drop_batch(self._executor)

    def _watch_pins(self):
        manager = self._llm.block_manager
        pin, publish = manager.pin, manager.publish

        def published(request_id, tokens):
            before = list(manager._sequences[request_id].block_ids)
            publish(request_id, tokens)
            self.counts["exchanged_blocks"] += before != manager._sequences[request_id].block_ids

        def watched(request_id):
            sequence = manager._sequences[request_id]
            pairs = list(zip(sequence.path, sequence.block_ids, strict=False))
            self.counts["duplicates_freed"] += sum(node.block_id != block for node, block in pairs)
            self._freed[request_id] = set(sequence.block_ids) - {node.block_id for node in sequence.path}
            pin(request_id)

        manager.pin, manager.publish = watched, published

    def _watch_saves(self):
        saver = self._llm.connector_worker.saver
        start, refuse = saver.start, saver.refuse

        def started(intent, *blocks_and_tokens):
            self.counts["exchanged_donors"] += len(intent.block_ids) > 0
            start(intent, *blocks_and_tokens)

        def refused(intent, why):
            self.counts["donors_lost_to_exchange"] += "its blocks are none" in why
            refuse(intent, why)

        saver.start, saver.refuse = started, refused

    def _admit(self):
        text = self._random.choice(self._texts)
        head = self._tokens(self._random.choice((0, 5, 13)) if self._case.wrapper else 0)
        tokens = head + text[: self._random.randrange(1, TEXT_TOKENS)] + self._tokens(self._random.choice((1, 3, 30)))
        request = self._enqueue(tokens)
        if self._case.rough and self._random.random() < BEGINS_ALIKE:
            shared = tokens[: self._random.randrange(1, len(tokens) + 1)]
            self._enqueue(shared + self._tokens(self._random.choice((0, 0, 3))), request)

    def _enqueue(self, tokens, like=None):
        request = LlmRequest(
            self.counts["admissions"] + 1,
            tokens,
            SamplingParams(max_tokens=8, ignore_eos=True),
            max_new_tokens=self._random.randrange(1, 9),
            cache_salt=self._random.choice((None, None, "a", "b")) if like is None else like.cache_salt,
            lora_task_id=self._random.choice((None, None, None, 7)) if like is None else like.lora_task_id,
        )
        self.counts["admissions"] += 1
        self._runner.requests[request.request_id] = request
        self._executor.enqueue([request])
        self._live.append(request)
        return request

    def _evict(self):
        for _ in range(self._random.randrange(1, 30)):
            evict_block(self._llm)

    def _take_finished(self):
        for request in [each for each in self._live if each.is_finished]:
            self._live.remove(request)
            failed = request.finish_reason == "error" and INJECTED in str(request.error)
            assert failed or request.finish_reason in ("length", "cancelled"), request.error
            rows = self._runner.rows.pop(request.request_id, None)
            if rows is None:
                continue  # it was cancelled before it ran
            self._runner.check_answer(rows, request.all_tokens)
            self.counts["hits"] += request.py_num_connector_matched_tokens > 0
            self.counts["moved_hits"] += not rows.is_cold

    def _check_tree(self):
        for key, node in published_nodes(self._llm.block_manager):
            tokens = ()
            step = node
            while step.parent is not None:
                tokens, step = step.tokens + tokens, step.parent
            numbers = chain(owner_number(key), tokens)[-BLOCK:]
            self._runner.check((node.block_id,), 0, numbers, [False] * BLOCK)
            self.counts["published_blocks_checked"] += 1

    def _check_donors(self):
        store = self._llm.connector_worker.store
        drain(self._llm)
        for donor_id in list(store.host._donors):
            with store.host.reading(donor_id) as held:
                self._check_donor(donor_id, whole(held))
        for donor_id in [] if store.device is None else list(store.device._donors):
            with store.device.reading(donor_id) as kv:
                blocks = pool_view(kv.pool, kv.geometry)[kv.block_ids].permute(1, 2, 3, 0, 4, 5)
                self._check_donor(donor_id, blocks.flatten(3, 4)[:, :, :, : store.device.tokens_of(donor_id)])

    def _check_donor(self, donor_id, kv):
        self._runner.check_donor(donor_id, kv)
        self.counts["donors_checked"] += 1
