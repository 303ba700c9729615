"""Where requests are placed: with their text, by the caller's own donors only; by load where nothing can be known."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from semblend_trt.fleet.directory import Directory
from semblend_trt.fleet.router.app import Placer, ReadPrompt
from semblend_trt.fleet.router.counters import RouterCounters
from semblend_trt.fleet.router.prompts import ReadingThreads
from semblend_trt.fleet.router.tenants import Caller
from semblend_trt.fleet.routing_policy import Replica, SpanOverlap
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from semblend_trt.fleet.wire import Announcement, Emitter, EventFormat, EventWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from semblend_trt.namespace import CacheNamespace

DOCUMENT = "".join(chr(97 + at) for at in np.random.default_rng(0).integers(0, 26, 400))
PROMPT = "Another instruction. " + DOCUMENT + " And a question?"
REPLICAS = [Replica((1, 0), 0), Replica((2, 0), 0)]


@pytest.fixture
def directory(base_namespace: CacheNamespace, tokenizer: Any) -> Directory:
    """Worker 2 holds the document, for the salt "a" alone."""
    namespace = base_namespace.for_request("a", None)
    tokens = tokenizer.encode("Some instruction. " + DOCUMENT)
    sketch = sketch_of(tokens, sketch_key(namespace.key, "a")).to_bytes()
    writer = EventWriter(Emitter(2, 0, 1), EventFormat.JSON)
    known = Directory()
    known.observe(writer.reset())
    known.observe(writer.registered(Announcement("d", namespace, "host", len(tokens), 1, sketch)))
    return known


@pytest.fixture
def place(tokenizer: Any, directory: Directory) -> Callable[..., Any]:
    """place(salt, body, ...): the prompt as it was read, the worker that was chosen, and the counters."""

    def run(
        salt: str | None,
        body: dict[str, Any],
        *,
        reader: Any = tokenizer,
        known: Any = directory,
        seconds: float = 60.0,
    ) -> tuple[ReadPrompt, tuple[int, int], RouterCounters]:
        counters, caller = RouterCounters(), Caller("tenant", salt)
        placer = Placer(ReadingThreads(reader), known, SpanOverlap(), counters, read_seconds=seconds)
        try:
            prompt = asyncio.run(placer.read(body, 4000, caller))
            return prompt, placer.choose(prompt, caller, REPLICAS).worker, counters
        finally:
            placer.close()

    return run


def fallbacks(counters: RouterCounters, reason: str) -> float | None:
    return counters.registry.get_sample_value("semblend_router_fallbacks_total", {"reason": reason})


def test_a_request_goes_where_its_document_is(place: Callable[..., Any], tokenizer: Any) -> None:
    prompt, worker, _ = place("a", {"prompt": PROMPT})
    assert worker == (2, 0)
    assert prompt.tokens == len(tokenizer.encode(PROMPT))
    (holder,) = prompt.holders
    assert 0.7 * len(DOCUMENT) <= holder.tokens <= prompt.tokens


@pytest.mark.parametrize("salt", ["b", None, ""])
def test_other_tenants_get_no_signal(place: Callable[..., Any], salt: str | None) -> None:
    prompt, worker, _ = place(salt, {"prompt": PROMPT})
    assert prompt.holders == ()
    assert worker == (1, 0)


def test_what_cannot_be_read_is_placed_by_load(place: Callable[..., Any]) -> None:
    prompt, worker, counters = place("a", {"prompt": 5})
    assert (prompt.token_ids, prompt.tokens, worker) == (None, 1000, (1, 0))
    assert fallbacks(counters, "unread_prompt") == 1


def test_ids_that_are_no_tokens_are_placed_by_load(place: Callable[..., Any]) -> None:
    for ids in ([1 << 70], [-1] * 64):
        _, worker, counters = place("a", {"prompt": ids})
        assert worker == (1, 0)
        reasons = ("unread_prompt", "directory_failed")
        assert sum(fallbacks(counters, reason) or 0 for reason in reasons) == 1


def test_a_tokenizer_that_fails_is_no_failure(place: Callable[..., Any]) -> None:
    class Broken:
        def encode(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("already borrowed")

    prompt, worker, counters = place("a", {"prompt": PROMPT}, reader=Broken())
    assert (prompt.token_ids, worker) == (None, (1, 0))
    assert fallbacks(counters, "unread_prompt") == 1


def test_a_slow_tokenizer_is_not_waited_for(place: Callable[..., Any]) -> None:
    go_on = threading.Event()

    class Slow:
        def encode(self, *_: Any, **__: Any) -> Any:
            go_on.wait(60)
            return [1]

    prompt, worker, counters = place("a", {"prompt": PROMPT}, reader=Slow(), seconds=0.01)
    go_on.set()
    assert (prompt.token_ids, worker) == (None, (1, 0))
    assert fallbacks(counters, "slow_reading") == 1


def test_a_directory_that_fails_is_no_failure(place: Callable[..., Any]) -> None:
    class Broken:
        def holders(self, *_: Any, **__: Any) -> Any:
            raise MemoryError

    prompt, worker, counters = place("a", {"prompt": PROMPT}, known=Broken())
    assert (prompt.holders, worker) == ((), (1, 0))
    assert prompt.token_ids is not None
    assert fallbacks(counters, "directory_failed") == 1


def test_without_a_directory_nobody_holds_anything(place: Callable[..., Any]) -> None:
    prompt, worker, _ = place("a", {"prompt": PROMPT}, known=None)
    assert (prompt.holders, worker) == ((), (1, 0))
