"""What look-ups need is built when the caches are registered; Transformers is imported in one way."""

import ast

import pytest
import torch

from engine_wrapper.embedded.llm_args import LlmArgs
from engine_wrapper.embedded.request import LlmRequest, SamplingParams
from semblend_trt.connector import SemBlendKvConnectorScheduler, SemBlendKvConnectorWorker
from semblend_trt.connector.contract import LlmRequestView
from semblend_trt.connector.requests import RequestTable
from semblend_trt.namespace import CacheNamespace
from semblend_trt.outcome import Outcome, ReuseReport
from semblend_trt.runtime import runtime_for
from tests.pages import ROOT


def test_transformers_is_imported_in_one_way_only():
    """Any other import of it races with that one: `imported` is for every thread, an import statement is not."""
    found = []
    for path in sorted((ROOT / "semblend_trt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if {name.partition(".")[0] for name in names} & {"transformers", "sentence_transformers"}:
                found.append(path.name)
    assert found == []


POOL = torch.zeros(8, 3, 2, 2 * 8 * 16)


@pytest.fixture
def pair(tiny_qwen2_path, monkeypatch):
    monkeypatch.setenv("SEMBLEND_MODEL_REVISION", "one")
    args = LlmArgs(model=tiny_qwen2_path)
    scheduler, worker = SemBlendKvConnectorScheduler(args), SemBlendKvConnectorWorker(args)
    yield scheduler, worker
    scheduler.close()
    worker.close()


def test_what_the_settings_leave_off_is_not_run(tiny_qwen2_path, monkeypatch):
    monkeypatch.setenv("SEMBLEND_METRICS", "0")
    monkeypatch.setattr("semblend_trt.metrics.metrics_for", lambda: 1 / 0)
    monkeypatch.setattr("semblend_trt.audit.AuditLog.__init__", lambda *_: 1 / 0)
    scheduler = SemBlendKvConnectorScheduler(LlmArgs(model=tiny_qwen2_path))
    request = LlmRequest(1, [1, 2, 3], SamplingParams(), max_new_tokens=1)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert scheduler.request_finished(request, []) is False
    scheduler.close()
    assert not runtime_for(scheduler._llm_args).faults


def test_what_cannot_be_built_is_counted_and_tried_again(pair, monkeypatch):
    scheduler, worker = pair
    with monkeypatch.context() as broken:
        broken.setattr("semblend_trt.connector.scheduler.namespace_for", lambda *_: 1 / 0)
        worker.register_kv_caches(POOL)
    assert scheduler.donor_index is None
    assert runtime_for(scheduler._llm_args).faults == {"wait_for_initialization": 1}
    assert scheduler.namespace is not None


@pytest.mark.parametrize(("salt", "bound"), [(None, 2), ("s3cret", 4)])
def test_the_last_namespaces_are_remembered_and_never_a_salt(pair, salt, bound, monkeypatch):
    scheduler, worker = pair
    worker.register_kv_caches(POOL)
    lookup, bindings = scheduler._lookup, []
    bind = CacheNamespace.for_request
    monkeypatch.setattr(CacheNamespace, "for_request", lambda *asked: bindings.append(asked[0]) or bind(*asked))
    lookup._take(lookup.namespace)
    for request_id in range(1, 5):
        request = LlmRequest(request_id, [1, 2, 3], SamplingParams(), max_new_tokens=1, cache_salt=salt)
        assert (
            lookup.look_up(LlmRequestView(request), request_id, 0).namespace_key
            == bind(lookup.namespace, salt, None).key
        )
        if request_id == 2:
            lookup.forget_donors()
    assert len(bindings) == bound
    assert len(set(bindings)) == 2


def test_a_request_that_ends_while_it_is_asked_about_has_a_report(pair, monkeypatch):
    scheduler, report = pair[0], ReuseReport(Outcome.COLD_FALLBACK.value, None)
    monkeypatch.setattr(RequestTable, "get", lambda _, request_id: scheduler.outcomes.record(request_id, report))
    assert scheduler.reuse_of(1) is report
