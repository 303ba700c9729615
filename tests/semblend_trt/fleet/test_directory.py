"""The directory: donors from events in any order, incomplete or forged."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.config import EventFormat
from semblend_trt.fleet import directory as module
from semblend_trt.fleet.directory import APPLIED, HEARTBEATS_MISSED, Directory, FairLock, Holder
from semblend_trt.fleet.events import Emitter, EventWriter
from semblend_trt.fleet.sketch import sketch_key, sketch_of
from tests.semblend_trt.fleet.conftest import DOCUMENT, WORKER, Teller, donors_of, fed, feed, holding
from tests.semblend_trt.samples import BASE_NAMESPACE, text

OTHER = (4, 1)
NOW_S = 1_000_000.0
FOUND = (Holder(WORKER, 1000),)
DEEDS = st.sampled_from(["add", "add", "salted", "move", "remove", "restart", "resync", "beat"])
FATES = st.sampled_from(["arrive", "arrive", "drop", "twice", "late"])


@pytest.fixture(autouse=True, scope="module")
def _now():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(time=lambda: NOW_S))
        yield


def changed(payload, **data):
    """The message with other values in its envelope, or where they stand there, in its data."""
    message = json.loads(payload)
    for name, value in data.items():
        (message if name in message else message["data"])[name] = value
    return json.dumps(message).encode()


def with_sketch(registered, sketch):
    segment = json.loads(registered)["data"]["segments"][0]
    return changed(registered, segments=[segment | {"provider_metadata": list(sketch)}])


def said(*deeds, generation=7):
    """A worker's messages: a `reset`, or else the eviction of the named donor."""
    writer = EventWriter(Emitter(*WORKER, generation), EventFormat.JSON)
    return [(writer.reset() if deed == "reset" else writer.evicted(deed)).payload for deed in deeds]


def is_synced(directory):
    return all(each.is_synced for each in directory.workers().values())


@given(st.lists(st.integers(0, 11), max_size=30))
def test_who_is_synced_saw_everything_in_order(order):
    directory, payloads = Directory(), said(*(["reset", *"abcde"] * 2))
    applied = []
    for index in order:
        verdict = directory.observe(payloads[index])
        if verdict == "reset":
            applied = [index]
        elif verdict in APPLIED:
            applied.append(index)
        if directory.workers() and is_synced(directory):
            assert applied == list(range(applied[0], applied[-1] + 1))
            assert applied[0] % 6 == 0


def test_what_is_wrong_is_told_with_its_name():
    told = []
    directory = Directory(on_problem=lambda reason, sentence: told.append((reason, sentence)))
    speaks = EventWriter(Emitter(*WORKER, 5), EventFormat.JSON)
    first, lost = speaks.reset().payload, [speaks.evicted("never there").payload, speaks.heartbeat(1.0, 5, 5).payload]
    feed(directory, [first, first, b"garbage", *lost])
    speaks.reset()
    feed(directory, [speaks.evicted("a").payload, *said("reset", generation=1)])
    assert [reason for reason, _ in told] == ["duplicate", "malformed", "unknown_donor", "wrong_state", "gap", "stale"]
    assert told[0][1] == "worker 3.0, event 1: was seen already, or comes too late"
    assert {reason: directory.counts[reason] for reason, _ in told} == {reason: 1 for reason, _ in told}


def test_the_holder_of_a_prompts_text_is_found_wherever_it_stands(directory):
    document, half = text(1, 3000), text(2, 3000)
    first = holding(("a", document))
    second = holding(("b", np.concatenate([text(3, 500), half])), worker=OTHER)
    feed(directory, first.messages() + second.messages())
    prompt = np.concatenate([text(4, 300), document, half[:1500], text(5, 200)])
    found = directory.holders(prompt)
    assert [holder.worker for holder in found] == [WORKER, OTHER]
    assert found[0].tokens == pytest.approx(3000, rel=0.15)
    assert found[1].tokens == pytest.approx(1500, rel=0.3)
    assert directory.holders(prompt.tolist()) == found
    assert directory.holders(text(6, 2000)) == ()


def test_a_part_of_a_donor_that_goes_takes_the_donor_out_of_lookups(directory):
    teller = fed(directory)
    teller.remove("a")
    feed(directory, [changed(*teller.messages(), segments=[0])])
    assert directory.holders(DOCUMENT) == ()
    assert donors_of(directory, WORKER) == {"a": "device"}


@pytest.mark.promise("fleet", "Sketches of one tenant say nothing to another")
def test_tenants_never_meet(directory):
    teller = Teller(WORKER)
    for number, salt in enumerate((None, "acme", "acme ", "")):
        teller.add(f"donor-{number}", DOCUMENT, salt)
    teller.remove("donor-2")
    feed(directory, teller.messages())
    for salt in (None, "acme", ""):
        assert directory.holders(DOCUMENT, tenant_salt=salt) == FOUND
    for salt in ("acme ", "Acme", "another"):
        assert directory.holders(DOCUMENT, tenant_salt=salt) == ()
    teller.remove("donor-1")
    feed(directory, teller.messages())
    assert directory.holders(DOCUMENT, tenant_salt="acme") == ()
    assert directory.holders(DOCUMENT) == FOUND


def test_a_sketch_that_was_made_without_the_salt_is_not_found_by_the_tenant(directory):
    """A forger who copies a tenant's namespace from the subject cannot attract that tenant's requests."""
    teller = holding(("a", DOCUMENT, "acme"))
    reset, registered = teller.messages()
    guess = sketch_of(DOCUMENT, sketch_key(BASE_NAMESPACE.for_request("acme", None).key, None)).to_bytes()
    feed(directory, [reset, with_sketch(registered, guess)])
    assert donors_of(directory, WORKER) == {"a": "device"}
    assert directory.holders(DOCUMENT, tenant_salt="acme") == ()


def test_a_gap_is_asked_for_once_in_the_interval_until_a_reset_closes_it(directory, clock):
    teller = Teller(WORKER)
    reset, *_ = teller.messages()
    teller.add("a", text(1, 100))
    teller.messages()
    teller.add("b", text(2, 100))
    assert feed(directory, [reset, *teller.messages()]) == ["reset", "gap"]
    assert directory.resyncs_due() == (WORKER,)
    for interval in (10.0, 1.0):
        feed(directory, [changed(*teller.messages(heartbeat=True), interval_seconds=interval)])
        clock.now += interval / 2
        assert directory.resyncs_due() == ()
        clock.now += interval / 2
        assert directory.resyncs_due() == (WORKER,)
    assert not is_synced(directory)
    teller.resync()
    feed(directory, teller.messages(heartbeat=True))
    clock.now += 10
    assert directory.resyncs_due() == ()
    assert donors_of(directory, WORKER) == teller.held
    assert is_synced(directory)


@pytest.mark.promise("fleet", "A forgery lasts as long as it is repeated, and three heartbeats")
@pytest.mark.parametrize("forged", ["first", "generation", "event_id", "interval", "reset", "endless_first", "donors"])
def test_routing_is_whole_again_three_heartbeats_after_the_last_forgery(directory, clock, forged):
    """One heartbeat a second, and a forgery after each of the first ten; only heartbeats undo it."""
    teller = holding()
    reset, _ = teller.messages()
    teller.resync()
    forger = holding(("forged", text(2, 1000)), generation=int(NOW_S * 1e6))
    forged_messages = [
        changed(each, event_id=1 << 40 | number) for number, each in enumerate(forger.messages(heartbeat=True))
    ]

    def beat():
        clock.now += 1.0
        if directory.resyncs_due():
            teller.resync()
        feed(directory, teller.messages())
        feed(directory, [changed(*teller.messages(heartbeat=True), interval_seconds=1.0)])

    def forge(last):
        number = json.loads(last)["event_id"]
        if forged == "generation":
            feed(directory, forged_messages)
        elif forged == "event_id":
            directory.observe(changed(last, event_id=number + (1 << 40)))
        elif forged == "interval":
            directory.observe(changed(last, event_id=number + (1 << 40), interval_seconds=86400.0))
        elif forged == "reset":
            directory.observe(changed(reset, event_id=number + 1))
        elif forged == "endless_first":  # whenever the worker was forgotten, the forger speaks first
            feed(directory, forged_messages[::-1])
        elif forged == "donors":
            directory.observe(changed(forged_messages[1], event_id=number + 1, provider_generation=teller.generation))

    if forged == "first":  # before the directory knows the worker
        first = Teller(WORKER, generation=1 << 60)
        feed(directory, [*first.messages(), changed(*first.messages(heartbeat=True), interval_seconds=86400.0)])
    beat()
    for _ in range(10):
        beat()
        (last,) = teller.messages(heartbeat=True)
        forge(last)
    for _ in range(HEARTBEATS_MISSED + 1):  # and one whose answer to a request for a resync it carries
        beat()
    assert directory.holders(DOCUMENT) == FOUND
    assert directory.holders(text(2, 1000)) == ()
    assert is_synced(directory)


def test_an_event_of_another_worker_than_its_subject_names_is_refused(directory):
    teller = holding()
    messages = teller.messages()
    for sender in ("4", "03", "3.0", "", "resync"):
        assert {directory.observe(each, sender) for each in messages} == {"refused"}
    assert directory.counts["wrong_subject"] == 5 * len(messages)
    assert directory.workers() == {}
    assert directory.observe(messages[0], "3") == "reset"


@pytest.mark.parametrize("is_reset_lost", [False, True])
@pytest.mark.parametrize(
    ("skew_s", "counted"), [(-60, {"stale", "expired"}), (3600, set()), (2 * 86_400, {"future_generation", "expired"})]
)
def test_a_restarted_worker_whose_clock_is_wrong_is_followed_again(directory, clock, skew_s, counted, is_reset_lost):
    started = int((NOW_S - 30) * 1e6)
    dead = holding(("dead", DOCUMENT), generation=started)
    back = holding(("back", text(2, 1000)), generation=started + skew_s * 1_000_000)
    feed(directory, dead.messages(heartbeat=True))
    feed(directory, back.messages()[is_reset_lost:])
    for _ in range(HEARTBEATS_MISSED + 2):
        clock.now += 10
        feed(directory, back.messages(heartbeat=True))
        if directory.resyncs_due():
            back.resync()
    assert donors_of(directory, WORKER) == back.held
    assert directory.holders(DOCUMENT) == ()
    assert directory.holders(text(2, 1000)) == FOUND
    assert is_synced(directory)
    assert {name for name in ("stale", "expired", "future_generation") if directory.counts[name]} == counted
    assert bool(directory.counts["unproven_generation"]) == (is_reset_lost and not counted)


@pytest.mark.promise("fleet", "The directory's memory is bounded")
def test_memory_is_bounded_and_what_is_left_out_is_asked_for_once_there_is_room(directory, monkeypatch):
    monkeypatch.setattr(module, "MAX_WORKERS", 2)
    monkeypatch.setattr(module, "MAX_DONORS", 5)
    monkeypatch.setattr(module, "MAX_NAMESPACES", 1)
    donors = [(f"donor-{name}", text(name, 200)) for name in range(4)]
    tellers = [fed(directory, *donors, heartbeat=True, worker=(number, 0)) for number in range(3)]
    assert [len(each.donors) for each in directory.workers().values()] == [4, 1]
    assert directory.counts["too_many_donors"] == 3
    assert directory.counts["refused"] == directory.counts["too_many_workers"] == 6
    for number in (0, 2, 3):
        assert directory.resyncs_due() == ()
        tellers[0].remove(f"donor-{number}")
        feed(directory, tellers[0].messages() + tellers[1].messages(heartbeat=True))
    assert directory.resyncs_due() == ((1, 0),)
    tellers[1].resync()
    feed(directory, tellers[1].messages(heartbeat=True))
    assert [len(each.donors) for each in directory.workers().values()] == [1, 4]
    tellers[0].add("salted", DOCUMENT, "a tenant of whom there is no room")
    feed(directory, tellers[0].messages(heartbeat=True))
    assert directory.counts["too_many_donors"] == 4
    tellers[1].remove("donor-0")
    tellers[0].resync()
    feed(directory, tellers[1].messages() + tellers[0].messages(heartbeat=True))
    assert directory.counts["bad_namespace"] == 1
    assert directory.holders(DOCUMENT, tenant_salt="a tenant of whom there is no room") == ()
    assert directory.resyncs_due() == ()


def test_events_with_bad_contents_are_counted_and_leave_the_stream_in_step(directory):
    teller = holding()
    reset, registered = teller.messages()
    namespace = json.loads(registered)["data"]["namespace"]
    foreign, deep = {"tenant_key": "semblend:tenant:v1:" + "0" * 32}, {"deep": json.loads("[" * 900 + "]" * 900)}
    bad = [
        changed(registered, namespace={name: value for name, value in namespace.items() if name != "model"}),
        changed(registered, namespace=namespace | {"extra": namespace["extra"] | foreign}),
        changed(registered, namespace=namespace | {"extra": namespace["extra"] | deep}),
        with_sketch(registered, [1, 2, 3]),
        changed(registered, kind="donor_praised"),
    ]
    bad = [changed(each, donor_id=f"bad-{number}", event_id=number) for number, each in enumerate(bad, 3)]
    assert feed(directory, [reset, registered, *bad]) == ["reset"] + ["next"] * 6
    counted = {name: directory.counts[name] for name in ("bad_namespace", "no_sketch", "unknown_kind")}
    assert counted == {"bad_namespace": 3, "no_sketch": 1, "unknown_kind": 1}
    assert directory.holders(DOCUMENT) == FOUND
    assert is_synced(directory)


def test_what_a_worker_held_leaves_the_index_with_the_next_events(directory, monkeypatch):
    monkeypatch.setattr(module, "MAX_DONORS", 40)
    teller = holding(*((f"donor-{number}", text(number, 2000)) for number in range(30)))
    for _ in range(20):
        teller.resync()
        feed(directory, teller.messages(heartbeat=True))
        assert not directory.counts["index_full"]
    for _ in range(30):
        feed(directory, teller.messages(heartbeat=True))
    assert len(directory._by_number) <= 4
    assert directory._entries == sum(len(each.posting.entries) for each in directory._workers[WORKER].donors.values())


def test_sketches_beyond_the_index_are_left_out(directory, monkeypatch):
    monkeypatch.setattr(module, "MAX_DONORS", 2)
    teller = holding(("a", text(1, 2000)), ("b", text(2, 2000)))
    reset, first, second = teller.messages()
    large = sketch_of(text(1, 6000), bytes(16), 500).to_bytes()
    feed(directory, [reset, with_sketch(first, large), second])
    assert directory.counts["index_full"] == 1
    assert donors_of(directory, WORKER) == teller.held
    feed(directory, [teller.messages(heartbeat=True)[0]])
    assert is_synced(directory)


@pytest.mark.promise("fleet", "Two live processes of one worker id are reported, and neither one's text counts as held")
def test_two_live_processes_of_one_id_are_found_and_neither_holds_anything(directory, clock):
    first, second = (fed(directory, heartbeat=True, generation=generation) for generation in (7, 8))
    assert [holder.tokens for holder in directory.holders(DOCUMENT)] == [1000]
    for _ in range(2):
        assert directory.twice() == set()  # the last word of a process that was replaced is no second process
        clock.now += 10
        feed(directory, first.messages(heartbeat=True))
        feed(directory, second.messages(heartbeat=True))
    assert directory.twice() == {(3, 0)}
    assert directory.holders(DOCUMENT) == ()
    assert directory.status()[1].keys() == {"id_twice"}
    for _ in range(4):
        clock.now += 10
        feed(directory, second.messages(heartbeat=True))
    assert directory.twice() == set()
    assert [holder.tokens for holder in directory.holders(DOCUMENT)] == [1000]


@pytest.mark.promise(
    "fleet",
    "`semblend-trt fleet status` says who is known, which ids are seen twice, whose events are old, and which field "
    "keeps namespaces apart, with status 1 for each",
)
def test_old_and_missing_events_are_found(directory, clock):
    teller = fed(directory, heartbeat=True)
    assert directory.status()[1] == {}
    clock.now += 16
    assert directory.status()[1].keys() == {"old_events"}
    teller.add("b", DOCUMENT)
    teller.messages()
    feed(directory, teller.messages(heartbeat=True))
    assert directory.status()[1].keys() == {"unsynced"}


@given(st.lists(st.tuples(st.integers(0, 2), DEEDS, st.integers(0, 5), FATES), max_size=40))
@settings(max_examples=60)
def test_after_a_resync_the_directory_equals_the_truth(history):
    """The history is of three workers: (worker, deed, donor, fate of the messages)."""
    directory = Directory(clock=lambda: 0.0)
    tellers = [Teller((number, 0)) for number in range(3)]
    late = []
    for number, deed, donor, fate in history:
        teller, name = tellers[number], f"donor-{donor}"
        if deed in ("add", "salted"):
            teller.add(name, text(donor, 300), "acme" if deed == "salted" else None)
        elif deed in ("move", "remove"):
            getattr(teller, deed)(name)
        elif deed in ("restart", "resync"):
            getattr(teller, deed)()
        for payload in teller.messages(heartbeat=deed == "beat"):
            if fate == "late":
                late.append(payload)
            else:
                feed(directory, {"arrive": [payload], "drop": [], "twice": [payload] * 2}[fate])
        if fate == "arrive" and late:
            directory.observe(late.pop(0))
    feed(directory, late)
    for teller in tellers:
        teller.resync()
        feed(directory, teller.messages(heartbeat=True))
        assert donors_of(directory, teller.worker) == teller.held
    assert all(each.is_synced for each in directory.workers().values())
    for donor in range(6):
        for salt in (None, "acme"):
            holding = [teller.worker for teller in tellers if (f"donor-{donor}", salt) in teller.salts.items()]
            found = directory.holders(text(donor, 300), tenant_salt=salt)
            assert found == tuple(Holder(worker, 300) for worker in holding)


def test_who_waits_for_the_lock_is_next():
    for _ in range(50):
        lock, order = FairLock(), []

        def wait(lock=lock, order=order):
            with lock:
                order.append("waited")

        thread = threading.Thread(target=wait)
        with lock:
            thread.start()
            while not lock._turn.locked():
                pass
        with lock:
            order.append("asked again")
        thread.join()
        assert order == ["waited", "asked again"]
