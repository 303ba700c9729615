"""Requests are bounded, their plans follow what the engine took, and each report adds up."""

from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.layout import KvGeometry
from semblend_trt.connector import requests
from semblend_trt.connector.contract import LlmRequestView, ScheduledRequest
from semblend_trt.connector.requests import (
    MAX_SILENT_ITERATIONS,
    Adapters,
    Iteration,
    RequestProgress,
    RequestTable,
    SemBlendConnectorMetadata,
    TrackedRequest,
    donor_generation,
    fit_to_blocks,
    readable_metadata,
    report_of,
    savable_tokens,
)
from semblend_trt.donors.catalog import Tier
from semblend_trt.donors.offload import OffloadCommands, SaveIntent
from semblend_trt.errors import DonorUnavailableError
from semblend_trt.namespace import is_content, is_unknown
from semblend_trt.outcome import Outcome
from semblend_trt.plan import CheckEvidence, EngineMode, PlanKind, PlanSpan, SpanCheck
from semblend_trt.pool_facts import PoolFacts
from semblend_trt.runtime import Runtime
from tests.semblend_trt.plans import plan_of


@pytest.mark.promise(
    "engines", "Beams, speculation, multimodal input, context logits and generation-only requests are refused by name"
)
@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"is_generation_only_request": True}, "generation_only"),
        ({"is_generation_only_request": lambda: True}, "generation_only"),
        ({"sampling_config": SimpleNamespace(beam_width=2)}, "beam_search"),
        ({"multimodal_hashes": [[1, 2]]}, "multimodal"),
        ({"py_multimodal_data": {"image": 1}}, "multimodal"),
        ({"draft_tokens": [5]}, "speculative_decoding"),
        ({"py_return_context_logits": True}, "context_logits"),
    ],
)
def test_requests_whose_kv_may_not_be_shared(attributes, reason):
    assert LlmRequestView(SimpleNamespace(request_id=1, cache_salt=None, **attributes)).refusal == reason


def test_an_engines_own_request_is_refused_whatever_else_it_holds():
    class Dummy:
        request_id, is_dummy_request = 1, True
        sampling_config = SimpleNamespace(beam_width="many")
        is_generation_only_request = property(lambda _: 1 / 0)

    assert LlmRequestView(Dummy()).refusal == "dummy_request"


@pytest.mark.parametrize(
    ("attributes", "salt"),
    [({"cache_salt": "a"}, "a"), ({"cache_salt": None}, None), ({"cache_salt_id": 7}, "7"), ({"cache_salt": ""}, "")],
)
@pytest.mark.known_defect(21)
def test_a_salt_of_either_name_is_read_and_an_engine_that_tells_none_is_refused(attributes, salt):
    asked = LlmRequestView(SimpleNamespace(request_id=1, **attributes))
    assert (asked.cache_salt, asked.refusal) == (salt, None)
    assert LlmRequestView(SimpleNamespace(request_id=1)).refusal == "salt_unknown"


def adapter(folder, weights=b"w", config='{"r": 8}'):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)
    return str(folder)


def of(known, task, path=None):
    return known.of(LlmRequestView(SimpleNamespace(request_id=1, lora_task_id=task, py_lora_path=path)))


def test_equal_content_is_one_adapter_for_every_engine_name_and_task_and_other_content_another(tmp_path):
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "deep" / "two")
    identity = of(Adapters([one]), 1, one)
    assert is_content(identity)
    assert identity == of(Adapters([one, two]), 7, two) == of(Adapters([one]), 3, one)
    for change in ({"weights": b"x"}, {"config": '{"r": 16}'}):
        adapter(tmp_path / "one", **change)
        after = of(Adapters([one]), 1, one)
        assert is_content(after)
        assert after != identity


def test_an_adapter_that_was_not_read_at_the_start_is_known_for_the_life_of_its_engine(tmp_path):
    missing = str(tmp_path / "none")
    path, running = adapter(tmp_path / "one"), Adapters([missing])
    assert [is_unknown(identity) for identity in running.identities] == [True]
    for named in (path, missing, "a name", None):
        task = hash(named)
        assert is_unknown(of(running, task, named))
        assert of(running, task, named) == of(running, task, named)
        assert of(running, task, named) != of(Adapters([]), task, named)
    assert of(running, 1, "a name") != of(running, 2, "a name")


def test_another_adapter_under_a_task_that_was_seen_matches_nothing(tmp_path):
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two", b"x")
    running = Adapters([one, two])
    first = of(running, 1, one)
    assert is_unknown(of(running, 1, two))
    assert of(running, 1, two) != of(running, 1, two)
    assert of(running, 1, one) == first


def test_few_adapters_are_remembered(monkeypatch):
    monkeypatch.setattr(requests, "_MAX_ADAPTERS", 2)
    running = Adapters([])
    for task in range(4):
        assert (of(running, task, "a name") == of(running, task, "a name")) == (task < 2)


@pytest.mark.parametrize("is_read_at_the_start", [True, False])
def test_an_adapter_that_is_replaced_in_its_place_matches_nothing(tmp_path, is_read_at_the_start):
    path = adapter(tmp_path / "one")
    running = Adapters([path] if is_read_at_the_start else [])
    unused = Adapters([path])
    before = of(running, 1, path)
    assert of(running, 1, path) == before
    adapter(tmp_path / "one", b"other weights")
    assert is_unknown(of(unused, 1, path))
    assert is_unknown(of(running, 1, path))
    assert of(running, 1, path) not in (before, of(running, 1, path))


def tracked(request_id=1, prompt=4, computed=0, **fields):
    request = TrackedRequest(request_id, "namespace", np.arange(prompt, dtype=np.int32), computed)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def ids(requests):
    return [request.request_id for request in requests]


@pytest.mark.known_defect(19)
def test_oldest_request_makes_room():
    table = RequestTable(limit=2)
    assert [ids(table.add(tracked(each))) for each in (1, 2, 3)] == [[], [], [1]]
    assert list(table) == [2, 3]


def promised(request_id):
    return tracked(request_id, plan=SimpleNamespace(matched_tokens=2))


@pytest.fixture
def table():
    """With requests 1 and 2."""
    held = RequestTable()
    held.add(tracked(1))
    held.add(tracked(2))
    return held


def test_what_was_promised_and_not_loaded_is_never_given_up():
    """The engine would skip the tokens, and no rank would place them."""
    table = RequestTable(limit=2)
    for request in (promised(1), promised(2), tracked(3)):
        given_up = table.add(request)
    assert ids(given_up) == [3]
    for _ in range(2 * MAX_SILENT_ITERATIONS):
        assert table.begin_iteration() == []
    table.scheduled(1, loads=True)
    for _ in range(MAX_SILENT_ITERATIONS):
        assert table.begin_iteration() == []
    assert ids(table.begin_iteration()) == [1]
    assert len(table) == 1


@pytest.mark.parametrize("drops", [False, True])
def test_a_failed_forward_ends_the_requests_that_were_in_it_unless_they_may_come_again(table, drops):
    table.begin_iteration()
    table.scheduled(1)
    table.scheduled(2)
    table.begin_iteration()
    table.scheduled(1)
    table.add(promised(3))  # asked about behind the failure
    first = table[1]
    ended = table.begin_iteration(last_failed=True, drops=drops)
    assert (ended, list(table), first.forward_failed) == (([], [2, 1, 3], True) if drops else ([first], [2, 3], True))
    table.scheduled(1)
    assert first.forward_failed is not drops


def test_whose_blocks_are_anothers_now_has_ended(table):
    first, third = table[1], tracked(3)
    table.holds(first, [5, 6, 7])
    table.holds(table[2], [5, 8])
    table.add(third)
    assert table.displaced([9], third) == []
    assert table.displaced([6, 7, -1], third) == [first]
    table.holds(third, [6, 7])
    assert table.displaced([6, 7], third) == []
    table.pop(2)
    assert table.displaced([5, 8], third) == []  # it has ended, and was told of
    assert list(table) == [3]


PROMPT, BLOCK = 100, 8
BLOCKS = list(range(50, 63))
POOL = PoolFacts(KvGeometry(2, 1, 8, BLOCK), 96, torch.float32)


def savable(matched=0):
    plan, terms = None, {"prompt": PROMPT, "block_size": BLOCK, "mode": EngineMode.STOCK}
    if matched:
        span = PlanSpan("donor-1", 0, 0, matched, exact=True)
        plan = plan_of(span, request_id=7, kind=PlanKind.EXACT_PREFIX, **terms)
    return tracked(7, PROMPT, plan=plan, intent=SaveIntent(7, "donor", PROMPT + 20))


EVIDENCE = CheckEvidence(7, 50, 50, 30, 20, 0.11, is_dropped=False)


@pytest.mark.promise(
    "reuse", "A request whose plan failed, or of whose check nothing is known, becomes no donor of a generation above 0"
)
@pytest.mark.parametrize(
    ("generation", "evidence", "load_failed", "expected"),
    [
        (0, None, False, 0),
        (2, EVIDENCE, False, 2),
        (2, replace(EVIDENCE, is_dropped=True), False, 0),
        (2, None, False, None),
        (2, EVIDENCE, True, None),
    ],
)
def test_behind_moved_kv_only_what_was_checked_becomes_a_donor(generation, evidence, load_failed, expected):
    request = savable()
    request.intent = replace(request.intent, generation=generation)
    request.evidence, request.load_failed = evidence, load_failed
    assert donor_generation(request) == expected


def told(request, position, scheduled, blocks=(), *, is_first=False):
    iteration = Iteration()
    iteration.add(request, ScheduledRequest(7, [], list(blocks), position, scheduled), is_first=is_first)
    request.is_followed = request.is_followed or bool(iteration.followed)
    return iteration


def followed(matched=0):
    request = savable(matched)
    told(request, 0, PROMPT - matched, BLOCKS, is_first=True)
    return request


# Position, tokens and new blocks as they are told, the tokens then written, and whether the id alone is told on.
CHUNKS, ALL = ((0, 40, BLOCKS, 40, False), (40, 60, (), 100, False)), (0, PROMPT, BLOCKS, PROMPT, False)
LATE, NEXT, IN_NEW_BLOCK = (99, 1, (), 100, False), (100, 1, (), 101, True), (101, 1, [3], 102, False)
# The overlap scheduler's position is one token late, but where it has left the request out of an iteration.
CAUGHT_UP, LAST = (101, 1, (), 102, False), (102, 1, (), 103, True)


@pytest.mark.parametrize(
    "steps", [(*CHUNKS, LATE, NEXT, IN_NEW_BLOCK), (ALL, LATE, NEXT, IN_NEW_BLOCK, LAST), (ALL, LATE, CAUGHT_UP, LAST)]
)
def test_a_prompt_and_its_answer_are_followed_token_by_token(steps):
    request, at_workers = savable(), 0
    for number, (position, scheduled, blocks, written, by_id) in enumerate(steps):
        iteration = told(request, position, scheduled, blocks, is_first=not number)
        assert (iteration.grown, len(iteration.progress)) == ([7] * by_id, not by_id)
        at_workers = iteration.progress[0].written_tokens if iteration.progress else at_workers + 1
        assert at_workers == request.written_tokens == written
    assert savable_tokens(request, [*BLOCKS, 3], POOL) == written


@pytest.mark.parametrize("position", [0, 30])
def test_a_load_counts_once_wherever_the_position_points(position):
    # A request that is scheduled an iteration after its query is told with the loaded tokens.
    request = savable(matched=30)
    told(request, position, 70, BLOCKS, is_first=True)
    assert request.written_tokens == PROMPT


def test_an_offer_that_the_engine_did_not_apply_is_not_loaded():
    # It counted the offer as a load, and left the request where it was.
    request = savable(matched=30)
    iteration = told(request, -30, PROMPT, BLOCKS, is_first=True)
    assert (iteration.plans, request.plan, request.reason) == ([], None, "not_honoured")
    assert (request.written_tokens, savable_tokens(request, BLOCKS, POOL)) == (PROMPT, PROMPT)


@pytest.mark.parametrize(
    ("position", "scheduled"),
    [(-1, 1), (0, -1), (0, 101), (101, 0), (101, 1), (10**9, 1), (0, 10**9), ("0", 1), (0.0, 1), (None, 1), (0, None)],
)
def test_beginnings_that_cannot_be(position, scheduled):
    request = savable(matched=30)
    iteration = Iteration()
    with pytest.raises((TypeError, ValueError)):
        iteration.add(request, ScheduledRequest(7, [], BLOCKS, position, scheduled), is_first=True)
    assert iteration.plans == [request.plan]  # its tokens were promised
    assert (iteration.followed, iteration.progress, request.block_ids) == ([], [], [])


@pytest.mark.parametrize(("position", "scheduled"), [(102, 1), (101, 2), (100, 2), (100, -1), (-1, 1), (10**9, 1)])
def test_steps_that_cannot_be(position, scheduled):
    request = followed()
    with pytest.raises(ValueError, match=r"tokens .* are scheduled; 100 are written, 101 can be"):
        told(request, position, scheduled)
    assert request.written_tokens == PROMPT


@pytest.mark.parametrize(
    "blocks", [BLOCKS[:-1], BLOCKS[::-1], [*BLOCKS[:5], 3, *BLOCKS[6:]], [3, *BLOCKS], [-1] * 13, ["50"] * 13]
)
def test_a_request_that_ends_with_other_blocks_is_not_saved(blocks):
    with pytest.raises(ValueError, match="request 7 ends with other blocks than it was scheduled with"):
        savable_tokens(followed(), blocks, POOL)


def test_blocks_that_the_engine_has_exchanged_are_those_that_are_saved():
    request, final = followed(), [*BLOCKS[:5], 3, *BLOCKS[6:], 4]
    assert savable_tokens(request, final, replace(POOL, exchanges_blocks=True)) == PROMPT
    assert list(request.intent.block_ids) == request.block_ids == final[: len(BLOCKS)]


def test_no_more_is_saved_than_was_intended():
    request = followed()
    request.intent = replace(request.intent, max_tokens=40)
    assert [savable_tokens(request, blocks, POOL) for blocks in (BLOCKS, [])] == [40, 0]
    request.is_followed = False
    assert savable_tokens(request, BLOCKS, POOL) == 0


@pytest.mark.parametrize("blocks", [[1.5] * 13, ["1"] * 13, [None] * 13, [-1] * 13, [5] * 13, BLOCKS[:2]])
def test_blocks_that_fit_no_plan_leave_it_without(blocks):
    request = savable(matched=30)
    fit_to_blocks(request, LlmRequestView(SimpleNamespace(request_id=request.request_id)), blocks)
    assert (request.load_failed, request.plan.target_block_ids) == (True, None)


SHIFTED = (PlanSpan("donor", 0, 20, 50),)


def plan(kind=PlanKind.REQUEST_LOCAL, spans=SHIFTED, **execution):
    matched = 0 if kind is PlanKind.DISCOVERY_ONLY else 60
    return plan_of(*spans, kind=kind, prompt=100, computed=10, matched=matched, **execution)


CHECK = SpanCheck(1, threshold=0.2)
WITH_EXACT = (PlanSpan("exact", 10, 10, 15, exact=True), PlanSpan("donor", 0, 30, 40))
DROPPED = CheckEvidence(1, 50, 50, 0, 50, 0.0, True)
AT_RISK = replace(DROPPED, sampled_deviation=0.5, exceeds_levels=True)
DROPPED_BEHIND_EXACT = CheckEvidence(1, 55, 40, 15, 40, 0.0, True)
USED, DECLINED = Outcome.BACKEND_MATERIALIZED_REUSE, Outcome.BACKEND_DECLINED_REUSE
NOTHING, WHOLE_SPAN = (0, 0, 0, 0, 0, 0.0), (50, 10, 50, 0, 0, 0.0)
DISCOVERED = Outcome.SEMANTIC_DISCOVERY_ONLY
COLD, PREFIX = Outcome.COLD_FALLBACK, Outcome.EXACT_PREFIX_ROUTE


@pytest.mark.promise("reuse", "Every request ends in one outcome,...")
@pytest.mark.parametrize(
    ("fields", "outcome", "reason", "figures"),
    [
        ({"plan": plan()}, USED, None, WHOLE_SPAN),
        ({"plan": plan(), "reason": "lookup_bound"}, USED, "lookup_bound", WHOLE_SPAN),
        ({"plan": plan(), "load_failed": True}, DECLINED, "load_failed", (0, 60, 0, 0, 0, 0.0)),
        ({"plan": plan(), "forward_failed": True}, DECLINED, "forward_failed", NOTHING),
        ({"plan": plan(recompute_boundary_layer=3)}, USED, None, (0, 60, 50, 0, 50, 0.0)),
        ({"plan": plan(spans=WITH_EXACT, recompute_boundary_layer=3)}, USED, None, (15, 45, 55, 0, 40, 0.0)),
        ({"plan": plan(spans=WITH_EXACT, head_tokens=8)}, USED, None, (47, 13, 55, 0, 8, 0.0)),
        ({"plan": plan(check=CHECK)}, USED, None, (0, 60, 50, None, None, None)),
        ({"plan": plan(spans=WITH_EXACT, check=CHECK)}, USED, None, (15, 45, 55, None, None, None)),
        ({"plan": plan(check=CHECK), "evidence": EVIDENCE}, USED, None, (30, 30, 50, 50, 20, 0.11)),
        (
            {"plan": plan(check=CHECK, recompute_boundary_layer=3), "evidence": EVIDENCE},
            *(USED, None, (0, 60, 50, 50, 50, 0.11)),
        ),
        ({"plan": plan(check=CHECK), "evidence": DROPPED}, DECLINED, "deviation", (0, 60, 50, 50, 50, 0.0)),
        (
            {"plan": plan(spans=WITH_EXACT, check=CHECK), "evidence": DROPPED_BEHIND_EXACT},
            *(USED, "deviation", (15, 45, 55, 40, 40, 0.0)),
        ),
        ({"plan": plan(check=CHECK), "evidence": AT_RISK}, DECLINED, "risk_above_bound", (0, 60, 50, 50, 50, 0.0)),
        ({"plan": plan(check=CHECK), "evidence": replace(EVIDENCE, exceeds_levels=True)}, USED, None, None),
        ({"plan": plan(check=CHECK), "evidence": DROPPED, "load_failed": True}, DECLINED, "load_failed", None),
        ({"plan": plan(PlanKind.DISCOVERY_ONLY)}, DISCOVERED, None, NOTHING),
        ({"reason": "low_reuse", "runs_found": 2, "computed": 16}, DECLINED, "low_reuse", NOTHING),
        ({"reason": "no_profile", "runs_found": 1}, DECLINED, "no_profile", NOTHING),
        ({"reason": "no_donor_match", "runs_found": 2, "computed": 16}, PREFIX, "no_donor_match", NOTHING),
        ({"reason": "prefix_covers_prompt", "computed": 96}, PREFIX, "prefix_covers_prompt", NOTHING),
        ({"reason": "no_donor_match"}, COLD, "no_donor_match", NOTHING),
        ({"reason": "internal_error", "computed": 96}, DECLINED, "internal_error", NOTHING),
        ({"reason": "lookup_timeout"}, DECLINED, "lookup_timeout", NOTHING),
    ],
)
def test_a_report_has_the_outcome_and_its_tokens_add_up(fields, outcome, reason, figures):
    request = tracked(prompt=100, **fields)
    report = report_of(request)
    assert (report.outcome, report.reason, report.exact_prefix_tokens) == (outcome, reason, request.num_computed_tokens)
    names = "reused_tokens computed_holes offered_tokens checked_tokens recomputed_tokens largest_kept"
    assert figures in (None, tuple(getattr(report, name) for name in names.split()))
    if report.recomputed_tokens is not None:
        assert report.offered_tokens == report.reused_tokens + report.recomputed_tokens
    if not request.forward_failed:
        assert report.reused_tokens + report.computed_holes == request.matched_tokens


SENT_PLAN = plan_of(
    PlanSpan("donor-1", 0, 4, 16), request_id=7, computed=4, blocks=(1, 2, 3), check=SpanCheck(1, threshold=0.1)
)
WHOLE = SemBlendConnectorMetadata(
    plans=(SENT_PLAN,),
    followed=(7,),
    progress=(RequestProgress(7, (1, 2, 3), 20, True),),
    forgotten=(5,),
    commands=OffloadCommands(drops=["a"], promotions=["b"], saves=[SaveIntent(7, "donor", 100, Tier.DEVICE, True)]),
)


def unsigned(metadata):
    """As a version that does not know the last field would pickle it."""
    blank = object.__new__(SemBlendConnectorMetadata)
    for each in fields(metadata)[:-1]:
        object.__setattr__(blank, each.name, getattr(metadata, each.name))
    return blank


@pytest.mark.promise("donors", "Metadata of another version is refused, and loads nothing")
@pytest.mark.parametrize("told", [{"followed": ()}, "garbage", replace(WHOLE, version="0.0.0"), unsigned(WHOLE)])
def test_metadata_of_another_version_is_counted_and_ends_reuse(told):
    runtime, has_plans = Runtime(), isinstance(told, SemBlendConnectorMetadata)
    with pytest.raises(DonorUnavailableError, match="plans are of another") if has_plans else nullcontext():
        assert readable_metadata(told, runtime) is None
    if has_plans:
        assert readable_metadata(replace(told, plans=(), version="0.0.0"), runtime) is None
    assert (runtime.faults, runtime.refusal) == ({"metadata": 1 + has_plans}, "metadata_version")
