"""Index, catalog and tiers stay in step: a donor is found only while its bytes are held, and never counted twice."""

from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kernels.layout import KvGeometry
from semblend_trt.config import load_settings
from semblend_trt.connector.lookup import MAX_ANSWER_TOKENS, DonorPlanner
from semblend_trt.connector.requests import TrackedRequest
from semblend_trt.donors import offload
from semblend_trt.donors.catalog import FULL_SECONDS, CatalogStats, Tier
from semblend_trt.donors.disk_tier import KvForm
from semblend_trt.donors.donor_index import LITTLE_SHARE, DonorIndex, DonorTexts
from semblend_trt.donors.offload import DonorText, OffloadCommands, OffloadEvent, OffloadEventKind, SavedDonor
from semblend_trt.plan import PlanSpan, SpanCheck
from semblend_trt.pool_facts import PoolFacts
from semblend_trt.reuse_profile import ProfileCheck
from tests.semblend_trt.discovery.planning import profile, request
from tests.semblend_trt.plans import plan_of

GEOMETRY = KvGeometry(num_layers=2, kv_heads=1, head_dim=8, block_size=16)
TOKEN_BYTES = GEOMETRY.bytes_per_token(torch.float32)
TEXT = 64
FORM = KvForm(GEOMETRY, torch.float32)
FILE_BYTES = FORM.file_bytes(TEXT)


class Observer(offload.DonorObserver):
    """Keeps the calls of these kinds, of tokens their number."""

    def __init__(self, *kinds):
        self.told = []
        for kind in kinds:
            setattr(self, kind, partial(self._keep, kind))

    def _keep(self, kind, *given):
        self.told.append((kind, *(len(each) if isinstance(each, np.ndarray) else each for each in given)))


class Donors(DonorIndex):
    """The index, and the planner that asks it."""

    def __init__(self, settings, pool, *others):
        super().__init__(settings, pool, *others)
        planner = DonorPlanner(settings, pool, self)
        self.plan, self.intend = planner.plan, planner.intend

    def generation(self, donor_id):
        return self.texts.generations.get(donor_id, 0)


def index_of(host_tokens=1000, observer=None, link=None, count=lambda kind: None, **overrides):
    chosen = {"policy": "position_fix", "min_reuse_ratio": 0, "host_bytes": host_tokens * TOKEN_BYTES} | overrides
    pool = PoolFacts(GEOMETRY, 64, torch.float32)
    return Donors(load_settings(**chosen), pool, () if observer is None else (observer,), link, count)


def text(seed, length=TEXT):
    return np.random.default_rng(seed).integers(0, 5000, length, dtype=np.int32)


def tracked(request_id, prompt, key="namespace"):
    return TrackedRequest(request_id, key, prompt, 0)


def begin(index, donor_id, tokens, key="namespace", block_ids=()):
    """Begins a save; returns what the workers are told of it."""
    assert index.begin_save(index.intend(donor_id, tracked(1, tokens, key), 0), key, tokens, block_ids)
    return index.offload._commands.saves[-1]


def moves(index):
    """The commands since the last call, without the saves that they make room for."""
    return replace(index.offload.take_commands(), saves=[])


def keep(index, donor_id, tokens, key="namespace"):
    intent = begin(index, donor_id, tokens, key)
    index.saved(SavedDonor(donor_id, len(tokens)))
    return intent


def behind_moved_kv(tokens, generation, moved=8, key="namespace"):
    """A request that would be a donor of this generation: its first `moved` tokens are moved KV, the rest is new."""
    span = PlanSpan("other", 30, 0, moved, generation=generation - 1)
    request = tracked(1, tokens, key)
    request.plan = replace(plan_of(span, prompt=len(tokens), check=SpanCheck(1, 0.1)), prompt_token_ids=tokens)
    return request


def keep_approximate(index, donor_id, tokens, generation, key="namespace"):
    intent = index.intend(donor_id, behind_moved_kv(tokens, generation, key=key), 0, 3)
    assert index.begin_save(intent, key, tokens, (), intent.generation)
    index.saved(SavedDonor(donor_id, len(tokens)))


def plan(index, tokens, key="namespace", profile=None):
    """What is planned for a prompt with `tokens` in its middle, and the leases."""
    prompt = np.concatenate([text(999, 40), tokens, text(998, 10)])
    return index.plan(replace(request(prompt, profile=profile), namespace_key=key, block_size=16))


def reused(index, tokens, key="namespace", profile=None):
    """Tokens that a look-up reuses; its leases are given back."""
    planned, leases = plan(index, tokens, key, profile)
    for lease in leases:
        lease.release()
    return 0 if planned.plan is None else planned.plan.reused_tokens


def test_donor_is_found_only_once_it_is_held():
    index, tokens = index_of(), text(1, 200)
    intent = index.intend("donor", tracked(1, tokens), 0)
    assert reused(index, tokens) == 0
    index.begin_save(intent, "namespace", tokens)
    assert reused(index, tokens) == 0
    index.saved(SavedDonor("donor", len(tokens)))
    planned, leases = plan(index, tokens)
    assert planned.plan.reused_tokens == 200
    assert [lease.donor_id for lease in leases] == ["donor"]
    for key in ("other", ""):
        planned, _ = plan(index, tokens, key)
        assert (planned.plan, planned.runs_found) == (None, 0)


@pytest.mark.parametrize(("saved", "held"), [(180, 180), (40, 0), (0, 0)])
def test_what_was_saved_is_found_and_what_is_too_short_goes_from_the_workers_too(saved, held):
    index, tokens = index_of(), text(1, 200)
    begin(index, "donor", tokens)
    index.saved(SavedDonor("donor", saved, None if saved else "disk on fire"))
    assert index.catalog.stats().host_bytes == held * TOKEN_BYTES
    assert reused(index, tokens) == held
    assert moves(index).drops == ([] if held else ["donor"])
    assert (index.intend("again", tracked(2, tokens), 0) is None) == bool(held)


def test_a_block_that_the_engine_copies_into_spoils_what_is_saved_from_it():
    index = index_of()
    for name, blocks in (("a", [3, 4]), ("b", [5])):
        begin(index, name, text(1, 200), name, blocks)
    index.copied_into(4)
    for name in "ab":
        index.saved(SavedDonor(name, 200))
    assert [index.catalog.tier(name) for name in "ab"] == [None, Tier.HOST]
    assert moves(index).drops == ["a"]


def test_a_request_is_kept_up_to_the_generation_that_is_allowed():
    index, tokens = index_of(host_tokens=2000), text(9, 300)
    kept = [index.intend(f"{each}", behind_moved_kv(text(each, 300), each), 0, 2) for each in (1, 2, 3)]
    assert [None if intent is None else intent.generation for intent in kept] == [1, 2, None]
    request = behind_moved_kv(tokens, 1)
    span = replace(request.plan.spans[0], target_start=100)
    request.plan = replace(request.plan, spans=(span,), matched_tokens=108)
    for donor_id, allowed, expected in (("a", 0, (100, 0)), ("b", 1, (300, 1))):
        intent = index.intend(donor_id, request, 0, allowed)
        assert (intent.max_tokens, intent.generation) == expected
    # What stands in front of a donor of the last generation is kept.
    spans = (PlanSpan("other", 30, 0, 50), PlanSpan("last", 30, 150, 50, generation=1))
    request.plan = replace(request.plan, spans=spans, matched_tokens=200)
    intents = [index.intend(donor_id, request, 0, allowed) for donor_id, allowed in (("d", 0), ("e", 1), ("f", 2))]
    assert [intent and (intent.max_tokens, intent.generation) for intent in intents] == [None, (150, 1), (300, 2)]
    # Where donors hold all but few of its tokens, a copy would bring nothing new.
    assert index.intend("c", behind_moved_kv(tokens, 1, moved=280), 0, 3) is None


def test_without_a_generation_nothing_is_saved():
    index, tokens = index_of(), text(1, 200)
    intent = index.intend("donor", behind_moved_kv(tokens, 1), 0, 1)
    assert not index.begin_save(intent, "namespace", tokens, (), None)
    assert (index.catalog.stats().saving, index.generation("donor")) == (0, 0)


def test_an_approximate_donor_is_found_in_its_namespace_as_the_profile_allows():
    index, tokens = index_of(policy="verified"), text(1, 200)
    keep_approximate(index, "donor", tokens, 2)
    for allowed, expected in ((0, 0), (1, 0), (2, 200), (3, 200)):
        made = profile("verified", check=ProfileCheck(layer=1, threshold=0.1), generations=allowed)
        assert reused(index, tokens, profile=made) == expected
        assert reused(index, tokens, "other", made) == 0
    assert reused(index, tokens) == reused(index_of(), tokens) == 0
    assert index.held().approximate == 1


@pytest.mark.promise(
    "reuse",
    "An exact copy of the same text replaces a donor of a generation above 0, and of two generations the lower one "
    "is taken",
)
def test_an_exact_copy_replaces_an_approximate_donor_of_the_same_text():
    index, tokens = index_of(), text(1, 200)
    keep_approximate(index, "second", tokens, 2)
    assert index.intend("again", behind_moved_kv(tokens, 2), 0, 3) is None
    keep_approximate(index, "first", tokens, 1)
    assert moves(index).drops == ["second"]
    keep_approximate(index, "elsewhere", tokens, 1, "other")
    keep(index, "exact", tokens)
    assert moves(index).drops == ["first"]
    kept = [index.catalog.tier(each) for each in ("second", "first", "exact", "elsewhere")]
    assert kept == [None, None, Tier.HOST, Tier.HOST]
    assert index.intend("again", behind_moved_kv(tokens, 1), 0, 3) is None
    assert reused(index, tokens) == 200


@pytest.mark.promise(
    "donors",
    "Requests with fewer than `SEMBLEND_MIN_DONOR_TOKENS` tokens are no donors, and `SEMBLEND_MAX_DONORS` bounds "
    "their number",
)
def test_short_requests_do_not_become_donors():
    index = index_of()
    assert index.intend("donor", tracked(1, text(1, 63)), 0) is None
    intent = index.intend("donor", tracked(1, text(1, 63)), 30)
    assert index.begin_save(intent, "namespace", text(1, 63)) is False
    assert index.catalog.stats().host_bytes == 0


def test_an_answer_without_a_limit_takes_no_room_from_other_donors():
    index = index_of(host_tokens=4000)
    for each in range(4):
        keep(index, f"{each}", text(each, 200))
    for each, max_new_tokens in ((8, 30), (9, 100_000)):
        intent = index.intend(f"{each}", tracked(each, text(each, 200)), max_new_tokens)
        assert intent.max_tokens == 200 + min(max_new_tokens, MAX_ANSWER_TOKENS)
    assert moves(index) == OffloadCommands()
    assert all(reused(index, text(each, 200)) == 200 for each in range(4))


@pytest.mark.promise(
    "donors",
    "A text is kept once, and takes room when its request ends: a conversation takes that of its last turn, and "
    "beams one donor's",
)
def test_a_conversation_takes_its_own_room_and_evicts_nothing():
    index = index_of(host_tokens=1700)
    for each in range(4):
        keep(index, f"{each}", text(each, 120))
    said = text(50, 1200)
    for turn in range(1, 13):
        keep(index, f"turn-{turn}", said[: turn * 100])
    stats = index.catalog.stats()
    assert (stats.ready, stats.host_bytes, stats.evicted) == (5, (4 * 120 + 1200) * TOKEN_BYTES, 0)
    assert [reused(index, each) for each in (said, text(0, 120), text(3, 120))] == [1200, 120, 120]


def test_what_a_donor_continues_goes_once_that_is_held_and_not_before():
    observer = Observer("held", "gone")
    index, said = index_of(observer=observer), text(1, 300)
    keep(index, "turn-1", said[:200])
    begin(index, "turn-2", said)
    assert (moves(index), reused(index, said)) == (OffloadCommands(), 200)
    index.saved(SavedDonor("turn-2", 0, "no memory"))
    assert (moves(index).drops, reused(index, said)) == (["turn-2"], 200)
    observer.told.clear()
    keep(index, "turn-3", said)
    assert observer.told == [("held", "turn-3", 300, "host"), ("gone", "turn-1")]
    assert (moves(index).drops, reused(index, said)) == (["turn-1"], 300)


@pytest.mark.promise("donors", "A text is kept once, and...")
def test_beams_and_answers_to_one_prompt_leave_one_donor():
    index, prompt = index_of(host_tokens=4000), text(1, 1000)
    begin(index, "first", prompt)  # and is still being saved
    for beam in range(4):
        for step in range(1, 9):
            asked = np.concatenate([prompt, text(beam + 10, step)])
            assert index.intend("beam", tracked(2, asked), 1) is None
    intents = [index.intend(f"{each}", tracked(each, text(2, 200)), 500) for each in range(3)]
    answered = [np.concatenate([text(2, 200), text(each + 20, 300)]) for each in range(3)]
    kept = [index.begin_save(*each) for each in zip(intents, ["namespace"] * 3, answered, strict=True)]
    assert kept == [True, False, False]
    # An answer that goes on where a short one ended is another matter.
    longer = index.intend("longer", tracked(5, prompt), 500)
    assert index.begin_save(longer, "namespace", np.concatenate([prompt, text(3, 400)]))


def test_when_all_are_dropped_those_that_are_leased_or_being_saved_go_as_soon_as_they_can():
    index = index_of()
    keep(index, "free", text(1))
    keep(index, "leased", text(2))
    _, (lease,) = plan(index, text(2))
    begin(index, "saving", text(3))
    index.lost_all()
    index.take_events(deque())
    assert index.held().donors == 1
    lease.release()
    index.saved(SavedDonor("saving", TEXT))
    index.take_events(deque())
    assert index.held() == CatalogStats()
    assert sorted(index.offload.take_commands().drops) == ["free", "leased", "saving"]
    keep(index, "new", text(3))
    assert reused(index, text(3)) == TEXT


def test_any_number_of_donors_that_cannot_be_leased_is_planned_around():
    index, tokens = index_of(host_tokens=3000), text(1, 200)
    for gone in range(6):
        keep(index, f"gone-{gone}", np.concatenate([text(gone, 3), tokens[: 190 - gone]]))
        index.catalog.drop(f"gone-{gone}")
    keep(index, "held", np.concatenate([text(7, 3), tokens[:150]]))
    keep(index, "beside", text(8, 100))
    planned, leases = plan(index, np.concatenate([tokens, text(8, 100)]))
    assert {lease.donor_id for lease in leases} == {"held", "beside"}
    assert (planned.plan.reused_tokens, index.catalog.stats().leases) == (250, 2)


class Tiers:
    """An index with room for so many texts in memory, on the card and on disk, and what it told."""

    def __init__(self, host=4, device=0, disk=64, is_read=True, **overrides):
        self.observer, self.events = Observer("found", "moved", "gone"), []
        self.link = offload.DiskLink() if disk else None
        room = {"device_bytes": device * TEXT * TOKEN_BYTES, "disk_bytes": disk * FILE_BYTES}
        self.index = index_of(host * TEXT, self.observer, self.link, self.events.append, **room | overrides)
        if is_read:
            self.hear(OffloadEventKind.FILES_READ)

    @property
    def told(self):
        """What the observer heard since the last time."""
        told, self.observer.told = self.observer.told, []
        return told

    def hear(self, kind, donor_id="", **more):
        self.index.take_events(deque([OffloadEvent(kind, donor_id, **more)]))

    def keep(self, *donor_ids):
        """Donors whose text is named by their id; returns the commands that made room for them."""
        for donor_id in donor_ids:
            keep(self.index, donor_id, self.text(donor_id))
        return moves(self.index)

    def find(self, *donor_ids, length=TEXT, generations=None, **texts):
        """Donors whose files lay on the disk; of a text that is named by their id, unless it is given."""
        for donor_id, tokens in ({each: self.text(each, length) for each in donor_ids} | texts).items():
            held = DonorText(donor_id, "namespace", tokens, (generations or {}).get(donor_id, 0))
            self.link.found.append(OffloadEvent(OffloadEventKind.FILE_FOUND, donor_id, None, held))
        self.index.take_events(deque())

    def look_up(self, *donor_ids):
        """Looks a prompt with all of these texts up; returns the tokens reused, and the commands."""
        return reused(self.index, np.concatenate([self.text(each) for each in donor_ids])), moves(self.index)

    def text(self, donor_id, length=TEXT):
        return text(int.from_bytes(donor_id.encode(), "little"), length)

    def tiers(self, *donor_ids):
        return [self.index.catalog.tier(donor_id) for donor_id in donor_ids]


@pytest.mark.parametrize("order", [(0, 2), (2, 0), (1, 2), (2, 1)])
def test_of_two_files_of_one_text_the_lowest_generation_stays(order):
    tiers = Tiers()
    generations = {f"of-{generation}": generation for generation in order}
    tiers.find(generations=generations, **dict.fromkeys(generations, text(1)))
    low, high = (f"of-{generation}" for generation in sorted(order))
    assert tiers.tiers(low, high) == [Tier.DISK, None]
    assert moves(tiers.index).drops == [high]
    assert [call for call in tiers.told if call[0] == "found"] == [("found", "of-0", "namespace", TEXT, "disk")] * (
        0 in order
    )
    assert tiers.index.generation(low) == min(order)


@pytest.mark.parametrize(
    ("event", "files", "moves", "heard"),
    [
        (OffloadEventKind.FILE_WRITTEN, 1, OffloadCommands(releases=["first"]), ("moved", "first", "disk")),
        (OffloadEventKind.WRITE_FAILED, 0, OffloadCommands(drops=["first"]), ("gone", "first")),
        (OffloadEventKind.WRITE_SKIPPED, 0, OffloadCommands(drops=["first"]), ("gone", "first")),
    ],
)
def test_what_has_a_file_is_released_and_what_has_none_is_gone(event, files, moves, heard):
    tiers = Tiers(host=1)
    tiers.keep("first")
    tiers.hear(event, "first")
    assert tiers.index.catalog.stats().disk_bytes == files * FILE_BYTES
    assert tiers.keep("second") == moves
    assert tiers.told == [heard]
    assert tiers.index.catalog.resting() == ({"first"} if files else set())


@pytest.mark.promise("donors", "On a disk that is fuller...")
def test_on_a_full_disk_the_least_valuable_files_make_room_and_few_go_where_that_does_not_help(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("semblend_trt.donors.catalog.time.monotonic", lambda: now[0])
    tiers = Tiers()
    tiers.find("a", "b", "c")
    tiers.keep("first", "waits")
    now[0] += 1
    for donor_id in ("first", "waits"):  # the budget says that there is room: from now on the disk is known better
        tiers.hear(OffloadEventKind.WRITE_FAILED, donor_id, error="full", is_full=True)
    now[0] += 1
    assert tiers.keep("second") == OffloadCommands(drops=["a"])
    tiers.hear(OffloadEventKind.FILE_WRITTEN, "second")
    assert tiers.index.catalog.stats().disk_bytes == 3 * FILE_BYTES
    assert tiers.keep("third") == OffloadCommands(drops=["b"])
    tiers.hear(OffloadEventKind.WRITE_FAILED, "third", error="full", is_full=True)  # something else fills it
    now[0] += 1
    assert not begin(tiers.index, "fourth", text(4)).is_written
    assert tiers.index.catalog.resting() == {"c"}
    now[0] += FULL_SECONDS
    assert begin(tiers.index, "fifth", text(5)).is_written


def test_a_file_goes_only_once_that_of_the_donor_that_continues_it_is_written():
    tiers, said = Tiers(), text(1, 2 * TEXT)
    keep(tiers.index, "turn-1", said[:TEXT])
    tiers.hear(OffloadEventKind.FILE_WRITTEN, "turn-1")
    keep(tiers.index, "turn-2", said)
    assert moves(tiers.index) == OffloadCommands()
    tiers.hear(OffloadEventKind.FILE_WRITTEN, "turn-2")
    assert moves(tiers.index) == OffloadCommands(drops=["turn-1"])
    assert tiers.index.catalog.stats().disk_bytes == FORM.file_bytes(2 * TEXT)


def test_of_files_of_one_conversation_the_longest_stays():
    tiers, said = Tiers(), text(1, 4 * TEXT)
    tiers.find(**{"turn-2": said[: 2 * TEXT], "turn-1": said[:TEXT], "turn-3": said})
    assert tiers.tiers("turn-1", "turn-2", "turn-3") == [None, None, Tier.DISK]
    assert moves(tiers.index).drops == ["turn-1", "turn-2"]


def test_texts_wait_for_their_files_and_only_once_the_folder_is_read():
    tiers = Tiers(is_read=False)
    assert not keep(tiers.index, "early", text(1)).is_written
    tiers.hear(OffloadEventKind.FILES_READ)
    assert begin(tiers.index, "donor", text(2)).is_written
    assert {name: len(each.tokens) for name, each in tiers.link.texts.items()} == {"early": TEXT, "donor": TEXT}
    tiers.index.saved(SavedDonor("donor", 0, "no memory"))
    tiers.index.lost({"early"})
    assert tiers.link.texts == {}


@pytest.mark.promise(
    "donors", "A donor on disk alone is read back for the next request, never promised to the one that asks"
)
def test_a_donor_on_disk_is_fetched_once_and_reused_when_it_is_there():
    tiers = Tiers()
    tiers.find("donor")
    assert tiers.look_up("donor") == (0, OffloadCommands(fetches=["donor"]))
    assert tiers.look_up("donor") == (0, OffloadCommands())
    assert plan(tiers.index, tiers.text("donor"))[0].outcome_reason == "donor_on_disk"
    tiers.hear(OffloadEventKind.FETCHED, "donor")
    assert tiers.told == [("found", "donor", "namespace", TEXT, "disk"), ("moved", "donor", "host")]
    assert tiers.look_up("donor")[0] == TEXT


def test_a_donor_that_cannot_be_read_back_is_gone():
    tiers = Tiers()
    tiers.find("donor")
    tiers.look_up("donor")
    tiers.hear(OffloadEventKind.FETCH_FAILED, "donor")
    assert tiers.look_up("donor") == (0, OffloadCommands(drops=["donor"]))
    assert (len(tiers.index.catalog), tiers.told[-1]) == (0, ("gone", "donor"))


def test_the_donors_of_most_tokens_are_fetched_and_promoted_first():
    names = [f"donor-{number}" for number in range(offload.MAX_FETCHES + 2)]
    tiers = Tiers(host=4 * len(names), device=4 * len(names))
    tiers.find(*names, length=2 * TEXT)
    tiers.find()
    prompt = np.concatenate([tiers.text(name, 2 * TEXT)[: TEXT + 5 * at] for at, name in enumerate(names, 1)])
    plan(tiers.index, prompt)
    fetched = tiers.index.offload.take_commands().fetches
    assert fetched == names[: -offload.MAX_FETCHES - 1 : -1]
    for name in fetched:
        tiers.hear(OffloadEventKind.FETCHED, name)
    plan(tiers.index, prompt)
    assert tiers.index.offload.take_commands().promotions == names[: -offload.MAX_PROMOTIONS - 1 : -1]


def test_near_donors_are_fetched_ahead_a_few_at_once_and_no_donor_is_lost_for_them():
    names, tiers = ["c", "a", "b", "d"], Tiers()
    tiers.keep("held")
    tiers.find(*names)
    tiers.index.offload.prefetch(["unknown", "held", *names])
    assert moves(tiers.index) == OffloadCommands(fetches=names[: offload.MAX_PREFETCHES])
    full = Tiers(host=1)
    full.find("near")
    full.keep("held")
    full.hear(OffloadEventKind.WRITE_FAILED, "held")
    full.index.offload.prefetch(["near"])
    assert moves(full.index) == OffloadCommands()
    assert full.look_up("near")[1] == OffloadCommands(drops=["held"], fetches=["near"])


def test_a_used_donor_of_the_host_is_promoted_once_unless_that_fails():
    tiers = Tiers(host=20, device=1)
    tiers.keep("first", "second")
    tiers.hear(OffloadEventKind.FILE_WRITTEN, "first")
    assert tiers.look_up("first")[1] == OffloadCommands(offloads=["second"], writes=["second"], promotions=["first"])
    assert tiers.told[-1] == ("moved", "second", "host")
    tiers.hear(OffloadEventKind.PROMOTE_FAILED, "first")
    assert (tiers.tiers("first"), tiers.told) == ([Tier.HOST], [("moved", "first", "host")])
    assert tiers.index.catalog.stats().device_bytes == 0
    assert tiers.look_up("first")[1].promotions == ["first"]
    assert tiers.look_up("first") == (TEXT, OffloadCommands())
    tiers.hear(OffloadEventKind.PROMOTED, "first")
    assert tiers.tiers("first", "second") == [Tier.DEVICE, Tier.HOST]
    assert tiers.told == [("moved", "first", "device")]


@pytest.mark.parametrize("limits", [{"disk": 2}, {"max_donors": 2}])
def test_of_more_files_than_there_is_room_for_those_used_last_stay(limits):
    """They are found the longest unused first, of a life with a larger budget, or while new donors take places."""
    tiers = Tiers(**limits)
    tiers.find("oldest", "older", "newest")
    assert tiers.index.catalog.resting() == {"older", "newest"}
    assert moves(tiers.index) == OffloadCommands(drops=["oldest"])
    assert tiers.told[-2:] == [("gone", "oldest"), ("found", "newest", "namespace", TEXT, "disk")]
    tiers.find("older", length=2 * TEXT)  # its id is taken
    tiers.find("huge", length=1 << 16)
    assert moves(tiers.index) == OffloadCommands(drops=["older", "huge"])
    assert tiers.index.catalog.resting() == {"older", "newest"}


def test_every_event_is_counted_even_of_donors_that_are_not_known():
    tiers = Tiers(device=1, is_read=False)
    for kind in OffloadEventKind:
        tiers.hear(kind, "unknown")
    assert tiers.events == list(OffloadEventKind)
    assert (len(tiers.index.catalog), moves(tiers.index)) == (0, OffloadCommands())


def shared(left, right):
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def adds_little(tokens, to):
    return len(tokens) - shared(tokens, to) < min(64, 1 + len(tokens) // LITTLE_SHARE)


class DonorIndexMachine(RuleBasedStateMachine):
    """Requests of all generations that begin alike, saves, failures and leases against what must always hold."""

    ROOM = 900

    def __init__(self):
        super().__init__()
        self.index = index_of(host_tokens=self.ROOM)
        self.asked, self.open, self.leases, self.kept, self.serial = [], [], [], {}, 0

    @rule(seed=st.integers(0, 2), length=st.integers(64, 250), tail=st.integers(0, 90), generation=st.integers(0, 3))
    def intend(self, seed, length, tail, generation):
        self.serial += 1
        tokens = np.concatenate([text(seed, 250)[:length], text(self.serial % 3 + 9, tail)])
        request = behind_moved_kv(tokens, generation) if generation else tracked(self.serial, tokens)
        intent = self.index.intend(f"donor-{self.serial}", request, 0, 2)
        if intent is not None:
            assert intent.generation == generation <= 2
            self.asked.append((intent, tokens))

    @rule(is_dropped=st.booleans())
    def end(self, is_dropped):
        if self.asked:
            intent, tokens = self.asked.pop(0)
            if self.index.begin_save(intent, "namespace", tokens, (), 0 if is_dropped else intent.generation):
                self.open.append((intent.donor_id, tokens))
            self.obey()

    def obey(self):
        for donor_id in self.index.offload.take_commands().drops:
            self.kept.pop(donor_id, None)

    @rule(most=st.sampled_from([1000, 1000, 64, 0]))
    def save(self, most):
        if self.open:
            donor_id, tokens = self.open.pop(0)
            held, before = min(most, len(tokens)), dict(self.kept)
            self.index.saved(SavedDonor(donor_id, held, None if held else "injected"))
            if held:
                self.kept[donor_id] = tokens[:held]
            self.obey()
            for gone in set(before) - set(self.kept):  # a save that fails costs no donor, one that is held only copies
                assert held
                assert any(adds_little(before[gone], each) for each in self.kept.values())

    @rule()
    def cancel(self):
        if self.asked:
            self.index.cancel(self.asked.pop()[0])

    @rule(seed=st.integers(0, 2))
    def read(self, seed):
        planned, leases = plan(self.index, text(seed, 200))
        self.leases.extend(leases)
        if planned.plan is not None:
            assert {lease.donor_id for lease in leases} == {span.donor_id for span in planned.plan.spans}
            assert all(self.index.generation(lease.donor_id) == 0 for lease in leases)  # no profile allows others

    @rule()
    def release(self):
        while self.leases:
            self.leases.pop().release()
        self.index.take_events(deque())
        self.obey()

    @invariant()
    def room_is_that_of_what_is_kept_and_saved(self):
        stats = self.index.catalog.stats()
        texts = [*self.kept.values(), *(tokens for _, tokens in self.open)]
        assert stats.host_bytes == sum(map(len, texts)) * TOKEN_BYTES <= self.ROOM * TOKEN_BYTES
        assert (stats.leases, stats.saving) == (len(self.leases), len(self.open))
        assert set(self.index.texts.by_id) == set(self.kept) | {donor_id for donor_id, _ in self.open}
        assert set(self.index.texts.spans._donors) == set(self.kept)
        assert set(self.index.texts.generations) | set(self.index.texts.continued) <= set(self.index.texts.by_id)

    @invariant()
    def no_text_is_kept_twice(self):
        if self.leases or self.open:
            return
        for one, tokens in self.kept.items():
            for other, others in self.kept.items():
                if one != other and self.index.generation(one) >= self.index.generation(other):
                    assert not adds_little(tokens, others)

    def teardown(self):
        self.release()
        while self.open:
            self.save(1000)
        assert self.index.catalog.stats().leases == 0


TestDonorIndexMachine = DonorIndexMachine.TestCase
TestDonorIndexMachine.settings = hypothesis_settings(max_examples=30, stateful_step_count=30)


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(st.lists(st.tuples(TOKENS, st.integers(0, 1), st.sampled_from("ab")), max_size=30), TOKENS, st.data())
def test_the_text_that_begins_most_alike_is_near(texts, asked, data):
    order, held = DonorTexts(load_settings()), {}
    for number, (tokens, generation, namespace) in enumerate(texts):
        donor_id = f"{number % 12}"  # a text may be put in place of what it was
        order.put(DonorText(donor_id, namespace, np.array(tokens, dtype=np.int32), generation))
        held[donor_id] = (tokens, generation, namespace)
    for donor_id in data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []:
        order.gone(donor_id)
        del held[donor_id]
    assert set(order.by_id) == set(held)
    near = list(order.near("a", np.array(asked, dtype=np.int32)))
    for common, each in near:
        assert common == shared(each.tokens, asked)
        assert (each.tokens.tolist(), each.generation, "a") == held[each.donor_id]
    for wanted in (0, 1):
        of_all = [shared(tokens, asked) for tokens, *rest in held.values() if rest == [wanted, "a"]]
        assert max(of_all, default=None) == max(
            (common for common, each in near if each.generation == wanted), default=None
        )
