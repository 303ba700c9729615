"""A worker of Dynamo without an engine, for benchmarks and tests.

It answers by a rule of all tokens so far: an answer that another worker continued is the unbroken one. It announces
each prompt as a donor. A first token below SECONDS_BELOW is the seconds until the answer begins. Worker 1
drops what begins with DROPPED in the middle. The answer's end has the salt and headers that came with the request.
"""

import argparse
import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvloop
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import InvalidArgument
from dynamo.runtime import dynamo_worker

from benchmarks.fleet.directory import BASE_NAMESPACE
from benchmarks.fleet.events import announcer_at
from semblend_trt.outcome import VLLM_RECEIPT

SECONDS_BELOW, DROPPED = 16, 17
# Tokens of an answer lie above those that end one; tokens of the longest prompt.
_LOWEST, _COUNT, _LONGEST = 32, 1500, 4096


class RuleEngine:
    """Answers requests as a vLLM with our connector does, `paused` seconds to each token."""

    def __init__(self, worker_id: int, nats: str, paused: float) -> None:
        self._worker_id, self._paused, self._ids = worker_id, paused, itertools.count()
        self._announcer = announcer_at(nats, worker_id, heartbeat_seconds=1.0)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer token by token, `max_tokens` of them. Raise InvalidArgument for a long prompt."""
        tokens, most = list(request["token_ids"]), request["stop_conditions"]["max_tokens"]
        if len(tokens) > _LONGEST:
            raise InvalidArgument(f"the prompt has {len(tokens)} tokens, more than the engine's {_LONGEST}")
        if tokens[0] < SECONDS_BELOW:
            await asyncio.sleep(tokens[0])
        salt = (request.get("routing") or {}).get("cache_salt")
        donor, own = f"{self._worker_id}-{next(self._ids)}", salt and f"dynamo-cache-salt:{salt}"
        self._announcer.intended(donor, BASE_NAMESPACE.for_request(own, None), own)
        self._announcer.held(donor, np.array(tokens, np.int32), "host")
        total, prompt = sum(tokens), len(tokens)
        for place in range(prompt, prompt + most):
            if context.is_stopped():
                return
            if tokens[0] == DROPPED and self._worker_id == 1 and place == prompt + most // 2:
                yield {"token_ids": [], "finish_reason": "cancelled"}
                return
            if self._paused:
                await asyncio.sleep(self._paused)
            token = _LOWEST + (total + place) % _COUNT
            total += token
            piece: dict[str, Any] = {"token_ids": [token]}
            if place == prompt + most - 1:
                used = {"prompt_tokens": prompt, "completion_tokens": most, "total_tokens": prompt + most}
                seen = {"salt": salt, "headers": context.trace_headers()}
                receipt = {VLLM_RECEIPT: {"worker": f"{self._worker_id}.0"}}
                piece |= {"finish_reason": "length", "completion_usage": used}
                piece["engine_data"] = {"seen": seen, "kv_transfer_params": receipt}
            yield piece


async def _serve(runtime: Any, arguments: argparse.Namespace) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.shutdown)
    endpoint, config = runtime.endpoint(arguments.endpoint), ModelRuntimeConfig()
    config.context_length = _LONGEST
    model = (ModelInput.Tokens, ModelType.Completions, endpoint, arguments.model_path, arguments.model_name)
    await register_model(*model, worker_type=WorkerType.Aggregated, runtime_config=config, ignore_weights=True)
    engine = RuleEngine(arguments.worker_id, arguments.nats, arguments.token_seconds)
    await endpoint.serve_endpoint(engine.generate, graceful_shutdown=True)


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("endpoint", "model-path", "model-name", "nats"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--worker-id", type=int, required=True)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    uvloop.run(dynamo_worker()(_serve)(parser.parse_args()))


if __name__ == "__main__":
    main()
