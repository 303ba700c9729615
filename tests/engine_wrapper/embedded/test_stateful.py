"""Random lives of an engine with our connector. KV carries a pattern that says whose it is, so that a stale byte shows.

STATEFUL_STEPS sets the number of steps, 5,000 by default; a nightly run takes 100,000.
"""

from __future__ import annotations

import os
import random
import zlib

import pytest
import torch

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.request import LlmRequest
from kernels.layout import pool_view

STEPS = int(os.environ.get("STATEFUL_STEPS", "5000"))
BLOCK, BLOCKS, VOCABULARY = 8, 60, 257
QUIET_EVERY, TREE_EVERY = 250, 20
ENGINES = [
    ("1.1", False, False),
    ("1.2", False, True),
    ("1.3rc", False, True),
    ("main", False, False),
    ("main", True, False),
    ("main", True, True),
]


def chain(salt, adapter, tokens, known=()):
    """One number for each token, of everything up to it and of who owns it: exact in float32."""
    values = list(known)
    state = values[-1] if values else zlib.crc32(repr((salt, adapter)).encode()) >> 8
    for token in tokens[len(values) :]:
        state = zlib.crc32(token.to_bytes(4, "little"), state) >> 8
        values.append(state)
    return values


def token_after(state):
    return state % 251


class PatternRunner(ModelRunner):
    """Writes each row's number as its KV, and refuses to run on rows that hold another one."""

    def attach_pool(self, pool, geometry):
        self.view = pool_view(pool, geometry)
        self.requests = {}
        self.numbers = {}

    def forward(self, slices, all_rows=False):
        logits = torch.zeros(len(slices), VOCABULARY)
        for row, piece in enumerate(slices):
            request = self.requests[piece.request_id]
            end = piece.begin + len(piece.token_ids)
            tokens = [*request.tokens(0, piece.begin), *piece.token_ids]
            numbers = chain(request.cache_salt, request.lora_task_id, tokens, self.numbers.get(request.request_id, ()))
            self.numbers[request.request_id] = numbers
            held = self.at(piece.block_ids, 0, piece.begin)
            expected = torch.tensor(numbers[: piece.begin], dtype=torch.float32).view(-1, 1, 1, 1, 1)
            assert (held == expected).all(), f"request {request.request_id} would attend to stale bytes"
            written = torch.tensor(numbers[piece.begin : end], dtype=torch.float32).view(-1, 1, 1, 1, 1)
            self.put(piece.block_ids, piece.begin, written)
            logits[row, token_after(numbers[end - 1])] = 1.0
        return logits

    def at(self, block_ids, begin, end):
        positions = torch.arange(begin, end)
        return self.view[torch.tensor(block_ids)[positions // BLOCK], :, :, :, positions % BLOCK]

    def put(self, block_ids, begin, values):
        positions = torch.arange(begin, begin + len(values))
        shape = (len(values), *self.at(block_ids, 0, 1).shape[1:])
        self.view[torch.tensor(block_ids)[positions // BLOCK], :, :, :, positions % BLOCK] = values.expand(shape)


class Life:
    """One engine, what is asked of it, and what must hold at any time."""

    def __init__(self, llm, seed, *, pauses):
        self.llm, self.random, self.pauses = llm, random.Random(seed), pauses
        self.executor, self.runner = llm.executor, llm.executor.model_runner
        self.texts = [[self.random.randrange(256) for _ in range(160)] for _ in range(5)]
        self.live, self.reused, self.next_id = [], 0, 1

    def step(self, number):
        action = self.random.random()
        if action < 0.22 and len(self.live) < 12:
            self.admit()
        elif action < 0.26 and self.live:
            self.executor.abort(self.random.choice(self.live))
        elif action < 0.30 and self.live and self.pauses:
            self.executor.pause(self.random.choice(self.live))
        elif action < 0.32:
            self.evict()
        elif action < 0.36:
            self.executor.poll_transfers()
        else:
            self.executor.step()
        self.settle_finished()
        if number % TREE_EVERY == 0:
            self.check_tree()
        if number % QUIET_EVERY == 0:
            self.quiet()

    def admit(self):
        text = self.random.choice(self.texts)
        tokens = text[: self.random.randrange(1, 160)]
        tokens = tokens + [self.random.randrange(256) for _ in range(self.random.choice((1, 3, 30)))]
        request = LlmRequest(
            self.next_id,
            tokens,
            SamplingParams(max_tokens=8, ignore_eos=True),
            max_new_tokens=self.random.randrange(1, 9),
            cache_salt=self.random.choice((None, None, "a", "b")),
            lora_task_id=self.random.choice((None, None, None, 7)),
        )
        self.next_id += 1
        self.runner.requests[request.request_id] = request
        self.executor.enqueue([request])
        self.live.append(request)

    def evict(self):
        """Other prompts push blocks out of the reuse tree."""
        manager = self.llm.block_manager
        for _ in range(self.random.randrange(1, 30)):
            if (block := manager._tree.evict()) is not None:
                manager._free.append(block)

    def settle_finished(self):
        for request in [each for each in self.live if each.is_finished]:
            self.live.remove(request)
            self.reused += request.py_num_connector_matched_tokens
            assert request.finish_reason in ("length", "cancelled"), request.error
            tokens = request.tokens(0, request.orig_prompt_len)
            for token in request.generated_token_ids:
                assert token == token_after(chain(request.cache_salt, request.lora_task_id, tokens)[-1])
                tokens.append(token)
            del self.runner.requests[request.request_id]
            self.runner.numbers.pop(request.request_id, None)

    def check_tree(self):
        """Every block that is offered for reuse holds what a cold run would have written."""
        for key, node in self.llm.block_manager._tree.walk():
            tokens, step = (), node
            while step is not None and step.parent is not None:
                tokens, step = step.tokens + tokens, step.parent
            numbers = chain(key.cache_salt, key.lora_task_id, tokens)[-BLOCK:]
            held = self.runner.at((node.block_id,), 0, BLOCK)
            assert (held == torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1, 1, 1)).all()

    def quiet(self):
        """Once everything has ended, nobody holds anything."""
        self.llm.run_until(lambda: all(request.is_finished for request in self.live))
        self.llm.settle()
        self.settle_finished()
        scheduler, worker = self.llm.connector_scheduler, self.llm.connector_worker
        assert self.llm.block_manager.num_free_blocks == BLOCKS
        assert (len(self.executor._active), len(self.executor._waiting)) == (0, 0)
        assert self.executor.pending_transfers == []
        assert self.executor.connector._asked == set()
        assert self.executor.connector._reported == {}
        assert len(scheduler._requests) == 0
        assert set(worker._followed) <= set(scheduler._forgotten)
        assert not scheduler._runtime.faults
        assert scheduler.outcomes.reasons().get("internal_error", 0) == 0
        if scheduler.library is not None:
            assert scheduler.library.catalog.stats().leases == 0
        assert len(scheduler._runtime.active_plans) == 0


@pytest.mark.parametrize(("contract", "v2", "overlap"), ENGINES)
def test_no_stale_byte_no_lease_and_no_block_is_lost(tiny_qwen2_path, monkeypatch, contract, v2, overlap):
    for name, value in {
        "POLICY": "exact",
        "MIN_SPAN": "32",
        "MIN_REUSE_RATIO": "0.1",
        "MIN_DONOR_TOKENS": "32",
        "HOST_BYTES": str(900 * 3 * 2 * 2 * 16 * 4),
        "METRICS": "0",
    }.items():
        monkeypatch.setenv(f"SEMBLEND_{name}", value)
    llm = LLM(
        model=tiny_qwen2_path,
        runner=PatternRunner(tiny_qwen2_path, dtype="float32", device="cpu"),
        contract=contract,
        disable_overlap_scheduler=not overlap,
        layer_hooks=contract == "1.1",
        max_num_tokens=48,
        max_batch_size=6,
        kv_cache_config=KvCacheConfig(tokens_per_block=BLOCK, max_tokens=BLOCK * BLOCKS, use_kv_cache_manager_v2=v2),
        kv_connector_config=KvCacheConnectorConfig(
            connector_module="semblend_trt.connector",
            connector_scheduler_class="SemBlendKvConnectorScheduler",
            connector_worker_class="SemBlendKvConnectorWorker",
        ),
    )
    with llm:
        life = Life(llm, seed=f"{contract} {v2} {overlap}", pauses=v2)
        for number in range(1, STEPS // len(ENGINES) + 1):
            life.step(number)
        life.quiet()
        assert life.reused > 0  # otherwise nothing was tried
