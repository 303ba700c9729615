"""How requests ended, as vLLM shows it of its connectors: in its log at every interval and at its /metrics.

Facts: vLLM, `distributed/kv_transfer/kv_connector/v1/metrics.py` (0.28 to 0.32), and `PrefillStats` and
`PrefixCacheStats` of `v1/metrics/stats.py` (0.28 to 0.32)."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from semblend_trt.outcome import TOKEN_KINDS, Outcome

if TYPE_CHECKING:
    from semblend_trt.outcome import ReuseReport
    from semblend_trt.plan import SemanticKvPlan

# Each counter with its label, its help and the values that are there from the start.
_COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "requests": ("outcome", "Requests by how reuse ended for them.", tuple(each.value for each in Outcome)),
    "tokens": ("kind", "Prompt tokens by what became of them.", TOKEN_KINDS),
    "refusals": ("reason", "Requests of which nothing, or not all that was found, was reused, by the reason.", ()),
}


def tell_used(engine: Any, request_id: str | None, plan: SemanticKvPlan, scheduler: Any) -> None:
    """Have vLLM's scheduler, `engine`, count what was used of a plan that has run, in place of what was promised.
    SemBlend's `scheduler` knows it. Counts that a version lacks, or has in another form, stay."""
    with suppress(Exception):
        request, report = engine.requests[request_id], scheduler.reuse_of(plan.request_id)
        tell_prefill(request, report.exact_prefix_tokens, report.reused_tokens)
        hits = engine.connector_prefix_cache_stats
        # A request that this step preempts was not preempted when its hits were counted.
        was_preempted = request.num_preemptions > (not request.num_computed_tokens)
        name = "preempted_hits" if was_preempted else "hits"
        setattr(hits, name, max(0, getattr(hits, name) - plan.matched_tokens + report.reused_tokens))


def tell_prefill(request: Any, own: int, used: int) -> None:
    """Have vLLM's counts of a prompt, sent with its first token, name `own` prefix cache and `used` donor tokens."""
    with suppress(Exception):
        counts = {"num_local_cached_tokens": own, "num_external_cached_tokens": used}
        request.prefill_stats.set(num_prompt_tokens=request.num_prompt_tokens, **counts)


class ReuseStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of one interval; `data` holds them by counter and label. vLLM sends `data` from process to process."""

    def request_ended(self, report: ReuseReport) -> None:
        self._add("requests", report.outcome, 1)
        if report.reason:
            self._add("refusals", report.reason, 1)
        for kind in TOKEN_KINDS:
            self._add("tokens", kind, getattr(report, f"{kind}_tokens") or 0)

    def take(self) -> ReuseStats | None:
        """Return what was counted since the last call, or None."""
        taken = ReuseStats(dict(self.data)) if self.data else None
        self.reset()
        return taken

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> ReuseStats:
        for counter, counts in other.data.items():
            for label, count in counts.items():
                self._add(counter, label, count)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the line of the log: name and count."""
        return {f"{name} {label}": count for name, counts in self.data.items() for label, count in counts.items()}

    def is_empty(self) -> bool:
        return not self.data

    def _add(self, counter: str, label: str, count: int) -> None:
        if count:
            counts = self.data.setdefault(counter, {})
            counts[label] = counts.get(label, 0) + count


class ReuseMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters `vllm:semblend_*`, with vLLM's own labels."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:semblend_{name}", documentation=text, labelnames=[*self._labelnames, label]
            )
            for name, (label, text, _) in _COUNTERS.items()
        }
        for engine, (name, (_, _, labels)) in product(self.per_engine_labelvalues, _COUNTERS.items()):
            for label in labels:
                self._series(engine, name, label)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        from semblend_trt.reasons import counted_as  # only the process that shows the counts needs the names

        for name, counts in transfer_stats_data.items():
            for label, count in counts.items():
                told = counted_as(label) if name == "refusals" else label
                self._series(engine_idx, name, told).inc(count)

    def _series(self, engine: int, name: str, label: str) -> Any:
        return self._counters[name].labels(*self.per_engine_labelvalues[engine], label)
