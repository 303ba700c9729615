"""Serve a model of NVIDIA Dynamo from the workers that hold a prompt's text.

The component registers the model NAME at an endpoint of its own. Dynamo's frontend hands it token ids, and it calls the
instances of the workers' endpoint itself. What the frontend is to know of the model, such as its length and parsers,
comes from the first worker's card. Donor events are read as the settings say (SEMBLEND_NATS_URL and so on); Dynamo's
own variables say where its parts meet. SIGTERM ends it once its requests are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import uvloop
from dynamo.llm import FpmEventSubscriber, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import dynamo_worker

from semblend_trt.command_line import count, ended
from semblend_trt.config import load_settings
from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.connection import ConnectionOptions
from semblend_trt.fleet.dynamo.relay import Relay
from semblend_trt.fleet.dynamo.workers import EngineWorkers, ModelCard
from semblend_trt.fleet.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "semblend_trt.fleet.dynamo"
logger = logging.getLogger(PROGRAM)
# What the frontend does with a model's text is in these fields of a worker's card.
_TOLD = ("context_length", "tool_call_parser", "reasoning_parser", "exclude_tools_when_tool_choice_none")
# A way past the tokens: such a request carries its prompt a second time, which could not be continued.
_NOT_TOLD = "vllm_inference_v1_generate"
_CARD_SECONDS = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM. Return 0, or 2 where it cannot run."""
    arguments = _parser().parse_args(argv)
    logging.getLogger("semblend_trt").setLevel(logging.INFO)

    def run() -> int:
        uvloop.run(dynamo_worker()(_serve)(arguments))
        return 0

    return ended(PROGRAM, run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument("--model-name", required=True, metavar="NAME", help="the model that clients name")
    parser.add_argument("--workers", required=True, type=_endpoint, metavar="A.B.C", help="the workers' endpoint")
    own = "the component's endpoint, in another namespace than the workers (default: %(default)s)"
    parser.add_argument("--endpoint", type=_endpoint, default="public.semblend.generate", metavar="A.B.C", help=own)
    folder = "model whose tokenizer the frontend takes (default: that of the first worker's card)"
    parser.add_argument("--model-path", metavar="FOLDER", help=folder)
    tried = "workers that a request is tried with (default: %(default)s)"
    parser.add_argument("--attempts", type=count, default=3, metavar="N", help=tried)
    return parser


def _endpoint(text: str) -> str:
    parts = text.split(".")
    if len(parts) != 3 or not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no endpoint of Dynamo; name it namespace.component.endpoint")
    return text


async def _serve(runtime: Any, arguments: argparse.Namespace) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.shutdown)
    endpoint, engines = runtime.endpoint(arguments.endpoint), runtime.endpoint(arguments.workers)
    client, cards = await engines.client(), _cards_of(engines)
    logger.info("waiting for a worker of %s", arguments.workers)
    _, first = await _first_card(cards)
    await _register(endpoint, first, arguments)
    own = _cards_of(endpoint)
    _, text = await _first_card(own, str(endpoint.connection_id()))
    options = ConnectionOptions.of(load_settings())
    if options is None:
        logger.warning("SEMBLEND_NATS_URL is not set: no donor events are read, and load alone places")
    placement = Placement(options)
    workers = EngineWorkers(client.instance_ids, cards.get_model_cards, ModelCard.of(text).tokenizer)
    relay = Relay(client, workers, placement, arguments.attempts)
    await placement.start()
    beside = [asyncio.create_task(relay.watch()), asyncio.create_task(_tell_of_others(own))]
    logger.info("serving %s from the workers of %s", arguments.model_name, arguments.workers)
    await endpoint.serve_endpoint(relay.generate, graceful_shutdown=True)
    for task in beside:
        task.cancel()
    await placement.stop()


def _cards_of(endpoint: Any) -> Any:
    cards = FpmEventSubscriber(endpoint)
    cards.start_tracking()
    return cards


async def _first_card(cards: Any, instance: str | None = None) -> tuple[str, str]:
    """Return the first card of an endpoint, or that of an instance, as soon as there is one."""
    while True:
        for name, text in cards.get_model_cards().items():
            if instance in (None, name):
                return name, text
        await asyncio.sleep(_CARD_SECONDS)


async def _register(endpoint: Any, card_text: str, arguments: argparse.Namespace) -> None:
    """Register the model as a worker's card describes it. Raise ConfigurationError where Dynamo does not take it."""
    card = json.loads(card_text)
    runtime, told = card.get("runtime_config") or {}, ModelRuntimeConfig()
    for name in _TOLD:
        if runtime.get(name) is not None:
            setattr(told, name, runtime[name])
    for name, value in (runtime.get("runtime_data") or {}).items():
        if name != _NOT_TOLD:
            told.set_engine_specific(name, json.dumps(value))
    has_chat = "Chat" in card.get("model_type", "")
    path = arguments.model_path or card["source_path"]
    try:
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions if has_chat else ModelType.Completions,
            endpoint,
            path,
            arguments.model_name,
            worker_type=WorkerType.Aggregated,
            runtime_config=told,
            kv_cache_block_size=card.get("kv_cache_block_size"),
            ignore_weights=True,
        )
    except Exception as error:  # Dynamo raises bare exceptions
        raise ConfigurationError(f"Dynamo does not register {path} as {arguments.model_name}: {error}") from error


async def _tell_of_others(own: Any) -> None:
    """Say when another component serves the same endpoint: each knows only the load that it sent itself."""
    known = 1
    while True:
        await asyncio.sleep(1)
        found = len(own.get_model_cards())
        if found > known:
            logger.warning("%d components serve this model; load is not shared, each counts what it sent itself", found)
        known = max(1, found)


if __name__ == "__main__":
    os.environ.setdefault("DYN_SELF_HOST_METADATA", "0")
    sys.exit(main())
