"""Prometheus metrics of reuse, in the registry that a host server's /metrics shows. Serving never fails by them.

All engines of a process share one set of series; the donor gauges sum over the engines at each scrape. Labels come from
fixed lists, never from users. Under PROMETHEUS_MULTIPROC_DIR the donor gauges, the faults and the audit log's losses
are missing: only the engine's own process can count them."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from semblend_trt.donors.offload import OffloadEventKind
from semblend_trt.outcome import TOKEN_KINDS, Outcome
from semblend_trt.reasons import FAULTS, counted_as

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from semblend_trt.donors.donor_index import DonorIndex
    from semblend_trt.outcome import Neighbour, ReuseReport

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

# What became of a text: embedded and entered, embedded and searched for, dropped from a full queue, or failed.
TEXT_EVENTS = ("donor_embedded", "request_embedded", "dropped", "failed")
LOOKUP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SIMILARITY_BUCKETS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
_DEVIATION_BUCKETS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_ROOM = 1 << 17  # bytes of prometheus_client's files for counters and histograms when they are new


@functools.cache
def count_here_where_unwritable() -> None:
    """Count in memory where PROMETHEUS_MULTIPROC_DIR is unusable: files there would end the process. Warns once, raises
    nothing. Call it before the first series. Facts: prometheus_client 0.20 to 0.26, `values.py`, `mmap_dict.py`."""
    if (folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR")) is None:
        return
    from prometheus_client import values
    from prometheus_client.mmap_dict import MmapedDict

    try:
        with tempfile.TemporaryFile(dir=folder or ".") as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM)  # a file that is mapped ends the process on a full disk
        # An earlier process of this number may have left files that cannot be read.
        for path in (Path(folder, f"{kind}_{os.getpid()}.db") for kind in ("counter", "histogram")):
            if path.exists():
                MmapedDict(str(path)).close()  # type: ignore[no-untyped-call]
    except Exception as error:
        logger.warning("PROMETHEUS_MULTIPROC_DIR is %r, where this process cannot count: %s", folder, error)
        values.ValueClass = values.MutexValue


class Metrics:
    """Counts for one engine; with `series` None it counts nothing. Thread safe, and raises nothing."""

    def __init__(self, series: Series | None) -> None:
        self._series = series
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_failed = False

    def looked_up(self, seconds: float) -> None:
        """Count the time that one look-up took from the engine."""
        self._try(lambda series: series.lookup_seconds.observe(seconds))

    def request_ended(self, report: ReuseReport) -> None:
        self._try(lambda series: series.request_ended(report))

    def neighbours_found(self, nearest: tuple[Neighbour, ...]) -> None:
        """Count how near the nearest donor of a request is, where one is near at all."""
        if nearest:
            self._try(lambda series: series.similarity.observe(nearest[0].similarity))

    def neighbours_counted(self, event: str) -> None:
        """Count what became of one text that was to be embedded, one of TEXT_EVENTS."""
        self._try(lambda series: series.texts.labels(event).inc())

    def tier_event(self, event: OffloadEventKind) -> None:
        self._try(lambda series: series.tier_events.labels(event.value).inc())

    def weights_changed(self) -> None:
        self._try(lambda series: series.weights_changes.inc())

    def watch(self, donor_index: DonorIndex) -> None:
        """Add the index's donors to the gauges until `close`, or the index's end."""
        self._watched.add(donor_index)
        self._try(lambda series: series.donors.add(donor_index))

    def watch_faults(self, faults: Counter[str]) -> None:
        """Show the engine's calls that could not be answered, by name, as they are counted."""
        self._try(lambda series: series.faults.add(faults))

    def watch_audit(self, dropped: Counter[str]) -> None:
        """Show the audit log's lost events, by reason, as they are counted."""
        self._try(lambda series: series.audit_dropped.add(dropped))

    def close(self) -> None:
        """Take this engine's donors out of the gauges; what was counted stays."""
        self._try(lambda series: series.donors.discard(self._watched))

    def _try(self, count: Callable[[Series], None]) -> None:
        if self._series is None:
            return
        try:
            count(self._series)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("metrics are being lost")


def counter(registry: CollectorRegistry, name: str, documentation: str, *labels: str, known: Iterable[str] = ()) -> Any:
    """Return a new counter. Raise ValueError for a name that is registered already.

    Those `known` of its label exist from the start, so that they differ from a process without counts."""
    from prometheus_client import Counter

    made = Counter(name, documentation, labels, registry=registry)
    for each in known:
        made.labels(each)
    return made


def series_of(make: Callable[[CollectorRegistry], Made], registry: CollectorRegistry | None, what: str) -> Made | None:
    """Return the series that `make` registers, in the host's registry by default. Raise nothing: return None without
    prometheus_client or where they cannot be made, and warn that `what` is not counted."""
    try:
        from prometheus_client import REGISTRY

        count_here_where_unwritable()
        return make(registry or REGISTRY)
    except ImportError:
        return None
    except Exception as error:  # such as ValueError for names that this process has registered already
        logger.warning("%s are not counted: %s", what, error)
        return None


class Series:
    """The series in one registry. Raises ValueError when one of the names is registered already."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Histogram

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"semblend_{name}", documentation, buckets=buckets, registry=registry)

        made, events = functools.partial(counter, registry), [each.value for each in OffloadEventKind]
        text, outcomes = "Requests by how reuse ended for them.", [each.value for each in Outcome]
        self._requests = made("semblend_requests", text, "outcome", known=outcomes)
        text = "Requests of which nothing, or not all that was found, was reused, by the reason."
        self._refusals = made("semblend_refusals", text, "reason")
        self._tokens = made("semblend_tokens", "Prompt tokens by what became of them.", "kind", known=TOKEN_KINDS)
        self.lookup_seconds = histogram("lookup_seconds", "Time that look-ups took.", LOOKUP_BUCKETS)
        text = "Largest deviation of a reused token, of each request with sampled or checked tokens."
        self._kept_deviation = histogram("kept_deviation", text, _DEVIATION_BUCKETS)
        text = "Texts embedded beside serving, or not."
        self.texts = made("semblend_neighbour_texts", text, "event", known=TEXT_EVENTS)
        text = "Similarity of the nearest donor, of each request that has one near."
        self.similarity = histogram("neighbour_similarity", text, _SIMILARITY_BUCKETS)
        text = "Donors' files and ways up, by what happened."
        self.tier_events = made("semblend_tier_events", text, "event", known=events)
        self.weights_changes = made("semblend_weights_changes", "Times that a running engine's weights have changed.")
        self.donors = _DonorGauges()
        self.faults = _EngineCounts("faults", "Calls of the engine that were not answered, by name.", "fault", FAULTS)
        self.audit_dropped = _EngineCounts("audit_dropped", "Events that the audit log lost.", "reason")
        for collector in (self.donors, self.faults, self.audit_dropped):
            registry.register(collector)

    def request_ended(self, report: ReuseReport) -> None:
        self._requests.labels(report.outcome).inc()
        if report.reason:
            self._refusals.labels(counted_as(report.reason)).inc()
        for kind in TOKEN_KINDS:
            if tokens := getattr(report, f"{kind}_tokens"):
                self._tokens.labels(kind).inc(tokens)
        if (report.sampled_tokens or report.checked_tokens) and report.largest_kept is not None:
            self._kept_deviation.observe(report.largest_kept)


class _EngineCounts:
    """Sums all engines, ended ones too, so that no sum falls; `known` names start at 0, as rates miss a first 1."""

    def __init__(self, name: str, documentation: str, label: str, known: Iterable[str] = ()) -> None:
        self._name, self._documentation, self._label = f"semblend_{name}", documentation, label
        self._counts: list[Counter[str]] = [Counter(dict.fromkeys(known, 0))]

    def add(self, counts: Counter[str]) -> None:
        self._counts.append(counts)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        total = Counter[str]()
        for counts in self._counts.copy():
            total.update(dict(counts))  # a copy, which the engine's threads cannot change meanwhile
        family = CounterMetricFamily(self._name, self._documentation, labels=[self._label])
        for name, count in sorted(total.items()):
            family.add_metric([name], count)
        yield family


class _DonorGauges:
    """A Prometheus collector that asks every engine's donor index when it is scraped, so that serving pays nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, donor_index: DonorIndex) -> None:
        with self._lock:
            self._indexes.add(donor_index)

    def discard(self, indexes: Iterable[DonorIndex]) -> None:
        with self._lock:
            self._indexes.difference_update(indexes)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            indexes = list(self._indexes)
        held = [each.held() for each in indexes]

        def total(name: str) -> int:
            return sum(getattr(each, name) for each in held)

        yield GaugeMetricFamily("semblend_donors", "Donors held.", value=total("donors"))
        text = "Donors built from approximate KV, held or being saved."
        yield GaugeMetricFamily("semblend_approximate_donors", text, value=total("approximate"))
        tiers = GaugeMetricFamily("semblend_donor_bytes", "Memory that donors take.", labels=["tier"])
        for tier in ("host", "device", "disk"):
            tiers.add_metric([tier], total(f"{tier}_bytes"))
        yield tiers


_lock = threading.Lock()
_series_in: dict[CollectorRegistry | None, Series | None] = {}


def metrics_for(registry: CollectorRegistry | None = None) -> Metrics:
    """Return an engine's metrics, by default in Prometheus' default registry. Never raise.
    They count nothing without prometheus_client, or when the names are taken."""
    with _lock:
        if registry not in _series_in:
            _series_in[registry] = series_of(Series, registry, "requests and donors")
        return Metrics(_series_in[registry])
