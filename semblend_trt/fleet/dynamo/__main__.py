"""Serve a model of NVIDIA Dynamo from the workers that hold a prompt's text.

The component registers the model NAME at an endpoint of its own. Dynamo's frontend hands it token ids, and it calls the
instances of the workers' endpoint itself. What the frontend has to know of the model comes from the first worker's
card. The settings name the NATS server of donor events. SIGTERM ends it once its requests are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

import uvloop
from dynamo.llm import FpmEventSubscriber, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import dynamo_worker
from prometheus_client import CollectorRegistry, generate_latest

from semblend_trt.command_line import ended
from semblend_trt.config import load_settings
from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.dynamo.relay import PROBLEMS, RESULTS, EngineWorkers, ModelCard, Relay, counter
from semblend_trt.fleet.placement import counted_placement
from semblend_trt.model_files import tokenizer_digest

PROGRAM = "semblend_trt.fleet.dynamo"
logger = logging.getLogger(PROGRAM)
# What the frontend does with a model's text is in these fields of a worker's card.
_TOLD = ("context_length", "tool_call_parser", "reasoning_parser", "exclude_tools_when_tool_choice_none")
# A way past the tokens: such a request carries its prompt a second time, which could not be continued.
_NOT_TOLD = "vllm_inference_v1_generate"
_CARD_SECONDS = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM. Return 0, or 2 where it cannot run."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument("--model-name", required=True, metavar="NAME", help="the model that clients name")
    parser.add_argument("--workers", required=True, type=_endpoint, metavar="A.B.C", help="the workers' endpoint")
    own = "the component's endpoint, in another namespace than the workers (default: %(default)s)"
    parser.add_argument("--endpoint", type=_endpoint, default="public.semblend.generate", metavar="A.B.C", help=own)
    folder = "model whose tokenizer the frontend takes (default: that of the first worker's card)"
    parser.add_argument("--model-path", metavar="FOLDER", help=folder)
    arguments = parser.parse_args(argv)
    logging.getLogger("semblend_trt").setLevel(logging.INFO)
    return ended(PROGRAM, lambda: uvloop.run(dynamo_worker()(_serve)(arguments)) or 0)


def _endpoint(text: str) -> str:
    parts = text.split(".")
    if len(parts) != 3 or not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no endpoint of Dynamo; name it namespace.component.endpoint")
    return text


async def _serve(runtime: Any, arguments: argparse.Namespace) -> None:
    endpoint, engines = runtime.endpoint(arguments.endpoint), runtime.endpoint(arguments.workers)
    client, cards, own = await engines.client(), FpmEventSubscriber(engines), FpmEventSubscriber(endpoint)
    cards.start_tracking()
    own.start_tracking()
    logger.info("waiting for a worker of %s", arguments.workers)
    path = await _register(endpoint, json.loads(await _first_card(cards)), arguments)
    tokenizer = ModelCard.of(await _first_card(own, str(endpoint.connection_id()))).tokenizer
    registry = CollectorRegistry()
    endpoint.metrics.register_prometheus_expfmt_callback(lambda: generate_latest(registry).decode())
    placement, counters = counted_placement(load_settings(), registry, tokenizer_digest(path))
    problem = counter(registry, "problems", "problem", PROBLEMS)
    workers = EngineWorkers(client.instance_ids, cards.get_model_cards, tokenizer, problem)
    relay = Relay(client, workers, placement, counters.sent, counter(registry, "requests", "result", RESULTS))
    await placement.start()
    watching = asyncio.create_task(relay.watch(own.get_model_cards))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.shutdown)
    logger.info("serving %s from the workers of %s", arguments.model_name, arguments.workers)
    await endpoint.serve_endpoint(relay.generate, graceful_shutdown=True)
    watching.cancel()


async def _first_card(cards: Any, instance: str | None = None) -> str:
    """Return the first card of an endpoint, or that of an instance, as soon as there is one."""
    while not (found := [text for name, text in cards.get_model_cards().items() if instance in (None, name)]):
        await asyncio.sleep(_CARD_SECONDS)
    return str(found[0])


async def _register(endpoint: Any, card: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Register the model as a worker's card describes it, and return its folder. Raise ConfigurationError where Dynamo
    does not take it."""
    runtime, told = card.get("runtime_config") or {}, ModelRuntimeConfig()
    for name in _TOLD:
        setattr(told, name, runtime.get(name, getattr(told, name)))
    for name, value in (runtime.get("runtime_data") or {}).items():
        if name != _NOT_TOLD:
            told.set_engine_specific(name, json.dumps(value))
    path = str(arguments.model_path or card["source_path"])
    kind = ModelType.Chat | ModelType.Completions if "Chat" in card["model_type"] else ModelType.Completions
    model = (ModelInput.Tokens, kind, endpoint, path, arguments.model_name)
    known = {"runtime_config": told, "kv_cache_block_size": card.get("kv_cache_block_size"), "ignore_weights": True}
    try:
        await register_model(*model, worker_type=WorkerType.Aggregated, **known)
    except Exception as error:  # Dynamo raises bare exceptions
        raise ConfigurationError(f"Dynamo does not register {path} as {arguments.model_name}: {error}") from error
    return path


if __name__ == "__main__":
    sys.exit(main())
