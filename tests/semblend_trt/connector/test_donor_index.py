"""Index and catalog stay in step: a donor is found only while its bytes are held, and never counted twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kernels.layout import KvGeometry
from semblend_trt.config import load_settings
from semblend_trt.connector.donor_index import DonorIndex
from semblend_trt.connector.requests import TrackedRequest
from semblend_trt.discovery.planner import LookupRequest
from semblend_trt.donors.donor_table import Tier
from semblend_trt.donors.offload import OffloadCommands
from semblend_trt.fleet.announcer import DonorPublisher
from semblend_trt.plan import EngineMode
from semblend_trt.runtime import PoolFacts, SavedDonor

GEOMETRY = KvGeometry(num_layers=2, kv_heads=1, head_dim=8, block_size=16)
TOKEN_BYTES = GEOMETRY.bytes_per_token(torch.float32)


def library(host_tokens=1000, **overrides):
    settings = load_settings(
        policy="position_fix", host_bytes=host_tokens * TOKEN_BYTES, min_reuse_ratio=0, **overrides
    )
    return DonorIndex(settings, PoolFacts(GEOMETRY, 64, torch.float32), DonorPublisher(), None, lambda kind: None, None)


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 5000, length, dtype=np.int32)


def tracked(request_id, prompt, key="namespace"):
    return TrackedRequest(request_id, key, prompt, 0)


def keep(books, donor_id, tokens, key="namespace"):
    intent = books.intend(donor_id, tracked(1, tokens, key), 0)
    assert books.begin_save(intent, key, tokens)
    books.saved(SavedDonor(donor_id, len(tokens)))
    return intent


def lookup(tokens, key="namespace"):
    return LookupRequest(
        request_id=9,
        namespace_key=key,
        tokens=np.concatenate([text(999, 40), tokens, text(998, 10)]),
        num_computed_tokens=0,
        block_size=16,
        mode=EngineMode.WRAPPER,
        publication_guard=True,
    )


def test_donor_is_found_only_once_it_is_held():
    books, tokens = library(), text(1, 200)
    intent = books.intend("donor", tracked(1, tokens), 0)
    assert books.plan(lookup(tokens))[0].plan is None
    books.begin_save(intent, "namespace", tokens)
    assert books.plan(lookup(tokens))[0].plan is None
    books.saved(SavedDonor("donor", len(tokens)))
    planned, leases = books.plan(lookup(tokens))
    assert planned.plan.reused_tokens == 200
    assert [lease.donor_id for lease in leases] == ["donor"]


def test_failed_save_leaves_nothing():
    books, tokens = library(), text(1, 200)
    intent = books.intend("donor", tracked(1, tokens), 0)
    books.begin_save(intent, "namespace", tokens)
    books.saved(SavedDonor("donor", 0, "disk on fire"))
    assert books.catalog.stats().used_bytes == 0
    assert books.plan(lookup(tokens))[0].plan is None
    assert books.intend("donor-2", tracked(2, tokens), 0) is not None


def test_only_saved_tokens_are_indexed():
    books, tokens = library(), text(1, 200)
    intent = books.intend("donor", tracked(1, tokens), 0)
    books.begin_save(intent, "namespace", tokens)
    books.saved(SavedDonor("donor", 120))
    assert books.plan(lookup(tokens))[0].plan.reused_tokens == 120
    assert books.catalog.stats().used_bytes == 120 * TOKEN_BYTES


def test_what_is_too_short_when_it_is_saved_goes_from_the_workers_too():
    books, tokens = library(min_donor_tokens=64), text(1, 200)
    intent = books.intend("donor", tracked(1, tokens), 0)
    books.begin_save(intent, "namespace", tokens)
    books.saved(SavedDonor("donor", 40))
    assert books.catalog.stats().used_bytes == 0
    assert books.take_commands().drops == ["donor"]


def test_a_block_that_the_engine_copies_into_spoils_what_is_saved_from_it():
    books = library()
    for name, blocks in (("a", [3, 4]), ("b", [5])):
        intent = books.intend(name, tracked(1, text(1, 200), name), 0)
        books.begin_save(intent, name, text(1, 200), blocks)
    books.copied_into(4)
    for name in "ab":
        books.saved(SavedDonor(name, 200))
    assert [books.catalog.tier(name) for name in "ab"] == [None, Tier.HOST]
    assert books.take_commands().drops == ["a"]


def test_same_text_is_kept_once():
    books, tokens = library(), text(1, 200)
    keep(books, "donor", tokens)
    assert books.intend("again", tracked(2, tokens), 0) is None
    assert books.intend("other-tenant", tracked(3, tokens, "other"), 0) is not None


def test_short_requests_do_not_become_donors():
    books = library(min_donor_tokens=64)
    assert books.intend("donor", tracked(1, text(1, 63)), 0) is None
    intent = books.intend("donor", tracked(1, text(1, 63)), 30)
    assert books.begin_save(intent, "namespace", text(1, 63)) is False
    assert books.catalog.stats().used_bytes == 0


def test_room_is_reserved_before_the_save_and_evicts_the_oldest():
    books = library(host_tokens=500)
    keep(books, "a", text(1, 200))
    keep(books, "b", text(2, 200))
    intent = books.intend("c", tracked(3, text(3, 200)), 0)
    assert books.take_commands() == OffloadCommands(drops=["a"])
    assert books.take_commands() == OffloadCommands()
    assert intent.max_tokens == 200
    assert books.plan(lookup(text(1, 200)))[0].plan is None


def test_intents_name_the_tier_and_orders_say_who_moves_down():
    books = library(host_tokens=300, device_bytes=15 * 16 * TOKEN_BYTES)
    assert keep(books, "a", text(1, 200)).tier is Tier.DEVICE
    assert keep(books, "b", text(2, 200)).tier is Tier.DEVICE
    assert books.take_commands() == OffloadCommands(offloads=["a"])
    assert books.plan(lookup(text(1, 200)))[0].plan.reused_tokens == 200  # found wherever it lies
    _, leases = books.plan(lookup(text(2, 200)))
    assert books.intend("c", tracked(3, text(3, 200)), 0) is None  # both are leased by now
    for lease in leases:
        lease.release()
    assert books.intend("c", tracked(3, text(3, 200)), 0).tier is Tier.DEVICE


def test_donor_lost_on_its_way_down_is_found_no_more():
    books, tokens = library(device_bytes=13 * 16 * TOKEN_BYTES), text(1, 200)
    keep(books, "donor", tokens)
    keep(books, "other", text(2, 200))
    assert books.take_commands().offloads == ["donor"]
    books.saved(SavedDonor("donor", 0, "out of memory"))
    assert books.plan(lookup(tokens))[0].plan is None
    assert books.catalog.tier("donor") is None
    assert books.take_commands().drops == ["donor"]


def test_leased_donor_stays_and_the_request_is_simply_not_kept():
    books = library(host_tokens=250)
    keep(books, "a", text(1, 200))
    _, leases = books.plan(lookup(text(1, 200)))
    assert books.intend("b", tracked(2, text(2, 200)), 0) is None
    for lease in leases:
        lease.release()
    assert books.intend("b", tracked(2, text(2, 200)), 0) is not None
    assert books.take_commands().drops == ["a"]


def test_lost_donors_are_dropped_unless_somebody_reads_them():
    books, tokens = library(), text(1, 200)
    keep(books, "donor", tokens)
    _, leases = books.plan(lookup(tokens))
    assert books.lost({"donor"}) == []
    leases[0].release()
    assert books.lost({"donor", "never-heard-of"}) == ["donor"]
    assert books.plan(lookup(tokens))[0].plan is None


def test_donor_that_cannot_be_leased_is_planned_around():
    books, tokens = library(host_tokens=2000), text(1, 200)
    keep(books, "gone", tokens)
    keep(books, "held", np.concatenate([text(7, 3), tokens[:150]]))
    books.catalog.drop("gone")  # the index still names it
    planned, leases = books.plan(lookup(tokens))
    assert [lease.donor_id for lease in leases] == ["held"]
    assert planned.plan.reused_tokens == 150


@pytest.mark.parametrize("key", ["other", ""])
def test_other_namespaces_find_nothing(key):
    books, tokens = library(), text(1, 200)
    keep(books, "donor", tokens)
    planned, _ = books.plan(lookup(tokens, key))
    assert (planned.plan, planned.runs_found) == (None, 0)


class LibraryMachine(RuleBasedStateMachine):
    """Random intents, saves, failures, cancels and leases against what must always hold."""

    def __init__(self):
        super().__init__()
        self.books = library(host_tokens=600)
        self.open, self.leases, self.serial = [], [], 0

    @rule(seed=st.integers(0, 6), length=st.integers(64, 250))
    def intend(self, seed, length):
        self.serial += 1
        tokens = text(seed, length)
        intent = self.books.intend(f"donor-{self.serial}", tracked(self.serial, tokens), 0)
        if intent is not None:
            self.open.append((intent, tokens))

    @rule(fails=st.booleans())
    def save(self, fails):
        if self.open:
            intent, tokens = self.open.pop(0)
            assert self.books.begin_save(intent, "namespace", tokens)
            self.books.saved(SavedDonor(intent.donor_id, 0 if fails else len(tokens), "injected" if fails else None))

    @rule()
    def cancel(self):
        if self.open:
            self.books.cancel(self.open.pop()[0])

    @rule(seed=st.integers(0, 6))
    def read(self, seed):
        planned, leases = self.books.plan(lookup(text(seed, 200)))
        self.leases.extend(leases)
        if planned.plan is not None:
            assert {lease.donor_id for lease in leases} == {span.donor_id for span in planned.plan.spans}

    @rule()
    def release(self):
        while self.leases:
            self.leases.pop().release()

    @invariant()
    def budget_holds_and_leases_agree(self):
        stats = self.books.catalog.stats()
        assert stats.used_bytes <= 600 * TOKEN_BYTES
        assert stats.leases == len(self.leases)
        assert stats.saving == len(self.open)

    def teardown(self):
        self.release()
        while self.open:
            self.cancel()
        assert self.books.catalog.stats().leases == 0


TestLibraryMachine = LibraryMachine.TestCase
TestLibraryMachine.settings = hypothesis_settings(max_examples=30, stateful_step_count=30)
