"""Every write and every fetch ends in one event, also when the disk fails, and off the caller's thread."""

import threading
from collections import deque

import pytest
import torch

from semblend_trt.donors.disk_tier import FOLDER, MAX_WAITING, DiskTier, DiskTransfers
from semblend_trt.donors.offload import DiskLink
from semblend_trt.donors.offload import OffloadEventKind as Kind
from semblend_trt.donors.store import HostTier
from tests.semblend_trt.held_donors import FORM, held_kv, host_kv, save, text_of, whole

TOKENS = 20


class Kept:
    """Transfers between real tiers, and the events of them."""

    def __init__(self, path, host_tokens=200):
        self.folder = path / FOLDER
        self.disk, self.host = DiskTier(path, FORM), HostTier(host_tokens * FORM.token_bytes, FORM.geometry, FORM.dtype)
        self.link, self.events = DiskLink(), deque()
        self.transfers = DiskTransfers(self.disk, self.host, self.link, self.events)
        self.transfers.drain()

    def hold(self, donor_id, tokens=TOKENS):
        """Puts a donor into host memory, and its text where the transfers look for it."""
        kv = whole(host_kv(tokens))
        save(self.host, donor_id, kv)
        self.link.texts[donor_id] = text_of(tokens, donor_id)
        return kv

    def write(self, donor_id):
        self.transfers.write(donor_id)
        return self.told()

    def fetch(self, donor_id):
        self.transfers.fetch(donor_id)
        return self.told()

    def told(self):
        """The events since the last call, once all that was begun has ended."""
        self.transfers.drain()
        told = [(each.kind, each.donor_id) for each in self.events]
        self.full = [each.donor_id for each in self.events if each.is_full]
        self.events.clear()
        return told

    def files(self):
        return sorted(path.name for path in self.folder.glob("*.donor.*"))


@pytest.fixture
def kept(tmp_path):
    made = Kept(tmp_path)
    yield made
    made.transfers.close()


def test_a_donor_comes_back_bit_for_bit_and_is_removed_with_its_file(kept):
    kv = kept.hold("donor")
    assert kept.write("donor") == [(Kind.FILE_WRITTEN, "donor")]
    kept.host.drop("donor")
    assert kept.fetch("donor") == [(Kind.FETCHED, "donor")]
    assert torch.equal(whole(held_kv(kept.host, "donor")), kv)
    for donor_id in ("donor", "never there"):
        kept.transfers.drop(donor_id)
    assert (kept.told(), kept.files()) == ([], [])


def test_a_donor_that_is_dropped_while_it_is_written_has_no_file(kept):
    kept.hold("donor")
    kept.transfers.write("donor")
    kept.transfers.drop("donor")
    assert (kept.told(), kept.files()) == ([(Kind.FILE_WRITTEN, "donor")], [])


def replace_folder(kept):
    kept.folder.rename(kept.folder.with_name("elsewhere"))
    kept.folder.mkdir()


@pytest.mark.promise("donors", "A full disk or a damaged file costs a cold prefill")
@pytest.mark.parametrize(
    ("change", "event"),
    [
        (lambda kept: kept.link.texts.clear(), Kind.WRITE_SKIPPED),
        (lambda kept: kept.host.drop("donor"), Kind.WRITE_FAILED),
        (replace_folder, Kind.WRITE_FAILED),
    ],
)
def test_a_donor_that_cannot_be_written_gets_no_file(kept, change, event):
    kept.hold("donor")
    change(kept)
    assert (kept.write("donor"), kept.files(), kept.full) == ([(event, "donor")], [], [])
    if change is not replace_folder:
        kept.hold("another")
        assert kept.write("another") == [(Kind.FILE_WRITTEN, "another")]


def test_on_a_full_disk_a_file_is_written_once_another_one_has_gone(small_disk, caplog):
    size = FORM.header_bytes + (TOKENS * (FORM.token_bytes + 4) + 4095) // 4096 * 4096
    kept = Kept(small_disk(size * 5 // 2), host_tokens=1000)
    for name in "abcde":
        kept.hold(name)
    for name in "abcd":
        kept.write(name)
    assert kept.files() == ["a.donor.safetensors", "b.donor.safetensors"]
    assert (caplog.text.count("No space left on device"), kept.full) == (1, ["d"])
    kept.transfers.drop("a")
    assert kept.write("e") == [(Kind.FILE_WRITTEN, "e")]
    kept.transfers.close()


def change_file(kept):
    (path,) = kept.folder.glob("*.donor.safetensors")
    data = bytearray(path.read_bytes())
    data[FORM.header_bytes] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        None,  # it is in memory already
        lambda kept: kept.disk.forget("donor"),
        lambda kept: kept.hold("large", 190),
        change_file,
        replace_folder,
    ],
)
def test_a_fetch_that_cannot_be_is_told(kept, change):
    kept.hold("donor")
    kept.write("donor")
    if change is not None:
        kept.host.drop("donor")
        change(kept)
    used = kept.host.used_bytes
    assert kept.fetch("donor") == [(Kind.FETCH_FAILED, "donor")]
    assert kept.host.used_bytes == used


def test_a_slow_disk_leaves_donors_without_a_file_and_holds_nothing_up(kept, monkeypatch):
    gate, real = threading.Event(), kept.disk.write
    monkeypatch.setattr(kept.disk, "write", lambda *arguments: gate.wait() and real(*arguments))
    names = [f"donor-{number}" for number in range(MAX_WAITING + 2)]
    for name in names:
        kept.hold(name, 10)
        kept.transfers.write(name)
    assert [each.donor_id for each in kept.events] == names[MAX_WAITING:]
    gate.set()
    told = kept.told()
    assert told[:2] == [(Kind.WRITE_SKIPPED, name) for name in names[MAX_WAITING:]]
    assert told[2:] == [(Kind.FILE_WRITTEN, name) for name in names[:MAX_WAITING]]
    kept.hold("later", 10)
    assert kept.write("later") == [(Kind.FILE_WRITTEN, "later")]


def test_what_lies_in_the_folder_is_told_at_the_start(tmp_path):
    first = Kept(tmp_path)
    for name in ("whole", "damaged"):
        first.hold(name)
        first.transfers.write(name)
    first.transfers.close()  # waits for what was begun, and lets the folder go
    (first.folder / "damaged.donor.safetensors").write_bytes(b"nothing")
    (first.folder / "begun.donor.unfinished").write_bytes(b"half")
    second = Kept(tmp_path)
    begun, *others, read = [(each.kind, each.donor_id, (each.error or "").split(":")[0]) for each in second.link.found]
    assert (begun, read) == ((Kind.FILE_REFUSED, "", "unfinished"), (Kind.FILES_READ, "", ""))
    assert set(others) == {(Kind.FILE_FOUND, "whole", ""), (Kind.FILE_REFUSED, "", "corrupt")}
    assert second.files() == ["whole.donor.safetensors"]
    second.transfers.close()


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    def broken(self):
        raise OSError("stale handle")
        yield

    monkeypatch.setattr(DiskTier, "scan", broken)
    kept = Kept(tmp_path)
    assert (kept.told(), list(kept.link.found)) == ([(Kind.DISK_UNAVAILABLE, "")], [])
    kept.transfers.close()
