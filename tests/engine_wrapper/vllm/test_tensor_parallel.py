"""Two ranks of tensor parallelism: one decision for both, and what one rank cannot do is computed by both."""

from contextlib import nullcontext

import pytest
from torch.cuda import device_count, is_available
from torch.distributed import get_rank
from vllm.distributed.kv_transfer import get_kv_transfer_group

from semblend_trt.errors import DonorUnavailableError
from semblend_trt.ranks import RanksApartError, TorchRanks
from semblend_trt.reuse_profile import ReuseProfile
from tests.builders.vllm import DOCUMENT, DONOR, MOVED, NEW, WHOLE, assert_cold, checked_at, taught

pytestmark = pytest.mark.skipif(is_available() and device_count() < 2, reason="skipped: two ranks need two cards")
CHECK = {"layer": 2, "threshold": 0.05}


@pytest.fixture
def two(engine, monkeypatch):
    """Makes an engine of two ranks."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")

    def make(policy, settings=None, **options):
        served = engine(policy, {"min_saving": 0, **(settings or {})}, tensor_parallel_size=2, **options)
        assert served.scheduler.namespace is None or served.scheduler.namespace.tensor_parallel["tp_size"] == 2
        return served

    return make


def lose_donors(worker):
    """On the second rank alone."""
    if get_rank() == 1:
        get_kv_transfer_group()._worker._worker.store.clear()


def fail_forward(worker):
    """On the second rank alone, once, after its last layer: before, the first rank would wait for it."""
    if get_rank() == 1:
        forward = get_kv_transfer_group()._worker._forward
        planned = forward._planned

        def fails(*given):
            planned(*given)
            forward._planned = planned
            raise RuntimeError("the second rank fails")

        forward._planned = fails


@pytest.mark.promise("engines", "In vLLM two ranks answer as one, and what one of them cannot do both compute")
def test_two_ranks_answer_as_one_and_what_one_cannot_do_both_compute(two, cold):
    served = two(*WHOLE, kept=True)
    taught(served, NEW, DONOR)  # the first prompt is computed again
    assert assert_cold(served, cold, MOVED)[0].receipt["offered_tokens"] == len(DOCUMENT)
    served.emptied()
    served.llm.collective_rpc(lose_donors)
    receipt = assert_cold(served, cold, MOVED)[0].receipt
    assert (receipt["outcome"], receipt["reason"]) == ("backend_declined_reuse", "load_failed")
    assert served.refusal is None
    served.emptied()
    taught(served, NEW, DONOR)
    served.llm.collective_rpc(fail_forward)
    receipt = assert_cold(served, cold, MOVED)[0].receipt
    assert (receipt["reason"], served.refusal) == ("load_failed", "planned_forward")
    assert served.faults["planned_forward"] > 0


@pytest.mark.promise(
    "engines",
    "In vLLM a check adds up over ranks, and a profile names their number; ranks that have come to other parts of a "
    "forward do not go on",
)
def test_a_check_adds_up_over_the_ranks_and_a_profile_names_their_number(engine, two, tmp_path):
    found, settings, profiles, namespaces = {}, {}, {}, {}
    for name, make in (("both", two), ("one", engine)):  # two ranks first: that engine is kept
        served = make(*WHOLE, kept=True) if make is two else make("position_fix", {"min_saving": 0})
        served.ask(NEW)
        (tmp_path / name).mkdir()
        settings[name] = {"min_saving": 0, **checked_at(served, tmp_path / name, **CHECK)}
        profiles[name] = ReuseProfile.read(tmp_path / name / "profile.json")
        namespaces[name] = served.scheduler.namespace, served.runtime.pool.geometry
    assert any("parallel layout" in each for each in profiles["one"].differences(*namespaces["both"]))
    for name, make in (("one", engine), ("both", two)):
        served = make("boundary", settings[name])
        taught(served, NEW, DONOR)
        found[name] = served.ask(MOVED, max_tokens=16).receipt
    one, both = found["one"], found["both"]
    assert 0 < one["reused_tokens"] < one["checked_tokens"] == both["checked_tokens"] == len(DOCUMENT)
    assert both["reused_tokens"] == pytest.approx(one["reused_tokens"], abs=2)
    assert both["largest_kept"] == pytest.approx(one["largest_kept"], rel=1e-2)


@pytest.mark.promise("engines", "In vLLM a check adds up...")
@pytest.mark.parametrize(
    ("done", "parts", "others", "raised"),
    [
        (True, 6, [1, 6, -6], None),
        (True, 6, [0, 6, -6], DonorUnavailableError),  # it failed before its first part, or after its last one
        (False, 6, [1, 6, -6], LookupError),
        (True, 6, [0, 3, -3], RanksApartError),
        (False, 3, [1, 6, -6], RanksApartError),
        (False, 3, [0, 4, -4], RanksApartError),
    ],
)
def test_ranks_that_have_come_to_other_parts_of_a_forward_do_not_go_on(monkeypatch, done, parts, others, raised):
    """Their sums would meet those of other layers."""
    ranks, reached = TorchRanks.__new__(TorchRanks), [100]
    monkeypatch.setattr(TorchRanks, "least", lambda _, own: [min(both) for both in zip(own, others, strict=True)])

    def run():
        reached.append(100 + parts)
        if not done:
            raise LookupError
        return "rows"

    with nullcontext() if raised is None else pytest.raises(raised):
        assert ranks.together(run, lambda: reached[-1]) == "rows"
