"""What TensorRT-LLM's executor serves through scheduler, worker and attachment, in its order of calls."""

import hashlib
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.connector import SemBlendKvConnectorScheduler, SemBlendKvConnectorWorker
from semblend_trt.connector.contract import ScheduledRequest
from semblend_trt.donors.offload import DonorObserver
from semblend_trt.outcome import Outcome
from semblend_trt.plan import EngineMode
from semblend_trt.pool_facts import geometry_of
from semblend_trt.ranks import Ranks
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from semblend_trt.runtime import runtime_for
from tests.builders.engine import text
from tests.builders.shards import keep_shard
from tests.engine_wrapper.trtllm.stand_ins import KV_SCALE, LlmArgs, LlmRequest, executor_of
from tests.engine_wrapper.watching import failing
from tests.random_models import save_tiny_model
from tests.semblend_trt.held_donors import held_in, saved
from tests.semblend_trt.rank_threads import on_ranks

DOCUMENT, OTHER = text(1, 90), text(2, 80)
TAUGHT = [*text(3, 10), *DOCUMENT, *text(4, 5)]


class Service:
    """Scheduler, worker and executor in TensorRT-LLM's order of calls, as one of several `ranks` with its part."""

    def __init__(self, path, ranks=None, source=None, kv_dtype=torch.float32, **settings):
        self.ranks = ranks or Ranks()
        self.args = LlmArgs(path, tensor_parallel_size=self.ranks.size, **settings)
        runtime_for(self.args).ranks = self.ranks
        self.scheduler = SemBlendKvConnectorScheduler(self.args) if self.ranks.rank == 0 else None
        self.worker = SemBlendKvConnectorWorker(self.args)
        self.executor = executor_of(path, self.worker, self.scheduler, source=source, kv_dtype=kv_dtype)
        self.executor._maybe_init_kv_connector_manager()
        self.manager = self.executor.kv_cache_manager

    def serve(self, request):
        matched, is_async = self.asked(lambda scheduler: scheduler.get_num_new_matched_tokens(request, 0))
        assert not is_async
        self.manager.add_sequence(request)
        self.asked(lambda scheduler: scheduler.update_state_after_alloc(request, request.blocks))
        data = ScheduledRequest(request.request_id, request.tokens, request.blocks, 0, len(request.tokens) - matched)
        self.bind(new_requests=[data], cached_requests=[])
        self.worker.start_load_kv(None)
        request.context_current_position = matched
        logits = self.executor.prefill(request)
        self.worker.wait_for_save(None)
        if self.asked(lambda scheduler: scheduler.request_finished(request, request.blocks)):
            saved(self.worker, request.request_id)
        self.manager.free_resources(request)
        self.bind(new_requests=[], cached_requests=[])
        return logits

    def cold(self, request):
        again = LlmRequest(99, list(request.tokens))
        self.manager.add_sequence(again)
        return self.executor.prefill(again)

    def check_reuse_from_position_0(self):
        """A document of several windows, then, once the pool has forgotten it, a prompt that begins with it."""
        self.serve(LlmRequest(1, [*DOCUMENT, *text(4, 5)]))
        self.manager.pool.copy_(torch.full((), math.nan))
        request = LlmRequest(2, [*DOCUMENT, *text(7, 9)])
        logits = self.serve(request)
        assert self.report(2).reused_tokens == 90
        torch.testing.assert_close(logits, self.cold(request), atol=1e-3, rtol=0)

    def bind(self, **scheduled):
        metadata = self.asked(lambda scheduler: scheduler.build_connector_meta(SimpleNamespace(**scheduled)))
        self.worker.bind_connector_meta(metadata)

    def asked(self, question):
        return self.ranks.broadcast(None if self.scheduler is None else question(self.scheduler))

    def report(self, request_id):
        return self.asked(lambda scheduler: scheduler.reuse_of(request_id))

    def close(self):
        if self.scheduler is not None:
            self.scheduler.close()
        self.worker.close()


def on_two_ranks(path, work, before=lambda _: None):
    """What `work` returns of the service of each of two ranks, each with its part of the model."""
    sources = [AutoModelForCausalLM.from_pretrained(path) for _ in range(2)]

    def run(ranks):
        before(ranks)
        keep_shard(sources[ranks.rank], ranks)
        service = Service(path, ranks, sources[ranks.rank])
        found = work(service)
        service.close()
        return found

    return on_ranks(2, run)


def write_profile(path, model, ranks=1, **fields):
    """The path of a profile for engines of so many ranks."""
    service = Service(model)
    namespace = replace(service.scheduler.namespace, tensor_parallel={"tp_size": ranks, "pp_size": 1, "cp_size": 1})
    geometry = replace(service.manager.geometry, kv_heads=service.manager.geometry.kv_heads // ranks)
    service.close()
    fields |= {"policy": "verified", "check": ProfileCheck(layer=1, threshold=1.0)}
    ReuseProfile.made_for(namespace, geometry, **fields).write(path)
    return str(path)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "boundary")
    monkeypatch.setenv("SEMBLEND_RECOMPUTE_BOUNDARY_LAYER", "3")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN_TOKENS", "32")


@pytest.fixture
def service_of(tiny_qwen2_path, request):
    """Makes services that are closed when the test ends."""

    def make(path=tiny_qwen2_path, **options):
        made = Service(path, **options)
        request.addfinalizer(made.close)
        return made

    return make


@pytest.fixture(params=[("qwen2", "1.1"), ("gemma3_text", "1.2")], ids=lambda each: each[0])
def service(request, tiny_model_paths, service_of):
    family, contract = request.param
    return service_of(tiny_model_paths[family], contract=contract)


@pytest.mark.promise("reuse", "Approximate KV does not enter the...")
def test_documents_at_other_places_are_reused_and_never_published(service):
    service.serve(LlmRequest(1, [*text(3, 10), *DOCUMENT, *OTHER, *text(4, 5)]))
    assert service.worker._runtime.mode is EngineMode.WRAPPER, "the first prompt has proven it"
    published = set(service.manager.impl.tree)
    shuffled = LlmRequest(2, [*text(5, 21), *OTHER, *text(6, 4), *DOCUMENT, *text(7, 9)])
    logits = service.serve(shuffled)
    report = service.report(2)
    assert (report.outcome, report.offered_tokens) == (Outcome.BACKEND_MATERIALIZED_REUSE.value, 170)
    assert (service.manager.impl.tree, sorted(service.manager.impl.free)) == (published, list(range(96)))
    torch.testing.assert_close(logits, service.cold(shuffled), atol=1e-3, rtol=0)


@pytest.mark.promise(
    "engines",
    "In TensorRT-LLM with the wrapper KV in e4m3 is kept as it is stored, and belongs to the scales that the "
    "engine's attention holds; unknown ones are refused by name",
)
def test_kv_in_fp8_is_kept_as_it_is_stored_and_belongs_to_its_scales(service_of, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "exact")
    service = service_of(kv_dtype=torch.float8_e4m3fn)
    assert service.worker.attachment.execution_refusal == "kv_cache_dtype"
    service.check_reuse_from_position_0()
    namespaces = [each.scheduler.namespace for each in (service, service_of())]
    assert [each.kv_dtype for each in namespaces] == ["float8_e4m3fn", "float32"]
    scales = hashlib.sha256(repr((KV_SCALE,) * 3).encode()).hexdigest()[:16]
    assert [each.cache_dtype for each in namespaces] == [f"auto+{scales}", "auto"]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
REFUSED = {
    "qwen2": ({}, {"prefill_cuda_graph_backend": "breakable"}, "prefill_graphs"),
    "gemma3_text": ({}, {"prefill_cuda_graph_backend": "breakable"}, "prefill_graphs"),
    "yarn": ({"rope_parameters": {**YARN, "truncate": False}}, {}, "rope_unknown"),
}


@pytest.mark.promise(
    "engines",
    "By TensorRT-LLM's contract windows are reused where the engine keeps all KV in one pool, from position 0 and "
    "in its decoder; a layout of windows that drop KV is refused by name",
)
@pytest.mark.parametrize("family", REFUSED)
def test_text_from_position_0_is_reused_as_a_cold_run_has_computed_it(service_of, tmp_path, monkeypatch, family):
    monkeypatch.setenv("SEMBLEND_POLICY", "exact")
    changes, settings, reason = REFUSED[family]
    save_tiny_model("qwen2" if family == "yarn" else family, tmp_path, **changes)
    service = service_of(tmp_path, contract="1.4", **settings)
    assert service.worker.attachment.execution_refusal == reason
    service.check_reuse_from_position_0()


@pytest.mark.promise(
    "reuse",
    "KV that a cold run would not have produced never becomes a donor, unless the profile of `verified` allows "
    "generations",
)
def test_approximate_kv_never_becomes_a_donor(service):
    service.serve(LlmRequest(1, TAUGHT))
    held = len(held_in(service.worker.store))
    # Its exact part alone would be long enough; saving it would store the rest in the reuse tree as well.
    service.serve(LlmRequest(2, [*text(5, 70), *DOCUMENT, *text(7, 9)]))
    assert len(held_in(service.worker.store)) == held
    service.serve(LlmRequest(3, text(8, 100)))
    assert len(held_in(service.worker.store)) == held + 1


@pytest.mark.promise("reuse", "KV that a cold run would...")
@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("generations", [0, 1])
def test_what_is_first_seen_behind_checked_kv_becomes_a_donor_where_the_profile_allows_it(
    tiny_qwen2_path, service_of, tmp_path, monkeypatch, generations
):
    monkeypatch.setenv("SEMBLEND_POLICY", "verified")
    monkeypatch.setenv("SEMBLEND_MIN_REUSE_RATIO", "0.1")
    path = write_profile(tmp_path / "profile.json", tiny_qwen2_path, generations=generations)
    monkeypatch.setenv("SEMBLEND_PROFILE", path)
    service = service_of()
    service.serve(LlmRequest(1, TAUGHT))
    published, held = set(service.manager.impl.tree), len(held_in(service.worker.store))
    service.serve(LlmRequest(2, [*text(5, 21), *DOCUMENT, *text(6, 4), *OTHER, *text(7, 9)]))
    assert service.report(2).reused_tokens > 0
    assert len(held_in(service.worker.store)) == held + generations
    service.serve(LlmRequest(3, [*text(8, 30), *OTHER, *text(9, 9)]))
    assert (service.report(3).offered_tokens > 0) == (generations > 0)
    assert service.report(3).checked_tokens == service.report(3).offered_tokens
    if generations:  # a request of which nothing is reused is computed cold, and published
        assert service.manager.impl.tree == published
    assert sorted(service.manager.impl.free) == list(range(96))


@pytest.mark.promise("commands", "A broken promise ends approximate reuse...")
@pytest.mark.usefixtures("trial")
def test_a_profile_whose_promise_is_broken_is_not_used_for_the_requests_that_say_so(
    tiny_qwen2_path, service_of, tmp_path, monkeypatch
):
    monkeypatch.setenv("SEMBLEND_POLICY", "verified")
    monkeypatch.setenv("SEMBLEND_PROFILE", write_profile(tmp_path / "profile.json", tiny_qwen2_path))
    digest = hashlib.sha256((tmp_path / "profile.json").read_bytes()).hexdigest()
    service = service_of()
    service.serve(LlmRequest(1, TAUGHT))
    for number, broken in ((2, ["another"]), (3, ["another", digest]), (4, [])):
        request = LlmRequest(number, [*text(4 + number, 21), *DOCUMENT, *text(7, 9)])
        request.broken_profiles = broken
        service.serve(request)
        receipt = service.report(number).receipt
        assert (receipt["profile"], receipt["offered_tokens"] > 0) == (digest, digest not in broken)
        assert receipt["reason"] == ("bound_broken" if digest in broken else None)
    key = service.report(4).receipt["namespace"]
    monkeypatch.setattr(DonorObserver, "is_broken", lambda _, *promise: promise == (digest, key))
    monkeypatch.setattr(service.scheduler._lookup, "_observers", [DonorObserver()])
    service.serve(LlmRequest(5, [*text(50, 21), *DOCUMENT, *text(7, 9)]))
    assert service.report(5).receipt["reason"] == "bound_broken"


def test_behind_the_guard_alone_the_engine_skips_what_is_reused_from_the_left(service_of, monkeypatch):
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    service = service_of(prefill_cuda_graph_backend="breakable")
    assert service.worker.attachment.execution_refusal == "prefill_graphs"
    service.serve(LlmRequest(1, TAUGHT))
    published = set(service.manager.impl.tree)
    assert torch.isfinite(service.serve(LlmRequest(2, [*DOCUMENT, *text(7, 9)]))).all()
    assert runtime_for(service.args).mode is EngineMode.STOCK
    report = service.report(2)
    assert (report.outcome, report.reused_tokens) == (Outcome.BACKEND_MATERIALIZED_REUSE.value, 90)
    assert service.manager.impl.tree == published
    service.serve(LlmRequest(3, [*text(8, 30), *DOCUMENT, *text(9, 9)]))
    assert service.report(3).reason == "hole_needs_wrapper"


@pytest.mark.promise("engines", "A check decides once over all heads")
@pytest.mark.known_defect(23)
@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("policy", ["position_fix", "verified"])
def test_ranks_execute_one_plan_together(tiny_qwen2_path, service_of, tmp_path, monkeypatch, policy):
    prompts = [TAUGHT, [*text(8, 30), *DOCUMENT, *text(9, 9)]]

    def serve(service):
        logits = [service.serve(LlmRequest(index, prompt)) for index, prompt in enumerate(prompts, 1)]
        assert service.worker._runtime.mode is EngineMode.WRAPPER
        return logits[-1], service.report(2)

    monkeypatch.setenv("SEMBLEND_POLICY", policy)
    monkeypatch.setenv("SEMBLEND_PROFILE", write_profile(tmp_path / "alone.json", tiny_qwen2_path))
    expected, alone = serve(service_of())
    monkeypatch.setenv("SEMBLEND_PROFILE", write_profile(tmp_path / "together.json", tiny_qwen2_path, ranks=2))
    (first, report), (second, _) = on_two_ranks(tiny_qwen2_path, serve)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, atol=1e-3, rtol=0)
    for name in ("outcome", "offered_tokens", "reused_tokens"):
        assert getattr(report, name) == getattr(alone, name)
    assert report.reused_tokens == 90 if policy == "position_fix" else 0 < report.reused_tokens < 90


@pytest.mark.promise(
    "engines", "A donor is found only where every rank holds it; a load that fails on one is used on none"
)
@pytest.mark.promise("donors", "Engines of several ranks keep nothing on disk, which is counted")
@pytest.mark.parametrize("step", ["save", "load"])
def test_what_one_rank_cannot_save_or_load_is_used_on_none(tiny_qwen2_path, tmp_path, monkeypatch, step):
    monkeypatch.setenv("SEMBLEND_POLICY", "position_fix")
    monkeypatch.setenv("SEMBLEND_DISK_BYTES", str(1 << 20))
    monkeypatch.setenv("SEMBLEND_DISK_PATH", str(tmp_path))

    def serve(service):
        request, worker = LlmRequest(3, [*text(5, 30), *DOCUMENT, *text(6, 9)]), service.worker
        is_last = service.ranks.rank == 1
        events = [each.kind.value for each in worker._runtime.offload_events]
        service.serve(LlmRequest(1, text(2, 80)))  # proves that plans can run
        if is_last and step == "save":
            failing(monkeypatch, worker.store.host, "writing", RuntimeError, once=False)
        service.serve(LlmRequest(2, TAUGHT))
        if is_last and step == "load":
            failing(monkeypatch, worker.loader, "_prepare", RuntimeError, once=False)
        is_right = torch.allclose(service.serve(request), service.cold(request), atol=1e-3, rtol=0)
        report = service.report(3)
        return (is_right, report.reused_tokens, report.reason), "disk_unavailable" in events

    reason = "no_donor_match" if step == "save" else "load_failed"
    assert on_two_ranks(tiny_qwen2_path, serve) == [((True, 0, reason), True)] * 2


@pytest.mark.promise("engines", "What one rank refuses, all refuse; ranks of two versions reuse nothing")
def test_what_one_rank_refuses_all_refuse(tiny_qwen2_path, monkeypatch):
    """The last rank alone cannot read its pool."""
    refusing = set()
    monkeypatch.setattr(
        "semblend_trt.connector.worker.geometry_of",
        lambda *given: None if threading.get_ident() in refusing else geometry_of(*given),
    )

    def serve(service):
        service.serve(LlmRequest(1, DOCUMENT))
        return service.worker._runtime.refusal

    def breaks(ranks):
        refusing.update([threading.get_ident()] * ranks.rank)

    assert on_two_ranks(tiny_qwen2_path, serve, breaks) == ["pool_layout"] * 2
