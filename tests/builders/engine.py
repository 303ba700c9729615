"""Embedded engines of tests: seeded prompts, engines that serve them, and what is done to an engine meanwhile."""

import json
import os
import random
from unittest import mock

import torch

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kernels.layout import KvGeometry
from semblend_trt.reuse_profile import ProfileCheck
from semblend_trt.transfer import load
from semblend_trt.transfer.staging import HostReader, Staging
from validation.families.catalog import FamilyRequest, write_family
from validation.prompts import form_for

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, return_generation_logits=True)
PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)
BLOCK = 16
# A random model's KV deviates by about 1 when its context changes: the highest threshold keeps some of the tokens.
SOME_KEPT, NONE_KEPT = ProfileCheck(layer=1, threshold=1.0), ProfileCheck(layer=1, threshold=0.0)
# Thresholds that never decide: the levels alone do.
KEPT_BY_LEVEL = ProfileCheck(layer=1, threshold=1.0, sample_every=8, sample_threshold=1.0)
NONE_SAMPLED = ProfileCheck(layer=1, threshold=0.0, sample_every=8)


def text(seed, length):
    """Random token ids of bytes, the same ones for the same arguments."""
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


INSTRUCTION, OTHER_INSTRUCTION, QUESTION = text(1, 40), text(2, 73), text(3, 20)
DOCUMENT = text(10, 200)
DONOR = INSTRUCTION + DOCUMENT + text(4, 9)
SHIFTED = OTHER_INSTRUCTION + DOCUMENT + QUESTION

CACHE = {"tokens_per_block": BLOCK, "max_tokens": 4096}


class Engines:
    """Builds engines and keeps them until the test ends; all of them write the audit log `audit`."""

    def __init__(self, audit, **model):
        self._model, self.audit = model, audit
        self.built = []

    def __call__(self, module="engine_wrapper.connector", cache=None, **options):
        """An engine with the connector of `module`, or with none. Options in capitals are its settings."""
        settings = {"AUDIT_PATH": self.audit} | {name: options.pop(name) for name in list(options) if name.isupper()}
        with mock.patch.dict(os.environ, {f"SEMBLEND_{name}": str(value) for name, value in settings.items()}):
            connector = None if module is None else KvCacheConnectorConfig.ours(module)
            fields = {"kv_connector_config": connector, "kv_cache_config": KvCacheConfig(**CACHE | (cache or {}))}
            llm = LLM(**fields | self._model | options)
        self.built.append(llm)
        return llm

    def cold(self):
        return self(None, {"enable_block_reuse": False})

    def events(self, name):
        self.shutdown()
        events = [json.loads(line) for line in self.audit.read_text().splitlines()]
        return [event for event in events if event["event"] == name]

    def shutdown(self):
        for llm in self.built:
            llm.shutdown()


def serve(llm, prompt, params=GREEDY, **options):
    (output,) = llm.generate([prompt], params, **options)
    llm.settle()
    return output


def teach(llm, *prompts):
    for prompt in prompts:
        serve(llm, prompt, PREFILL)


def serve_and_drain(llm, prompt, params=GREEDY, **options):
    """Serves a prompt, and waits until what it began in the background has ended and the scheduler has heard of it."""
    output = serve(llm, prompt, params, **options)
    if llm.connector_worker is not None:
        drain(llm)
        llm.connector_scheduler.take_events()
    return output


def through_staging_memory(llm, monkeypatch, tokens):
    """Has donors go to the host and come from there as on a card: `tokens` tokens of one layer at a time."""
    monkeypatch.setattr(load, "GROUP_BYTES", 1)
    monkeypatch.setattr(load, "GROUPS_AHEAD", 1)
    loader, pool, geometry = llm.connector_worker.loader, llm.executor.pool, geometry_of(llm)

    def staging(slots):
        room = slots * tokens * geometry.bytes_per_token(pool.dtype) // geometry.num_layers
        return Staging(room, slots, geometry, pool.dtype, pool.device)

    if loader._reader is None:
        loader._reader = HostReader(pool.device, loader._rotation, staging(3))
        llm.connector_worker.saver._writer._staging = staging(1)
    return llm


def geometry_of(llm):
    """The sizes of the engine's pool."""
    runner, block = llm.executor.model_runner, llm.llm_args.kv_cache_config.tokens_per_block
    facts = runner.facts
    return KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, block, facts.kv_factor)


def disk_tier(folder, size=1 << 30):
    """The settings of a tier on disk in a folder."""
    return {"DISK_BYTES": str(size), "DISK_PATH": str(folder), "DISK_KEY_PATH": str(folder / "key")}


def evict_block(llm):
    block = llm.block_manager._tree.evict()
    if block is not None:
        llm.block_manager._free.append(block)
    return block is not None


def evict_prefixes(llm):
    while evict_block(llm):
        pass


def drop_batch(executor):
    """Has an engine run nothing of its next batch, whose metadata the connector gets; TensorRT-LLM offers it again."""

    def drop(*_):
        del executor._forward
        executor._take_tokens()

    executor._forward = drop


def unfinished(executor):
    """The number of requests that wait or run."""
    return len(executor._waiting) + sum(not request.is_finished for request in executor._active.values())


def published_nodes(blocks):
    """Each node of a block manager's tree with the key of its root, parents first."""
    for key, root in blocks._tree._roots.items():
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            yield key, node
            stack.extend(node.children.values())


def drain(llm):
    llm.settle()
    for thread in filter(None, (llm.connector_worker.saver, llm.connector_worker.transfers)):
        thread.drain()


def find_donors(llm):
    drain(llm)
    llm.generate([[1]], PREFILL)
    while llm.connector_worker.transfers is not None and llm.connector_worker._runtime.disk.found:
        llm.generate([[1]], PREFILL)


def cases_of(tokenizer, family, groups=6):
    def count(words):
        return len(tokenizer.encode(words, add_special_tokens=False))

    return write_family(family, form_for(tokenizer), count, FamilyRequest((), groups, 1, 700, 3))


def token_ids(output):
    return output.outputs[0].token_ids


def logits_of(output):
    """[tokens, vocabulary]."""
    return torch.stack(list(output.outputs[0].generation_logits))


def assert_same(output, expected, tolerance=1e-4):
    """The same answer; how much of it was reused may differ."""
    assert token_ids(output) == token_ids(expected)
    assert torch.allclose(logits_of(output), logits_of(expected), atol=tolerance, rtol=0)
