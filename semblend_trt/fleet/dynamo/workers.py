"""EngineWorkers: the instances of an endpoint of Dynamo, and which worker of the donor events each of them is."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from semblend_trt.background import OnceAMinute
from semblend_trt.metrics import counter as series
from semblend_trt.outcome import VLLM_RECEIPT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from prometheus_client import CollectorRegistry

    from semblend_trt.fleet.directory import Worker

logger = logging.getLogger(__name__)
logger.addFilter(OnceAMinute())

# What became of requests; `continued`: by another worker, after the first broke off.
RESULTS = ("answered", "continued", "unanswered")
# What was wrong with an instance, once for each request that it was a candidate for, or answered.
PROBLEMS = ("no_connector", "other_tokenizer", "same_worker_id")
# The file of a worker's DYN_TOPOLOGY_MOUNT_PATH that holds its id: any engine's model card repeats it.
TOPOLOGY_DOMAIN = "semblend-worker"
# Seconds for which an instance that failed is asked only where no other is left.
REST_SECONDS = 5.0
# An instance that Dynamo no longer counts as alive has lost its requests after that number of silent seconds. One that
# drains is not counted either, but sends on; one that is merely slow is counted.
SILENT_SECONDS = 5
_WORKER_NAME = re.compile(r"(\d{1,16})(?:\.(\d{1,4}))?")


class ModelCard(NamedTuple):
    """What an instance's model card says: the digests of its tokenizer, and its worker id if it tells one."""

    tokenizer: frozenset[str]
    worker: Worker | None

    @classmethod
    def of(cls, text: str) -> ModelCard:
        """Read a card, JSON as Dynamo keeps it. Raise ValueError, TypeError or AttributeError for anything else."""
        card = json.loads(text)
        digests = re.findall(r'"checksum": "([^"]+)"', json.dumps(card.get("tokenizer")))
        name = ((card.get("runtime_config") or {}).get("topology_domains") or {}).get(TOPOLOGY_DOMAIN)
        return cls(frozenset(digests), None if name is None else worker_of(name))


@dataclass(eq=False)
class EngineWorkers:
    """The instances that may be asked, by Dynamo's ids. Belongs to the event loop's thread.

    `present` gives the instances of the endpoint and `cards` their model cards. Only those with the digests `tokenizer`
    are asked. An instance's worker id comes from its card, or from the receipt of its first answer. `problem` gets the
    name of what is wrong, one of PROBLEMS."""

    present: Callable[[], Collection[int]]
    cards: Callable[[], Mapping[str, str]]
    tokenizer: frozenset[str]
    problem: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _cards: dict[int, ModelCard] = field(default_factory=dict)
    _worker_of: dict[int, Worker] = field(default_factory=dict)
    _resting: dict[int, float] = field(default_factory=dict)

    def candidates(self, tried: Collection[int] = ()) -> dict[int, Worker | None]:
        """Return the instances to choose from and their workers, None where no donors are known to be theirs."""
        present = self.present()
        if self._cards.keys() != set(present):
            self._learn(present)
        usable = [each for each in present if each not in tried and self._is_usable(each)]
        now = self.clock()
        awake = [each for each in usable if self._resting.get(each, now) <= now] or usable
        # One that failed may have come back under another instance already.
        claims = Counter(self._worker_of[each] for each in self._worker_of.keys() - self._resting.keys())
        return {each: self._only_claimed(each, claims) for each in awake}

    def failed(self, instance: int) -> None:
        self._resting[instance] = self.clock() + REST_SECONDS

    def answered(self, instance: int, engine_data: Any) -> Worker | None:
        """Learn from an answer's end, and return the worker; `engine_data` is what Dynamo hands on from the engine."""
        self._resting.pop(instance, None)
        if instance not in self._worker_of:
            try:
                self._worker_of[instance] = worker_of(engine_data["kv_transfer_params"][VLLM_RECEIPT]["worker"])
            except (TypeError, KeyError, ValueError):
                self.problem("no_connector")
                logger.warning("instance %d names no worker id: load alone places there", instance)
        return self._worker_of.get(instance)

    def _learn(self, present: Collection[int]) -> None:
        """Read the cards of new instances, and forget those that are gone."""
        cards = self.cards()
        for instance in set(present) - self._cards.keys():
            try:
                self._cards[instance] = card = ModelCard.of(cards[str(instance)])
            except KeyError:
                continue  # it comes a moment after its instance
            except (ValueError, TypeError, AttributeError) as error:
                self._cards[instance] = card = ModelCard(frozenset(), None)
                logger.warning("the model card of instance %d cannot be read: %s", instance, error)
            if card.worker is not None:
                self._worker_of[instance] = card.worker
        for known in (self._cards, self._worker_of, self._resting):
            for gone in known.keys() - set(present):
                del known[gone]

    def _is_usable(self, instance: int) -> bool:
        if (card := self._cards.get(instance)) is None or card.tokenizer == self.tokenizer:
            return card is not None
        self.problem("other_tokenizer")
        digests = instance, sorted(card.tokenizer), sorted(self.tokenizer)
        logger.error("instance %d is not asked: its tokenizer has the digests %s, prompts are read with %s", *digests)
        return False

    def _only_claimed(self, instance: int, claims: Counter[Worker]) -> Worker | None:
        worker = self._worker_of.get(instance)
        if worker is None or claims[worker] <= 1:
            return worker
        self.problem("same_worker_id")
        logger.error(
            "%d instances are worker %d: load places there until each has its own id", claims[worker], worker[0]
        )
        return None


def worker_of(name: str) -> Worker:
    """Return the id and rank in a worker's name, `3` or `3.0`. Raise ValueError or TypeError for anything else."""
    if (found := _WORKER_NAME.fullmatch(name)) is None:
        raise ValueError(f"{name!r} is no worker, such as 3 or 3.0")
    return int(found[1]), int(found[2] or 0)


def counter(registry: CollectorRegistry, name: str, label: str, values: tuple[str, ...]) -> Callable[[str], None]:
    """Return what counts one of `values`."""
    made = series(registry, f"semblend_dynamo_{name}", f"The component's {name}, by {label}.", label, known=values)
    return lambda value: made.labels(value).inc()
