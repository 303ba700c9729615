"""Random lives of an engine with our connector, of STATEFUL_STEPS steps: 3,000, or 100,000 in a nightly run."""

import json
import os
from itertools import cycle

import pytest
from prometheus_client import CollectorRegistry

from engine_wrapper.embedded.request import output_of
from semblend_trt.audit import AuditLog
from semblend_trt.metrics import Metrics, Series
from semblend_trt.outcome import TOKEN_KINDS
from tests.builders.engine import evict_prefixes
from tests.engine_wrapper.embedded.random_life import CASES, HABIT_CASES, Case, random_life

STEPS = int(os.environ.get("STATEFUL_STEPS", "3000"))
ALL = (*CASES, *HABIT_CASES)


def habits_of(case):
    found = ["failed_forwards"] * (case.rough and case.survives)
    found += ["exchanged_blocks", "dropped_batches"] * (case.rough and case.v2)
    found += ["exchanged_donors"] * (case.rough and case.v2 and case.wrapper)
    found += ["saves_behind", "saves_together"] * case.rough
    return found + ["duplicates_freed", "blocks_handed_on"] * (case.rough and not case.holds_saved_blocks)


@pytest.mark.promise("reuse", "Blocks, leases and requests all return,...")
@pytest.mark.promise("engines", "Pauses, offers in part, dropped batches...")
@pytest.mark.promise(
    "commands",
    "Usage, receipt, audit log, metrics and the engines' own counts say what was used, whatever was promised",
)
@pytest.mark.known_defect(3, 8)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_no_stale_byte_no_lease_and_no_block_is_lost(tmp_path, case, record_property):
    """In the same lives usage, receipt, log and metrics say what was used; those of rough wrappers lose some loads."""
    with random_life(case, tmp_path) as life:
        told = Told(life, tmp_path / "audit.jsonl")
        loses_loads = case.wrapper and case.rough
        if loses_loads:
            told.lose_some_loads()
        for _ in range(-(-STEPS // len(ALL))):
            life.step()
        life.quiet()
        for kind in TOKEN_KINDS:
            counted = told.registry.get_sample_value("semblend_tokens_total", {"kind": kind})
            assert counted == told.audited(kind), kind
        assert told.audited("reused") == told.audited("offered")  # position_fix and exact compute nothing again
        assert told.audited("reused") > 0
    assert told.compared > 0
    assert (told.lost > 0) == loses_loads
    happened, lost = life.counts, life.counts["donors_lost_to_exchange"]
    assert (life.wrong_tokens, life.leaked_blocks, lost) == (0, 0, 0)
    if case.v2:
        figures = {"steps": happened["steps"], "wrong_tokens": life.wrong_tokens, "leaked_pages": life.leaked_blocks}
        for name, value in (figures | {"donors_lost_to_exchange": lost}).items():
            record_property(name, value)
    always = ("admissions", "aborts", "published_blocks_checked", "hits", "donors_checked")
    for name in (*always, *habits_of(case)):
        assert happened[name] > 0, f"{name}: otherwise nothing was tried"
    assert (happened["moved_hits"] > 0, happened["starts_again"] > 0) == (case.wrapper, case.v2)


@pytest.mark.promise(
    "donors", "Blocks count as held where the engine shows that its cache manager holds them, not by its version"
)
@pytest.mark.parametrize("wrapper", [False, True], ids=["stock", "wrapper"])
@pytest.mark.parametrize("contract", ["1.2", "1.4"])
def test_what_is_loaded_is_the_donors_own_under_either_manager(tmp_path, contract, wrapper):
    """Requests that run together begin alike, and others are given their blocks while the thread that saves waits."""
    with random_life(Case(contract, overlap=False, wrapper=wrapper, rough=True), tmp_path) as life:
        for _ in range(12):
            life.gate.close()
            first = life._enqueue(begin := life._tokens(100))
            twin = life._enqueue(begin[:90] + life._tokens(10), first)
            life._llm.run_until(lambda ended=(first, twin): all(each.is_finished for each in ended))
            others = [life._enqueue(life._tokens(100)) for _ in range(3)]
            for _ in range(40):
                life._executor.step()
            life.let_saves_go_on()
            life._llm.run_until(lambda ended=others: all(each.is_finished for each in ended))
            life._llm.settle()
            evict_prefixes(life._llm)
            life._enqueue(twin.all_tokens[:95] + life._tokens(5), twin)
            life.quiet()
        assert (life.wrong_tokens, life.counts["hits"]) == (0, 12)
        assert (life.counts["blocks_handed_on"] > 0) == (contract == "1.2")


class Told:
    """What a life's requests used, and what their usage, the ledger, the audit log and the metrics say of it."""

    def __init__(self, life, path):
        self.used, self.path = {}, path
        self._life, self._scheduler, self._worker = life, life._llm.connector_scheduler, life._llm.connector_worker
        self.registry = CollectorRegistry()
        self._scheduler._audit, self._scheduler._metrics = AuditLog(path), Metrics(Series(self.registry))
        self._plans, self.lost, self.compared = {}, 0, 0
        self._watch_rows()
        self._watch_ends()

    def lose_some_loads(self):
        loader, fails = self._worker.loader, cycle((False, True))
        stock = loader.load

        def load(plans):
            if plans and next(fails):
                self.lost += len(plans)
                return [(plan, OSError("injected")) for plan in plans]
            return stock(plans)

        loader.load = load

    def _watch_rows(self):
        """What the runner was handed is what was used: its own prefix, and the spans of the plan."""
        runner = self._life._runner
        begin, source = runner._begin, runner.plan_source

        def planned(request_id):
            plan = self._plans[request_id] = source(request_id)
            return plan

        def watched(request, part):
            begin(request, part)
            plan = self._plans.pop(request.request_id, None)
            own, donated = request.cached_tokens, part.begin - request.cached_tokens
            self.used[request.request_id] = own, donated if plan is None else sum(s.length for s in plan.spans)

        runner._begin, runner.plan_source = watched, None if source is None else planned

    def _watch_ends(self):
        take = self._life._take_finished

        def watched():
            for request in [each for each in self._life._live if each.finish_reason == "length"]:
                self._compare(request)
            take()

        self._life._take_finished = watched

    def _compare(self, request):
        used, report = self.used[request.request_id], self._scheduler.outcomes.of(request.request_id)
        usage = output_of(request, None, None).usage
        details = usage["prompt_tokens_details"]
        assert (details["cached_tokens"], details["reused_tokens"]) == used
        assert details["computed_tokens"] == request.prompt_len - sum(used)
        assert (report.exact_prefix_tokens, report.reused_tokens) == used
        assert usage["semblend"] == report.receipt
        self.compared += 1

    def audited(self, kind):
        self._scheduler._audit.flush()
        lines = map(json.loads, self.path.open())
        return sum(line[f"{kind}_tokens"] for line in lines if line["event"] == "request_settled")
