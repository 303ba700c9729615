"""Repeats sampled requests without reuse and compares the answers: is what engines answer what a cold run answers?

A FILE is JSONL, also a pipe: a line is the body of a request to /v1/completions or /v1/chat/completions, or has it
under "body". Each sampled request is sent as it is, and where KV was reused for it once more, without; run it while the
server has little else to do. Greedy answers under a bound also test the promise of the reuse profile, as
docs/receipts.md says. Workers of the NATS server in SEMBLEND_NATS_URL hear of a promise that is broken, and reuse
only exact text there. It prints a report in JSON, and exits with 1 when a promise is broken and with 2 when nothing
could be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from semblend_trt.cli._server import Server, add_server, said
from semblend_trt.cold_runs import (
    BoundedAnswer,
    DriftMonitor,
    cold_body,
    compared,
    least_kl,
    likelihood_fields,
    likelihoods_in,
    said_in,
)
from semblend_trt.command_line import USAGE_ERROR, number_up_to, printable
from semblend_trt.config import load_settings
from semblend_trt.files import bounded_lines, open_input
from semblend_trt.fleet.connection import BROKEN_PROFILE, RESYNC_SUFFIX, ConnectionOptions, connect_client, flush
from semblend_trt.outcome import RECEIPT, VLLM_RECEIPT

SUMMARY = "repeat sampled requests without reuse, and compare the answers"
DIFFERENCES_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSONL of requests' bodies, or a pipe")
    add_server(parser)
    share = partial(number_up_to, 1, "share")
    about = "share of the requests that are checked (default: %(default)s)"
    parser.add_argument("--share", type=share, default=0.01, help=about)


def run(arguments: argparse.Namespace) -> int:
    """Check the sample and print the report. Raises SemBlendError when the server cannot be used."""
    server = arguments.url
    server.use_key(arguments.api_key)
    checks = SpotChecks(server, ConnectionOptions.of(load_settings()))
    try:
        for body in bodies_of(arguments.files, checks.counts):
            if random.random() < arguments.share:
                checks.check(body)
    finally:
        sys.stdout.write(json.dumps(checks.report(), indent=2) + "\n")
    compared = checks.results["equal"] + checks.results["differs"] + checks.counts["without_reuse"]
    return 1 if checks.broken else 0 if compared else USAGE_ERROR


def bodies_of(files: list[Path], counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the bodies of all files' requests; count `requests`, and lines that hold none as `unread`."""
    for path in files:
        with open_input(path, may_be_pipe=True) as file:
            for line, _ in bounded_lines(file):
                body: Any = None
                with suppress(ValueError, RecursionError):
                    body = json.loads(line)
                    body = body.get("body", body) if isinstance(body, dict) else None
                is_body = isinstance(body, dict) and bool({"prompt", "messages"} & body.keys())
                counts["requests" if is_body else "unread"] += 1
                if is_body:
                    yield body


class SpotChecks:
    """Compares answers of a server with cold runs, tests the promises of its profiles, and tells the workers."""

    def __init__(self, server: Server, options: ConnectionOptions | None) -> None:
        self._server, self._options = server, options
        self.counts, self.results, self._bounds = Counter[str](), Counter[str](), Counter[str]()
        self._drift = DriftMonitor(lambda result: self._bounds.update([result]))
        self._differences: list[dict[str, Any]] = []
        self.broken: list[dict[str, Any]] = []

    def check(self, body: dict[str, Any]) -> None:
        """Send a request, and once more without reuse. Raises SemBlendError when the server is out of reach."""
        self.counts["sampled"] += 1
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        added = likelihood_fields(body)
        if (cold := cold_body({**body, **added})) is None:
            self.results["not_comparable"] += 1
            return
        status, first = self._server.post(path, json.dumps({**body, **added}).encode())
        if status == 400 and added:  # the server may tell no likelihoods
            added, cold = {}, cold_body(body)
            status, first = self._server.post(path, json.dumps(body).encode())
        if status != 200 or cold is None:
            self._fail(status, first)
            return
        receipt = receipt_in(first)
        if receipt.get("reused_tokens") == 0:  # it is a cold run
            self.counts["without_reuse"] += 1
            self._judge(receipt, first, first)
            return
        status, second = self._server.post(path, cold)
        if status != 200:
            self._fail(status, second)
            return
        try:
            told = compared(said_in(first), said_in(second))
        except ValueError as error:
            told = {"result": "failed", "reason": str(error)}
        self.results[told["result"]] += 1
        if told["result"] == "differs" and len(self._differences) < DIFFERENCES_SHOWN:
            self._differences.append(told)
        if added:
            self._judge(receipt, first, second)

    def report(self) -> dict[str, Any]:
        return {
            **{name: self.counts[name] for name in ("requests", "unread", "sampled", "without_reuse")},
            "cold_runs": dict(self.results),
            "bound_checks": dict(self._bounds),
            "differences": self._differences,
            "broken": self.broken,
        }

    def _fail(self, status: int, content: bytes) -> None:
        self.results["failed"] += 1
        sys.stderr.write(printable(f"a request was not answered ({said(status, content)})") + "\n")

    def _judge(self, receipt: dict[str, Any], first: bytes, cold: bytes) -> None:
        """Add an answer to the test of its bound; tell the workers where that finds the promise broken."""
        with suppress(ValueError):  # no bound covers the answer, or the server tells no likelihoods
            bounded = BoundedAnswer.model_validate(receipt)
            kl = least_kl(likelihoods_in(first), likelihoods_in(cold))
            if self._drift.observe(bounded.namespace, bounded, is_over=kl > bounded.max_kl) == "broken":
                found = {"profile": bounded.profile, "namespace": bounded.namespace}
                self.broken.append({**found, "workers_told": self._tell(bounded)})

    def _tell(self, bounded: Any) -> bool:
        if self._options is None or bounded.namespace is None:
            return False
        try:
            asyncio.run(tell_broken(self._options, bounded.profile, bounded.namespace))
        except Exception as error:  # nats-py raises many types
            sys.stderr.write(f"NATS is out of reach, no worker was told: {type(error).__name__}\n")
            return False
        return True


def receipt_in(answer: bytes) -> dict[str, Any]:
    """Return the receipt of an answer, in the usage or where vLLM has it; empty where it is missing."""
    try:
        told = json.loads(answer)
        places = ((told.get("usage"), RECEIPT), (told.get("kv_transfer_params"), VLLM_RECEIPT))
        found = [place.get(name) for place, name in places if isinstance(place, dict)]
    except (ValueError, AttributeError, RecursionError):
        return {}
    return next((each for each in found if isinstance(each, dict)), {})


async def tell_broken(options: ConnectionOptions, profile: str, namespace_key: str) -> None:
    """Tell all workers that a profile's promise is broken in a namespace. Raise what `connect_client` raises."""
    message = {BROKEN_PROFILE: profile, "namespace": namespace_key}
    async with await connect_client(options, name="semblend-trt spot-check") as client:
        await client.publish(options.subject + RESYNC_SUFFIX, json.dumps(message).encode())
        await flush(client)
