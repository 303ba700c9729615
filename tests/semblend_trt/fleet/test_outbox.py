"""Whatever happens in whatever order: a reader of the messages ends with what is held, by the fewest events."""

from __future__ import annotations

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from semblend_trt.fleet.publisher import PORTION_TOKENS, EventCounters, Held, HeldDonors, Outbox
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from semblend_trt.fleet.wire import Emitter, EventFormat, EventWriter, token_digest
from semblend_trt.namespace import CacheNamespace
from tests.semblend_trt.conftest import WatchedDirectory

NAMESPACE = CacheNamespace(
    *("m", "r", "t", "r", "l", 16, "f32", "f32", None, None, {}),
    {"tp_size": 1, "pp_size": 1, "cp_size": 1},
    "layout",
).for_request(None, None)
TOKENS = np.arange(64, dtype=np.int32)
NAMES = st.sampled_from([f"donor-{number}" for number in range(6)])


def donor(tier: str = "device", tokens=TOKENS) -> Held:
    return Held(NAMESPACE, b"", tier, len(tokens), tokens)


def outbox() -> Outbox:
    return Outbox(EventWriter(Emitter(3, 0, 7), EventFormat.JSON), EventCounters(enabled=False))


def announced(box: Outbox) -> dict[str, str]:
    """What a reader that followed knows: tier by donor id."""
    return {donor_id: told.tier for donor_id, told in box._told.items()}


class Telling(RuleBasedStateMachine):
    """Two libraries change, messages are taken in any portions, and some are lost together with the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = outbox()
        self.libraries = [HeldDonors(), HeldDonors()]
        for library in self.libraries:
            self.outbox.add(library)
        self.reader = WatchedDirectory()

    def _note(self, which: int, name: str) -> None:
        self.outbox.changes.append((self.libraries[which], f"{which}-{name}"))

    @rule(which=st.integers(0, 1), name=NAMES, tier=st.sampled_from(["device", "host"]))
    def hold(self, which, name, tier):
        self.libraries[which].donors[f"{which}-{name}"] = donor(tier)
        self._note(which, name)

    @rule(which=st.integers(0, 1), name=NAMES, tier=st.sampled_from(["device", "host"]))
    def move(self, which, name, tier):
        held = self.libraries[which].donors.get(f"{which}-{name}")
        if held is not None:
            held.tier = tier
            self._note(which, name)

    @rule(which=st.integers(0, 1), name=NAMES)
    def drop(self, which, name):
        if self.libraries[which].donors.pop(f"{which}-{name}", None):
            self._note(which, name)

    @rule(limit=st.integers(0, 5))
    def absorb(self, limit):
        self.outbox.absorb(limit)

    @rule(limit=st.integers(0, 5))
    def deliver(self, limit):
        for notice in self.outbox.take(limit):
            self.reader.observe(notice.payload)

    @rule(limit=st.integers(0, 5))
    def lose(self, limit):
        self.outbox.take(limit)
        self.outbox.forget_changes()
        self.outbox.resync()

    @rule()
    def overflow(self):
        self.outbox.changes.clear()
        self.outbox.forget_changes()
        self.outbox.describe_all()
        self.outbox.resync()

    @rule(which=st.integers(0, 1))
    def replace_library(self, which):
        self.outbox.remove(self.libraries[which])
        self.libraries[which] = HeldDonors()
        self.outbox.add(self.libraries[which])

    @rule()
    def settle(self):
        self.outbox.absorb(1000)
        while len(self.outbox):
            self.deliver(7)
        self.reader.observe(self.outbox.heartbeat(1.0).payload)
        truth = {name: held.tier for library in self.libraries for name, held in library.donors.items()}
        assert self.reader.is_synced((3, 0))
        assert self.reader.donors_of((3, 0)) == truth == announced(self.outbox)
        assert set(self.reader.problems) <= {"gap"}

    @invariant()
    def described_donors_have_let_their_tokens_go(self):
        for library in self.libraries:
            for name, held in library.donors.items():
                assert name not in announced(self.outbox) or held.tokens is None or held.tokens is TOKENS

    def teardown(self):
        self.settle()


TestTelling = Telling.TestCase
TestTelling.settings = hypothesis_settings(max_examples=40, stateful_step_count=40)


def test_a_donor_that_cannot_be_described_costs_only_itself() -> None:
    box, library = outbox(), HeldDonors()
    box.add(library)
    library.donors["bad"] = donor(tokens=np.array(["token"] * 64))
    library.donors["good"] = donor()
    box.changes.extend([(library, "bad"), (library, "good"), (library, "good")])
    box.absorb(10)
    assert [notice.kind for notice in box.take(10)] == ["provider_generation_reset", "donor_registered"]
    assert list(announced(box)) == ["good"]


def test_donors_are_described_together_as_each_by_itself() -> None:
    box, library, rng = outbox(), HeldDonors(), np.random.default_rng(3)
    box.add(library)
    texts = [rng.integers(0, 150_000, length, dtype=np.int32) for length in (0, 31, PORTION_TOKENS, 400, 800, 5)]
    texts.append(texts[4][::2])
    salts = [None, "one", None, "two", None, "one", "one"]
    for number, (tokens, salt) in enumerate(zip(texts, salts, strict=True)):
        key = b"" if salt is None else sketch_key(NAMESPACE.key, salt)
        library.donors[str(number)] = Held(NAMESPACE, key, "host", len(tokens), tokens)
        # Noted twice, as a donor that comes and is moved.
        box.changes.extend([(library, str(number))] * 2)
    assert box.absorb(20) == 14
    for tokens, salt, held in zip(texts, salts, library.donors.values(), strict=True):
        assert held.tokens is None
        assert held.sketch == sketch_of(tokens, sketch_key(NAMESPACE.key, salt)).to_bytes()
        assert held.digest == token_digest(tokens, held.salted_key)


def test_a_donor_of_the_same_id_replaces_the_other() -> None:
    box, library = outbox(), HeldDonors()
    box.add(library)
    library.donors["a"] = donor()
    box.take(10)
    library.donors["a"] = donor()
    box.changes.append((library, "a"))
    box.absorb(10)
    assert [notice.kind for notice in box.take(10)] == ["donor_registered"]
    box.changes.append((library, "a"))
    box.absorb(10)
    assert box.take(10) == []


def test_the_last_word_says_that_nothing_is_held() -> None:
    box, library, reader = outbox(), HeldDonors(), WatchedDirectory()
    box.add(library)
    library.donors["a"] = donor()
    for notice in [*box.take(10), box.purge(), box.heartbeat(1.0)]:
        reader.observe(notice.payload)
    assert reader.compared((3, 0)) == 1
    assert reader.donors_of((3, 0)) == {}
    assert not reader.problems


def test_an_embedding_that_comes_later_is_told_by_one_more_registration() -> None:
    box, library = outbox(), HeldDonors()
    box.add(library)
    library.donors["a"] = donor()
    box.take(10)
    library.donors["a"].embedding = np.ones(4, dtype=np.float32)
    for kinds in (["donor_registered"], []):
        box.changes.append((library, "a"))
        box.absorb(10)
        assert [notice.kind for notice in box.take(10)] == kinds
    library.donors["a"].tier = "host"
    box.changes.append((library, "a"))
    box.absorb(10)
    assert [notice.kind for notice in box.take(10)] == ["donor_relocated"]
    assert announced(box) == {"a": "host"}
