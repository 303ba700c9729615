"""Engines over one tiny model, each with settings of its own, and a record of what their loads copy."""

import random

import pytest

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from semblend_trt.transfer import load as loader

BLOCK = 16
DEFAULTS = {"POLICY": "position_fix", "METRICS": "0"}


@pytest.fixture
def text():
    """So many random tokens."""

    def draw(seed, length):
        generator = random.Random(seed)
        return [generator.randrange(256) for _ in range(length)]

    return draw


@pytest.fixture
def engine(tiny_qwen2_path, monkeypatch):
    """Builds engines, with the wrapper and policy position_fix unless told otherwise, and shuts them down."""
    engines = []

    def build(module="engine_wrapper.connector", max_tokens=4096, **variables):
        for name, value in (DEFAULTS | variables).items():
            monkeypatch.setenv(f"SEMBLEND_{name}", str(value))
        connector = KvCacheConnectorConfig.ours(module)
        cache = KvCacheConfig(tokens_per_block=BLOCK, max_tokens=max_tokens)
        engines.append(
            LLM(
                model=tiny_qwen2_path,
                dtype="float32",
                device="cpu",
                kv_connector_config=connector,
                kv_cache_config=cache,
            )
        )
        return engines[-1]

    yield build
    for llm in engines:
        llm.shutdown()


@pytest.fixture
def serve():
    """Serves one prompt and waits until it is a donor."""

    def run(llm, prompt, max_tokens=1, **options):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, return_generation_logits=True)
        (output,) = llm.generate([prompt], params, **options)
        llm.settle()
        return output

    return run


@pytest.fixture
def copied(monkeypatch):
    """Tokens of every move that a load makes."""
    lengths, real = [], loader.prepared

    def record(moves, *arguments):
        lengths.extend(move.length for move in moves)
        return real(moves, *arguments)

    monkeypatch.setattr(loader, "prepared", record)
    return lengths
