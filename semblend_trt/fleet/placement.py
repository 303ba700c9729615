"""Placement: to which of a gateway's workers a prompt is sent, by the text that they hold and what waits there.

A library to embed in a gateway, which has the workers' addresses, their health, retries and streams. Load and reuse are
both tokens of prefill: a worker that holds r of a prompt's n tokens and has l tokens to compute has prefilled it after
l + n - r tokens, and n is the same for all."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from semblend_trt.background import quiet_logger
from semblend_trt.fleet.connection import ConnectionOptions, DirectoryReader
from semblend_trt.fleet.directory import LIVE_PROBLEMS, Directory
from semblend_trt.metrics import LOOKUP_BUCKETS, counter, series_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from semblend_trt.config import Settings
    from semblend_trt.fleet.directory import Worker

logger = quiet_logger(__name__)

# A gateway's own name of a worker: the id of a deployment, an instance or a replica.
Name = TypeVar("Name")

# By what a prompt was placed: text and load; load alone, since no candidate holds text of it, since its tokens are not
# known, or since the look-up failed; or not at all, without a candidate.
RESULTS = ("held", "not_held", "unread", "failed", "no_candidate")
# Names of which the last turn is remembered.
_MAX_NAMES = 4096


@dataclass(frozen=True, slots=True)
class Score(Generic[Name]):
    """A candidate's worth for a prompt: the `held` tokens that it is expected to hold less its load."""

    name: Name
    held: int
    worth: float


class Loads(Generic[Name]):
    """Tokens of prefill that a gateway has sent to each worker and that are not answered yet. Belongs to one thread."""

    def __init__(self) -> None:
        self.tokens: Counter[Name] = Counter()

    def sent(self, name: Name, tokens: int) -> Callable[[], None]:
        """Add a request with `tokens` to compute. Call what is returned at its first token and at its end: the first
        call takes them off, further calls do nothing."""
        left = [tokens]
        self.tokens[name] += tokens

        def answered() -> None:
            if left:
                self.tokens[name] -= left.pop()
                self.tokens += Counter()  # drops names without tokens

        return answered


def _say(reason: str, sentence: str) -> None:
    if reason == "id_twice":
        logger.error("%s: %s", reason, sentence)


class Placement:
    """Places prompts. `start` and `stop` run in the event loop in which events are read; `place` waits for nothing.

    Without `options` no events are read, and prompts are placed by load. A `load_weight` below one keeps requests
    longer with a worker that holds their text and has a queue. `tokenizer` is the `CacheNamespace.tokenizer_revision`
    of the tokenizer that made the token ids: engines with another one count as holding nothing. `counts` counts
    RESULTS, and `observe` gets each result and its seconds. Raises ValueError for a weight that is not positive."""

    def __init__(
        self,
        options: ConnectionOptions | None,
        *,
        load_weight: float = 1.0,
        tokenizer: str | None = None,
        observe: Callable[[str, float], None] = lambda _result, _seconds: None,
    ) -> None:
        if not load_weight > 0:
            raise ValueError(f"a load weight of {load_weight}; it must be above 0")
        self._load_weight, self._tokenizer, self._observe = load_weight, tokenizer, observe
        self.directory = Directory(on_problem=_say)
        self._reader = None if options is None else DirectoryReader(options, self.directory)
        self._first_at: dict[Any, float] = {}
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start to read events; return before there is a connection. The reader reconnects for ever."""
        if self._reader is not None:
            await self._reader.start()

    async def stop(self) -> None:
        if self._reader is not None:
            await self._reader.stop()

    def place(
        self,
        token_ids: npt.ArrayLike | None,
        salt: str | None,
        candidates: Mapping[Name, Worker | None],
        load: Mapping[Name, float],
        *,
        tokenizer: str | None = None,
    ) -> tuple[Score[Name], ...]:
        """Return the candidates' scores, the best first; of equals the one that was first longest ago.

        `token_ids` are integers [n], None for a prompt that cannot be read; `salt` is the request's raw cache salt.
        `candidates` maps the gateway's name of a worker to its id and rank in events, None where it has none. `load`
        has the tokens of prefill that wait there, 0 where absent. `tokenizer` is this prompt's, in place of the
        placement's own. Raise nothing: if the look-up fails, load decides."""
        began = time.perf_counter()
        held, result = self._held(token_ids, salt, tokenizer or self._tokenizer)
        weight, last = self._load_weight, self._first_at
        scores = [
            Score(name, tokens := 0 if worker is None else held.get(worker, 0), tokens - weight * load.get(name, 0))
            for name, worker in candidates.items()
        ]
        scores.sort(key=lambda each: (-each.worth, last.get(each.name, 0)))
        if not scores:
            result = "no_candidate"
        else:
            if len(last) >= _MAX_NAMES:
                last = self._first_at = {each: at for each, at in last.items() if each in candidates}
            last[scores[0].name] = began
            if result == "held" and not any(each.held for each in scores):
                result = "not_held"
        self.counts[result] += 1
        self._observe(result, time.perf_counter() - began)
        return tuple(scores)

    def _held(
        self, token_ids: npt.ArrayLike | None, salt: str | None, tokenizer: str | None
    ) -> tuple[dict[Worker, int], str]:
        """Return the tokens that each worker holds, and a result."""
        if token_ids is None:
            return {}, "unread"
        try:
            found = self.directory.holders(token_ids, tenant_salt=salt, tokenizer=tokenizer)
        except Exception as error:  # bad tokens and salts among others: the engine is to refuse them
            logger.warning("a prompt is placed by load, since the look-up failed: %s", error)
            return {}, "failed"
        return {holder.worker: holder.tokens for holder in found}, "held"


class PlacementCounters:
    """Counts for one gateway process, in the registry that its /metrics shows; without prometheus_client, or not
    `enabled`, nothing. Raises nothing."""

    def __init__(self, enabled: bool = True, registry: CollectorRegistry | None = None) -> None:
        self._series = (series_of(self._made, registry, "placements") if enabled else None) or {}

    def _made(self, registry: CollectorRegistry) -> dict[str, Any]:
        from prometheus_client import Histogram

        name = "semblend_placement"
        return {
            "results": counter(registry, f"{name}s", "Requests by what placed them.", "result", known=RESULTS),
            "tokens": counter(registry, f"{name}_tokens", "Prompt and held tokens.", "kind", known=("prompt", "held")),
            "salts": counter(registry, f"{name}_client_salts", "Salts of clients, removed."),
            "seconds": Histogram(f"{name}_seconds", "Look-up and choice.", buckets=LOOKUP_BUCKETS, registry=registry),
            "registry": registry,
        }

    def placed(self, result: str, seconds: float) -> None:
        """Count one placement by its result, one of RESULTS."""
        if self._series:
            self._series["results"].labels(result).inc()
            self._series["seconds"].observe(seconds)

    def sent(self, tokens: int, held: int) -> None:
        """Count the tokens of a request's prompt, and those that its worker is expected to hold."""
        if self._series:
            self._series["tokens"].labels("prompt").inc(tokens)
            self._series["tokens"].labels("held").inc(held)

    def client_salt(self) -> None:
        if self._series:
            self._series["salts"].inc()

    def watch(self, directory: Directory) -> None:
        """Show the directory's donors and problems at each scrape."""
        if self._series:
            self._directory = directory
            self._series["registry"].register(self)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        workers, found = self._directory.status()
        donors = GaugeMetricFamily("semblend_fleet_donors", "Known donors.", labels=["worker"])
        for worker in workers:
            donors.add_metric([worker["name"]], worker["donors"])
        problems = GaugeMetricFamily("semblend_fleet_problems", "What is wrong in the fleet.", labels=["problem"])
        for problem in LIVE_PROBLEMS:
            problems.add_metric([problem], len(found.get(problem, ())))
        yield from (donors, problems)


def counted_placement(
    settings: Settings, registry: CollectorRegistry | None = None, tokenizer: str | None = None
) -> tuple[Placement, PlacementCounters]:
    """Return a gateway's placement as the settings have it, and the counters of what it does."""
    options, counters = ConnectionOptions.of(settings), PlacementCounters(settings.metrics, registry)
    if options is None:
        logger.warning("SEMBLEND_NATS_URL is not set: no donor events are read, and load alone places")
    placement = Placement(options, load_weight=settings.load_weight, tokenizer=tokenizer, observe=counters.placed)
    counters.watch(placement.directory)
    return placement, counters
