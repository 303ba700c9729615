"""Orders for the tiers, and what the catalog and the library learn when news of them come back."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from semblend_trt.connector.donor_index import MAX_FETCHES, MAX_PROMOTIONS, OffloadQueue
from semblend_trt.donors.donor_file import DonorText
from semblend_trt.donors.donor_table import Tier
from semblend_trt.donors.offload import DiskLink, OffloadCommands, OffloadEvent, OffloadEventKind
from tests.semblend_trt.held_donors import catalog_of

TOKENS = 10


class Books:
    """What a library would do, on record."""

    def __init__(self, catalog):
        self.catalog, self.calls = catalog, []

    def remember(self, donor_id, text):
        self.calls.append(("remember", donor_id))

    def forget(self, donor_id):
        self.calls.append(("forget", donor_id))

    def moved(self, donor_id, tier):
        self.calls.append(("moved", donor_id, tier))


class Desk:
    """A desk over a catalog of its own: room for `host` donors in memory, `device` on the card, 64 on disk."""

    def __init__(self, host=4, device=0, has_disk=True):
        self.catalog = catalog_of(
            host * TOKENS, 1000, device_blocks=device, block_size=TOKENS, disk_bytes=64 * 8192 if has_disk else 0
        )
        self.books, self.events = Books(self.catalog), []
        self.link = DiskLink() if has_disk else None
        self.desk = OffloadQueue(self.books, self.link, self.events.append)
        if has_disk:
            self.hear(OffloadEvent(OffloadEventKind.FILES_READ))
            self.events.clear()

    def hear(self, *news):
        self.desk.take_events(deque(news))

    def keep(self, donor_id):
        """A donor is placed and saved; returns the orders that made room for it."""
        placement = self.catalog.reserve(donor_id, TOKENS)
        self.desk.make_room(placement)
        self.catalog.commit(donor_id, TOKENS)
        return self.desk.take_commands()

    def rest(self, *donor_ids):
        """Donors that are on disk alone."""
        for donor_id in donor_ids:
            assert self.catalog.adopt(donor_id, TOKENS, b"") == ()


def text(tokens=TOKENS):
    return DonorText("key", np.arange(tokens, dtype=np.int32), b"digest")


def test_orders_are_taken_once():
    books = Desk(host=1, has_disk=False)
    books.keep("first")
    assert books.keep("second") == OffloadCommands(drops=["first"])
    assert books.desk.take_commands() == OffloadCommands()
    assert books.books.calls == [("forget", "first")]


def test_the_displaced_of_the_card_move_down_and_get_a_file():
    books = Desk(host=2, device=1)
    assert books.keep("first") == OffloadCommands()
    assert books.keep("second") == OffloadCommands(offloads=["first"], writes=["first"])
    assert books.books.calls == [("moved", "first", Tier.HOST)]


def test_what_has_a_file_is_released_and_not_dropped():
    books = Desk(host=1)
    books.keep("first")
    books.hear(OffloadEvent(OffloadEventKind.FILE_WRITTEN, "first"))
    assert books.keep("second") == OffloadCommands(releases=["first"])
    assert books.books.calls == [("moved", "first", Tier.DISK)]
    assert books.catalog.resting() == {"first"}


@pytest.mark.parametrize("event", [OffloadEventKind.WRITE_FAILED, OffloadEventKind.WRITE_SKIPPED])
def test_without_a_file_a_donor_that_leaves_memory_is_gone(event):
    books = Desk(host=1)
    books.keep("first")
    books.hear(OffloadEvent(event, "first", "no room"))
    assert books.catalog.stats().disk_bytes_used == 0
    assert books.keep("second").drops == ["first"]
    assert books.events == [event]


def test_texts_wait_for_their_files_while_there_is_a_disk():
    books, known = Desk(), text()
    books.desk.add_text("donor", known)
    assert books.link.texts == {"donor": known}
    books.desk.remove_text("donor")
    books.desk.remove_text("donor")
    assert books.link.texts == {}
    without = Desk(has_disk=False)
    without.desk.add_text("donor", known)
    without.desk.remove_text("donor")


def test_a_resting_donor_is_fetched_once():
    books = Desk()
    books.rest("donor")
    books.desk.fetch(["donor"])
    books.desk.fetch(["donor"])
    assert books.desk.take_commands() == OffloadCommands(fetches=["donor"])
    books.hear(OffloadEvent(OffloadEventKind.FETCHED, "donor"))
    assert books.catalog.resting() == frozenset()
    assert books.books.calls == [("moved", "donor", Tier.HOST)]
    books.catalog.lease("donor").release()


def test_a_donor_that_cannot_be_read_back_is_gone():
    books = Desk()
    books.rest("donor")
    books.desk.fetch(["donor"])
    books.desk.take_commands()
    books.hear(OffloadEvent(OffloadEventKind.FETCH_FAILED, "donor", "corrupt"))
    assert len(books.catalog) == 0
    assert books.books.calls == [("forget", "donor")]
    assert books.desk.take_commands() == OffloadCommands(drops=["donor"])


def test_few_donors_are_fetched_at_a_time():
    names = [f"donor-{number}" for number in range(MAX_FETCHES + 2)]
    books = Desk(host=len(names))
    books.rest(*names)
    books.desk.fetch(names)
    assert books.desk.take_commands().fetches == names[:MAX_FETCHES]
    books.hear(OffloadEvent(OffloadEventKind.FETCHED, names[0]))
    books.desk.fetch(names)
    assert books.desk.take_commands().fetches == [names[MAX_FETCHES]]


def test_a_used_donor_of_the_host_is_lifted_once():
    books = Desk(host=20, device=1)
    for name in ("first", "second"):
        books.keep(name)
    books.hear(OffloadEvent(OffloadEventKind.FILE_WRITTEN, "first"))
    books.books.calls.clear()
    books.desk.promote(["first"])
    books.desk.promote(["first"])
    assert books.desk.take_commands() == OffloadCommands(offloads=["second"], writes=["second"], promotions=["first"])
    books.hear(OffloadEvent(OffloadEventKind.PROMOTED, "first"))
    assert (books.catalog.tier("first"), books.catalog.tier("second")) == (Tier.DEVICE, Tier.HOST)
    assert books.books.calls == [("moved", "second", Tier.HOST), ("moved", "first", Tier.DEVICE)]


def test_a_donor_that_cannot_be_lifted_stays_where_it_is():
    books = Desk(host=20, device=1, has_disk=False)
    for name in ("first", "second"):
        books.keep(name)
    books.desk.promote(["first"])
    books.hear(OffloadEvent(OffloadEventKind.PROMOTE_FAILED, "first", "no memory"))
    assert books.catalog.tier("first") is Tier.HOST
    assert books.books.calls[-1] == ("moved", "first", Tier.HOST)
    assert books.catalog.stats().device_blocks_used == 0
    books.desk.promote(["first"])
    assert books.desk.take_commands().promotions == ["first", "first"]


def test_few_donors_are_lifted_at_a_time():
    names = [f"donor-{number}" for number in range(MAX_PROMOTIONS + 1)]
    books = Desk(host=100, device=MAX_PROMOTIONS + 1, has_disk=False)
    for name in [*names, *(f"later-{number}" for number in range(MAX_PROMOTIONS + 1))]:
        books.keep(name)
    books.desk.promote(names)
    assert books.desk.take_commands().promotions == names[:MAX_PROMOTIONS]


def test_found_files_are_taken_in_a_few_at_a_time():
    books = Desk()
    names = [f"donor-{number}" for number in range(6)]
    books.link.found.extend(OffloadEvent(OffloadEventKind.FILE_FOUND, name, None, text()) for name in names)
    books.hear()
    assert books.books.calls == [("remember", name) for name in names[:4]]
    books.hear()
    assert books.catalog.resting() == set(names)


def test_a_found_file_without_room_is_removed():
    books = Desk()
    books.rest("donor")
    books.hear(OffloadEvent(OffloadEventKind.FILE_FOUND, "donor", None, text()))
    assert books.books.calls == []
    assert books.desk.take_commands() == OffloadCommands(drops=["donor"])


@pytest.mark.parametrize("limits", [{"disk_bytes": 2 * 8192}, {"disk_bytes": 1 << 20, "max_donors": 2}])
def test_of_more_files_than_there_is_room_for_those_used_last_stay(limits):
    """They are found the longest unused first, of a life with a larger budget, or while new donors take places."""
    catalog = catalog_of(TOKENS, **limits)
    books, link = Books(catalog), DiskLink()
    desk = OffloadQueue(books, link, lambda event: None)
    for name in ("oldest", "older", "newest"):
        link.found.append(OffloadEvent(OffloadEventKind.FILE_FOUND, name, None, text()))
    desk.take_events(deque())
    assert catalog.resting() == {"older", "newest"}
    assert desk.take_commands() == OffloadCommands(drops=["oldest"])
    assert books.calls[-2:] == [("forget", "oldest"), ("remember", "newest")]
    link.found.append(OffloadEvent(OffloadEventKind.FILE_FOUND, "huge", None, text(1 << 20)))
    desk.take_events(deque())
    assert desk.take_commands() == OffloadCommands(drops=["huge"])
    assert catalog.resting() == {"older", "newest"}


def test_before_the_folder_is_read_nothing_is_written():
    catalog = catalog_of(2 * TOKENS, disk_bytes=1 << 20)
    desk = OffloadQueue(Books(catalog), DiskLink(), lambda event: None)
    assert catalog.reserve("first", TOKENS).written == ()
    desk.take_events(deque([OffloadEvent(OffloadEventKind.FILES_READ)]))
    assert catalog.reserve("second", TOKENS).written == ("second",)


def test_every_event_is_counted_even_of_donors_that_nobody_knows():
    books = Desk(device=1)
    for event in OffloadEventKind:
        books.hear(OffloadEvent(event, "unknown"))
    assert books.events == list(OffloadEventKind)
    assert (len(books.catalog), books.desk.take_commands()) == (0, OffloadCommands())
