"""Nothing of a flagged request enters a reuse tree, and unflagged requests are published as ever."""

from types import SimpleNamespace

import pytest
import torch

from engine_wrapper.trtllm.manager_guard import guard_for, guard_refusal
from kernels.layout import KvGeometry
from semblend_trt.runtime import ActivePlans
from tests.builders.engine import published_nodes
from tests.engine_wrapper.trtllm.stand_ins import BLOCK, KVCacheManager, KVCacheManagerV2, LlmRequest

GEOMETRY = KvGeometry(2, 1, 8, BLOCK)
FLAGGED, EXACT = 1, 2


@pytest.fixture
def plans(make_plan):
    plans = ActivePlans()
    plans.put(make_plan(tuple(range(40)), [(12, 30)], num_layers=2, request_id=FLAGGED, shift=3))
    return plans


def requests():
    return LlmRequest(FLAGGED, list(range(40))), LlmRequest(EXACT, list(range(100, 140)))


def v1(kind=KVCacheManager):
    return kind(torch.zeros(32, 2, 2, GEOMETRY.row_elements), GEOMETRY)


def v2():
    return v1(KVCacheManagerV2)


def guarded(manager, plans):
    guard_for(manager, plans).install()
    return manager


def batch(*context, generation=()):
    return SimpleNamespace(context_requests=list(context), generation_requests=list(generation))


def starts(tree):
    return {prefix[0] for prefix in tree}


def test_v1_stores_nothing_of_a_flagged_request_at_any_of_its_three_places(plans):
    manager = guarded(v1(), plans)
    flagged, exact = requests()
    for request in (flagged, exact):
        manager.add_sequence(request)
        request.context_current_position = 40
    manager.update_resources(batch(flagged, exact, generation=(exact,)), None, kv_cache_dtype_byte_size=2.0)
    assert (starts(manager.impl.tree), manager.rewound) == ({100}, [EXACT])
    assert manager.store_blocks_for_reuse(flagged, True) is None
    manager.unpin_blocks_by_id(None)
    block = manager.store_blocks_for_reuse(exact, True)
    manager.unpin_blocks_by_id(block)
    for request in (flagged, exact):
        manager.free_resources(request)
    assert (starts(manager.impl.tree), manager.impl.pinned) == ({100}, [])
    assert sorted(manager.impl.free) == list(range(32))
    assert not plans.withholds(FLAGGED)  # the id may be used again


def test_v2_commits_nothing_more_of_a_flagged_request(plans):
    manager = guarded(v2(), plans)
    flagged, exact = requests()
    manager.try_commit_blocks(flagged)  # it has no cache yet
    cache, other = manager.add_sequence(flagged), manager.add_sequence(exact)
    cache.commit(flagged.tokens[:BLOCK])  # what it shares with the tree
    for position in (24, 40):
        flagged.context_current_position = exact.context_current_position = position
        manager.update_context_resources(batch(flagged, exact))
        assert (cache.num_committed_tokens, cache.history) == (BLOCK, position)
    assert not cache.is_committing
    assert other.num_committed_tokens == 40
    assert sorted(node.tokens[0] for _, node in published_nodes(manager.blocks)) == [0, *range(100, 140, BLOCK)]
    manager.free_resources(flagged)
    assert not cache.is_open
    assert not plans.withholds(FLAGGED)


class OfMain(KVCacheManager):
    """As `resource_manager.py` on main, where dummies may have their blocks before they are scheduled."""

    def __init__(self, pool, geometry):
        super().__init__(pool, geometry)
        self._preprepared_dummy_request_ids = {FLAGGED, EXACT}

    def free_resources(self, request, pin_on_release=False):
        result = self.impl.remove_sequence(request.py_request_id, request, pin_on_release)
        self._preprepared_dummy_request_ids.discard(request.py_request_id)
        return result


def test_all_that_a_release_of_main_does_is_done_and_the_request_is_a_dummy_meanwhile_only(plans):
    manager = type("KVCacheManager", (OfMain,), {})(torch.zeros(32, 2, 2, GEOMETRY.row_elements), GEOMETRY)
    assert guard_refusal(manager) is None
    guard_for(manager, plans).install()
    for request in requests():
        manager.add_sequence(request)
        manager.free_resources(request)
        assert not request.is_dummy_request
    assert (starts(manager.impl.tree), manager._preprepared_dummy_request_ids) == ({100}, set())


def test_a_release_that_fails_leaves_no_dummy_behind(plans):
    manager = guarded(v1(), plans)
    flagged, _ = requests()
    with pytest.raises(KeyError):
        manager.free_resources(flagged)
    assert not flagged.is_dummy_request


def test_requests_that_cannot_be_made_dummies_are_refused(monkeypatch):
    monkeypatch.setattr(LlmRequest, "is_dummy_request", property(lambda _: False))
    assert guard_refusal(v1()) == "publication_unknown"
    monkeypatch.delattr(LlmRequest, "is_dummy_request")
    assert guard_refusal(v1()) == "publication_unknown"


def announces(self, request, pin_on_release=False):
    self.impl.announce(request)
    return self.impl.remove_sequence(request.py_request_id, request, pin_on_release)


def publishes(self, scheduled_batch, attn_metadata=None, size=None):
    self.impl.publish(scheduled_batch)


def commits(self, request, pin_on_release=False):
    """As `kv_cache_manager_v2.py` did in early 1.3 release candidates."""
    kv_cache = self.kv_cache_map.pop(request.py_request_id)
    kv_cache.commit(request.get_tokens(0))
    kv_cache.close()


@pytest.mark.parametrize(
    ("name", "methods", "reason"),
    [
        ("KVCacheManager", {"free_resources": announces}, "publication_unknown"),
        ("KVCacheManager", {"update_resources": publishes}, "publication_unknown"),
        ("KVCacheManagerV2", {"free_resources": commits}, "publication_unknown"),
        ("KVCacheManagerV2", {"update_resources": commits}, "publication_unknown"),
        ("MambaHybridCacheManager", {}, "cache_manager_unknown"),
    ],
)
def test_a_manager_that_publishes_in_another_way_is_refused(name, methods, reason):
    # Under the known name, only what its methods do can tell it from the known ones.
    manager = v2() if name.endswith("V2") else v1()
    manager.__class__ = type(name, (type(manager),), methods)
    before = dict(vars(manager))
    assert (guard_refusal(manager), vars(manager)) == (reason, before)


@pytest.mark.parametrize(
    ("build", "name", "reason"),
    [
        (v1, "update_resources", "publication_unknown"),  # another package has replaced it
        (v1, "is_vswa", "sliding_window"),
        (v2, "conversation_manager", "conversation_manager"),
        (v2, "_sharing", "kv_lending"),
    ],
)
def test_what_a_manager_itself_holds_is_refused_by_name(build, name, reason):
    manager = build()
    setattr(manager, name, print)
    assert guard_refusal(manager) == reason
