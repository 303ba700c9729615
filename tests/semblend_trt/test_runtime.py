"""One runtime an engine; a plan in it runs once, a layer is waited for once, and writes to the weights are noticed."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from semblend_trt import runtime as runtime_module
from semblend_trt.donors.offload import SavedDonor
from semblend_trt.namespace import is_unknown
from semblend_trt.plan import CheckEvidence, EngineMode, PlanKind, PlanSpan
from semblend_trt.ranks import EngineRanks
from semblend_trt.runtime import MAX_EVENTS, ActivePlans, Runtime, Weights, runtime_for, weights_digest
from semblend_trt.transfer.load import LayerReadiness
from tests.semblend_trt.plans import plan_of


class LlmArgs:
    """Equal to every other one, as two engines' arguments may well be."""

    def __eq__(self, other):
        return isinstance(other, LlmArgs)

    __hash__ = None


def test_same_arguments_share_a_runtime_and_equal_ones_do_not():
    first, second = LlmArgs(), LlmArgs()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: runtime_for(first), range(64)))
    assert len({id(runtime) for runtime in found}) == 1
    assert runtime_for(first) is not runtime_for(second)


class Scheduler:
    """Takes the events of a runtime, and fails at a name that is no number."""

    def __init__(self, runtime):
        self.runtime, self.taken = runtime, list[int]()
        runtime.scheduler = self

    def take_events(self):
        while self.runtime.saved:
            self.taken.append(int(self.runtime.saved.popleft().donor_id))


def test_events_are_taken_as_long_as_there_is_a_scheduler_and_bounded_without():
    runtime = Runtime()
    for number in range(MAX_EVENTS + 3):
        runtime.saved.append(SavedDonor(str(number), 1))
        runtime.failed_loads.append(number)
    runtime.saves_ended()
    assert len(runtime.saved) == len(runtime.failed_loads) == runtime.evidence.maxlen == MAX_EVENTS
    scheduler = Scheduler(runtime)
    runtime.saves_ended()
    assert (len(scheduler.taken), scheduler.taken[-1]) == (MAX_EVENTS, MAX_EVENTS + 2)
    del scheduler
    runtime.saved.append(SavedDonor("left", 1))
    runtime.saves_ended()
    assert [event.donor_id for event in runtime.saved] == ["left"]
    runtime.ranks = EngineRanks(1, 2, lambda own: [own, own])  # where no scheduler ever stands
    runtime.saves_ended()
    assert not runtime.saved
    assert not runtime.failed_loads
    unread = Runtime()
    failing = Scheduler(unread)
    unread.saved.append(SavedDonor("unread", 1))
    unread.saves_ended()
    assert (unread.faults, failing.taken) == ({"saved_news": 1}, [])


def test_a_runtime_ends_with_its_arguments_which_their_engine_may_hold():
    llm_args = LlmArgs()
    engine = LlmArgs()
    engine.llm_args, engine.itself = llm_args, engine
    runtime_for(llm_args).engine = engine
    assert runtime_for(llm_args).engine is engine
    gone, plans = weakref.ref(llm_args), weakref.ref(runtime_for(llm_args).active_plans)
    before = len(runtime_module._runtimes)
    del llm_args, engine
    gc.collect()
    assert gone() is plans() is None
    assert len(runtime_module._runtimes) < before


def plan(request_id, mode=EngineMode.WRAPPER, exact=False, start=4):
    kind = PlanKind.EXACT_PREFIX if exact else PlanKind.REQUEST_LOCAL
    span = PlanSpan("d", start, start, 8, exact=exact)
    return plan_of(span, request_id=request_id, kind=kind, computed=start, mode=mode)


def active(*plans):
    built = ActivePlans()
    for each in plans:
        built.put(each)
    return built


def test_each_plan_is_taken_once():
    plans = active(*map(plan, range(4)))
    assert (len(plans), plans.take(0), plans.take(0), plans.take(9)) == (4, plan(0), None, None)
    assert plans.take_all([3, 7, 1]) == {3: plan(3), 1: plan(1)}
    assert plans.take_all([3, 1]) == {}
    assert (plans.take(2), len(plans), plans.take_all([2])) == (plan(2), 0, {})
    unread = iter([2])
    assert plans.take_all(unread) == {}
    assert next(unread) == 2


def test_limit_outlives_the_plan_until_the_blocks_are_released():
    plans = active(plan(1, start=6), plan(2))
    plans.take(1)
    assert (plans.publishable(1, 60), plans.publishable(1, 5), plans.withholds(1)) == (6, 5, True)
    plans.put(plan(1, start=6))
    plans.released(1)
    assert (plans.publishable(1, 60), plans.withholds(1), plans.take(1)) == (60, False, None)
    assert (plans.publishable(2, 60), plans.withholds(2)) == (4, True)


def test_exact_plan_has_no_limit_and_a_stock_plan_waits_for_no_forward():
    plans = active(plan(1, exact=True), plan(2), plan(2, exact=True), plan(4, mode=EngineMode.STOCK))
    assert [plans.publishable(number, 60) for number in (1, 2, 3, 4)] == [60, 4, 60, 4]
    assert plans.take(4) is None


def test_evidence_waits_for_the_scheduler_and_a_dropped_plan_limits_nothing():
    runtime, tokens = Runtime(active_plans=active(plan(1), plan(2))), {"offered_tokens": 16, "checked_tokens": 16}
    found = [
        CheckEvidence(1, reused_tokens=0, recomputed_tokens=16, largest_kept=0.0, is_dropped=True, **tokens),
        CheckEvidence(2, reused_tokens=9, recomputed_tokens=7, largest_kept=0.1, is_dropped=False, **tokens),
    ]
    for evidence in found:
        runtime.note_evidence(evidence)
    assert list(runtime.evidence) == found
    assert (runtime.active_plans.withholds(1), runtime.active_plans.withholds(2)) == (False, True)


def recording_stream():
    waited = []
    return SimpleNamespace(waited=waited, wait_event=waited.append)


def groups_below(*ends, asked=None):
    """Groups of layers that end at `ends`; `asked` hears of each when it is asked for, and of the end."""
    asked = [] if asked is None else asked
    try:
        for end in ends:
            asked.append(end)
            yield end, f"below {end}"
    finally:
        asked.append("end")


def expecting(*ends, asked=None, ahead=1):
    readiness = LayerReadiness()
    readiness.expect(groups_below(*ends, asked=asked), ahead)
    return readiness


def test_what_is_abandoned_is_not_asked_for_and_what_was_is_waited_for():
    asked, stream = [], recording_stream()
    readiness = expecting(2, 4, 6, 8, asked=asked, ahead=2)
    readiness.wait(0, stream)
    for _ in range(2):
        readiness.abandon(stream)
        assert asked == [2, 4, 6, "end"]
        assert stream.waited == ["below 2", "below 4", "below 6"]
        assert not readiness.is_arriving


def test_a_group_that_fails_is_told_to_the_forward_and_no_further_one_is_asked_for():
    def groups():
        yield 2, "below 2"
        raise RuntimeError("injected")

    readiness, stream = LayerReadiness(), recording_stream()
    readiness.expect(groups())
    with pytest.raises(RuntimeError, match="injected"):
        readiness.wait(0, stream)
    readiness.abandon(stream)
    assert not readiness.is_arriving


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True).map(sorted), st.integers(1, 9), st.data())
def test_what_has_waited_for_a_layer_has_waited_for_its_group(ends, ahead, data):
    """And a group is asked for when a forward comes near it, not before."""
    asked, stream = [], recording_stream()
    readiness = expecting(*ends, asked=asked, ahead=ahead)
    for layer in data.draw(st.lists(st.integers(0, ends[-1] - 1), max_size=10)):
        readiness.wait(layer, stream)
        assert f"below {next(end for end in ends if end > layer)}" in stream.waited
        assert asked == [*ends, "end"][: len(stream.waited) + ahead]
        assert readiness.is_arriving or len(stream.waited) == len(ends)
    readiness.join(stream)
    assert stream.waited == [f"below {end}" for end in ends]
    assert not readiness.is_arriving


PLACE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, dtype=dtype), nn.Linear(5, 3, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("table", torch.arange(7, dtype=torch.uint8), persistent=False)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def model(request):
    torch.manual_seed(3)
    blocks = nn.Sequential(*(Block(torch.float32) for _ in range(3)))
    for each in blocks.parameters():
        each.data = each.data.to(request.param)
        each.requires_grad_(False)
    return blocks.to(PLACE)


def replace_parameter(model):
    model[1].first.weight = nn.Parameter(model[1].first.weight.float().mul(2).to(model[1].first.weight.dtype), False)


def in_inference_mode(model):
    with torch.inference_mode():
        model[0].first.bias = nn.Parameter(torch.full((5,), 3.0), False)


SHOWN = [
    lambda model: model[0].first.weight.copy_(model[1].first.weight),
    lambda model: model[2].first.bias.zero_(),
    lambda model: model[0].scale.fill_(2),
    lambda model: model[0].table.add_(1),
    lambda model: model.load_state_dict({name: each + each for name, each in model.float().state_dict().items()}),
    replace_parameter,
    lambda model: setattr(model[1].second.weight, "data", model[2].second.weight.data.clone()),
    lambda model: setattr(model[1], "first", nn.Linear(6, 5)),
    in_inference_mode,
]


@pytest.mark.promise(
    "donors", "Once the weights of a running engine change, nothing that others computed is used, on any tier or rank"
)
@pytest.mark.parametrize("write", SHOWN)
def test_a_write_is_noticed_once(model, write):
    weights = Weights(model)
    assert not weights.have_changed()
    with torch.no_grad():
        write(model)
    assert weights.have_changed()
    assert weights.prefix_is_stale
    assert not weights.are_first
    assert not weights.have_changed()


def test_a_write_that_torch_does_not_count_is_noticed_at_the_next_suspicion_and_the_same_contents_are_no_change(model):
    weights = Weights(model)
    for is_late, is_written in ((False, True), (True, True), (True, False)):  # late, it may be an undone one
        with torch.no_grad():
            for each in model.parameters() if is_written else ():
                each.copy_(each.clone())
        assert not (is_late and weights.have_changed(is_due=False))
        weights.suspect()
        assert weights.have_changed() is (is_late and is_written)
    for _ in range(2):  # there and back
        model[1].first.weight.data.view(torch.uint8)[2, 3] ^= 1
        weights.suspect()
        assert weights.have_changed()
    assert weights.are_first


def test_every_octet_and_every_place_counts():
    model = nn.Module()
    model.register_buffer("words", torch.arange(0, 11, dtype=torch.uint8, device=PLACE))
    found = {weights_digest(model)}
    for place in range(11):
        model.words[place] += 1
        found.add(weights_digest(model))
        model.words[place] -= 1
    model.words = model.words.flip(0)
    found.add(weights_digest(model))
    model.words = model.words[:-1]
    found.add(weights_digest(model))
    assert len(found) == 14
    model.words = torch.arange(0, 12, dtype=torch.uint8, device=PLACE)[1:]  # at an address that no word begins at
    odd = weights_digest(model)
    model.words = model.words.clone()
    assert weights_digest(model) == odd


def test_a_prefix_cache_that_is_reset_after_the_write_is_not_stale(model):
    weights = Weights(model)
    for is_reset in (True, False, True):
        weights.suspect()
        model[0].scale.data.add_(1)
        if is_reset:
            weights.prefix_cache_reset()
        weights.suspect()  # no step has run since
        assert weights.have_changed()
        assert weights.prefix_is_stale is not is_reset
    weights.prefix_is_stale = True
    weights.suspect()
    assert not weights.have_changed()
    assert weights.prefix_is_stale
    weights.prefix_cache_reset()
    assert not weights.prefix_is_stale


def test_what_cannot_be_read_counts_as_changed(model, monkeypatch):
    weights = Weights(model)
    monkeypatch.setattr(model, "named_parameters", lambda: [("gone", None)])
    weights.suspect()
    assert weights.have_changed()
    assert is_unknown(weights._digest)
    monkeypatch.undo()
    weights.suspect()
    assert weights.have_changed()
    assert weights.are_first


def test_replaced_weights_are_not_kept_alive(model):
    weights = Weights(model)
    gone = weakref.ref(model[1].first.weight), weakref.ref(model[2].second.weight)
    model[1].first.weight, model[2].second = nn.Parameter(torch.zeros(5, 6), False), nn.Linear(5, 3)
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert weights.have_changed()


def test_a_reset_before_a_write_leaves_the_prefix_cache_stale(model):
    weights = Weights(model)
    weights.suspect()
    weights.prefix_cache_reset()
    assert not weights.have_changed()
    with torch.no_grad():
        model[0].scale.add_(1)  # torch counts it: nothing is suspected
    assert weights.have_changed()
    assert weights.prefix_is_stale


def test_each_plan_goes_to_one_of_many_threads():
    plans = active(*map(plan, range(200)))
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(plans.take, [request_id for request_id in range(200) for _ in range(4)]))
    assert sorted(item.request_id for item in taken if item is not None) == list(range(200))
    assert len(plans) == 0
