"""What vLLM's own log and /metrics say of reuse: each request once, in the interval in which it ended."""

import collections
import json
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.stats import PrefillStats, PrefixCacheStats

from engine_wrapper.vllm.connector import SemBlendConnector
from engine_wrapper.vllm.stats import ReuseMetrics, ReuseStats, tell_used
from semblend_trt.outcome import Outcome, ReuseReport
from semblend_trt.plan import PlanSpan
from semblend_trt.reasons import OTHER_REASON
from tests.builders.vllm import engine_config, random_tokens
from tests.engine_wrapper.watching import watched
from tests.semblend_trt.plans import plan_of
from tests.test_metrics_page import series
from validation.models import shipped_model

some = random_tokens(3)
LABELS = ["model_name", "engine"]
TOLD = {"reused_tokens": 70, "computed_holes": 20, "offered_tokens": 90, "checked_tokens": 80}
USED = ReuseReport(Outcome.BACKEND_MATERIALIZED_REUSE.value, None, **TOLD)
DECLINED = ReuseReport(Outcome.BACKEND_DECLINED_REUSE.value, "deviation", checked_tokens=None, recomputed_tokens=5)
BOTH = {
    "requests": {"backend_materialized_reuse": 1, "backend_declined_reuse": 1},
    "refusals": {"deviation": 1},
    "tokens": {"offered": 90, "checked": 80, "reused": 70, "recomputed": 5},
}


def counted(*reports):
    stats = ReuseStats()
    for each in reports:
        stats.request_ended(each)
    return stats


def test_an_interval_is_taken_once():
    stats = counted(USED, DECLINED)
    taken = stats.take()
    assert taken.data == BOTH == json.loads(json.dumps(taken.data))
    assert stats.take() is None
    stats.request_ended(USED)
    assert (taken.data, stats.data["requests"]) == (BOTH, {"backend_materialized_reuse": 1})


def test_intervals_add_up_and_leave_what_they_were_made_of():
    first, second = counted(USED).data, counted(DECLINED, DECLINED).data
    build = SemBlendConnector.build_kv_connector_stats
    both = build(first).aggregate(build(second)).aggregate(build())
    assert (both.reduce()["refusals deviation"], both.reduce()["tokens reused"]) == (2, 70)
    assert first == counted(USED).data


class Metrics(ReuseMetrics):
    def __init__(self):
        self.registry = CollectorRegistry()
        kinds = dict.fromkeys([Counter, Gauge, Histogram], lambda **given: Counter(**given, registry=self.registry))
        super().__init__(engine_config(), kinds, LABELS, {0: ["m", "0"], 1: ["m", "1"]})

    def value(self, name, engine, **label):
        labels = {"model_name": "m", "engine": str(engine), **label}
        return self.registry.get_sample_value(f"vllm:semblend_{name}_total", labels)


def test_counters_are_kept_for_each_engine_and_are_there_from_the_start():
    metrics = Metrics()
    assert all(metrics.value("requests", engine, outcome=each.value) == 0 for engine in (0, 1) for each in Outcome)
    for _ in range(2):
        metrics.observe(counted(USED, DECLINED).data, 1)
    metrics.observe({"refusals": {f"reason{number}": 1 for number in range(5)}}, 0)
    assert metrics.value("refusals", 0, reason=OTHER_REASON) == 5
    assert (metrics.value("tokens", 1, kind="reused"), metrics.value("tokens", 0, kind="reused")) == (140, 0)
    assert metrics.value("refusals", 1, reason="deviation") == 2
    assert metrics.value("refusals", 0, reason="deviation") is None


@pytest.mark.promise("commands", "The dashboard shows every series, and...")
def test_docs_metrics_md_names_these_counters_with_their_labels():
    metrics = Metrics()
    metrics.observe(counted(DECLINED).data)
    samples = [each for family in metrics.registry.collect() for each in family.samples if each.name.endswith("_total")]
    assert {each.name: ("counter", set(each.labels)) for each in samples} == series("vllm:")


@pytest.mark.promise("engines", "vLLM's own metrics tell of reuse")
def test_vllm_tells_every_request_once(engine, monkeypatch):
    document = some(400)
    served = engine("position_fix", disable_log_stats=False)
    told = watched(monkeypatch, served.core.scheduler, "make_stats", lambda stats, *_, **__: stats.kv_connector_stats)
    served.ask([*some(20), *document])
    served.settle()
    assert served.ask([*some(33), *document, *some(20)]).cached > 300
    outcomes = served.scheduler.outcomes
    logging = KVConnectorLogging(served.llm.llm_engine.vllm_config.kv_transfer_config)
    for each in filter(None, told):
        logging.observe(each)
    lines = []
    logging.log(log_fn=lambda line, *values: lines.append(line % values))
    evidence = outcomes.of(served.last).figures
    assert evidence["reused_tokens"] > 300
    ended = outcomes._reports.values()
    named = [("requests", "outcome", each.outcome) for each in ended]
    named += [("refusals", "reason", each.reason) for each in ended if each.reason]
    counts = collections.Counter(named)
    counts["tokens", "kind", "reused"] = evidence["reused_tokens"]
    for (name, label, value), count in counts.items():
        assert f"{name} {value}={count}" in lines[0]
        labels = {"model_name": str(shipped_model()), "engine": "0", label: value}
        assert REGISTRY.get_sample_value(f"vllm:semblend_{name}_total", labels) == count


@pytest.mark.parametrize("hits", [None, SimpleNamespace(), PrefixCacheStats(hits=100)], ids=["none", "other", "known"])
@pytest.mark.parametrize("prefill", [None, SimpleNamespace(), PrefillStats()], ids=["none", "other", "known"])
@pytest.mark.parametrize("preempted", [0, 1])
def test_counts_that_a_version_does_not_have_stay_as_they_are(hits, prefill, preempted):
    hits, prefill = deepcopy(hits), deepcopy(prefill)
    request = SimpleNamespace(num_prompt_tokens=100, num_computed_tokens=100, prefill_stats=prefill)
    request.num_preemptions = preempted
    plan = plan_of(PlanSpan("donor", 0, 4, 80), request_id=7, prompt=100)
    ours = SimpleNamespace(reuse_of=lambda number: replace(USED, exact_prefix_tokens=4) if number == 7 else None)
    engine = SimpleNamespace(requests={"a": request}, connector_prefix_cache_stats=hits)
    for name in ("a", "gone", None):
        tell_used(engine, name, plan, ours)
    if isinstance(prefill, PrefillStats):
        told = prefill.num_local_cached_tokens, prefill.num_external_cached_tokens, prefill.num_computed_tokens
        assert told == (4, 70, 26)
    if isinstance(hits, PrefixCacheStats):
        assert (hits.hits, hits.preempted_hits) == ((100, 0) if preempted else (100 - (84 - 70), 0))
