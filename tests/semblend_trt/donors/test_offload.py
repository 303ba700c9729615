"""Whatever the disk does, every write and every fetch ends in one piece of news, off the caller's thread."""

from __future__ import annotations

import os
import threading
from collections import deque

import pytest
import torch

from semblend_trt.background import Background
from semblend_trt.donors import offload as disk_keeper
from semblend_trt.donors.disk_tier import FOLDER, DiskTier
from semblend_trt.donors.donor_file import DonorText, KvForm
from semblend_trt.donors.host_tier import HostTier
from semblend_trt.donors.offload import MAX_WAITING, DiskLink, DiskTransfers, OffloadEventKind
from tests.semblend_trt.held_donors import held_kv, save

FORM = KvForm(num_layers=3, kv_factor=2, kv_heads=2, head_dim=8, dtype=torch.float32)
TOKENS = 20


class Kept:
    """A keeper over real tiers, and what it told."""

    def __init__(self, path, host_tokens=200, scanned=True):
        self.folder = path / FOLDER
        self.disk, self.host = DiskTier(path, FORM), HostTier(host_tokens * FORM.token_bytes, pin=False)
        self.link, self.news = DiskLink(), deque()
        self.transfers = DiskTransfers(self.disk, self.host, self.link, self.news)
        if scanned:
            self.transfers.drain()

    def hold(self, donor_id, tokens=TOKENS):
        """Puts a donor into host memory, and its text where the keeper looks for it."""
        kv = torch.randn(FORM.shape(tokens), generator=torch.Generator().manual_seed(tokens))
        save(self.host, donor_id, kv)
        self.link.texts[donor_id] = DonorText("key", torch.arange(tokens, dtype=torch.int32).numpy(), bytes(16))
        return kv

    def told(self):
        """The news since the last call, once all that was begun has ended."""
        self.transfers.drain()
        told = [(each.kind, each.donor_id) for each in self.news]
        self.news.clear()
        return told

    def files(self):
        return sorted(path.name for path in self.folder.glob("*.donor.*"))


@pytest.fixture
def kept(tmp_path):
    made = Kept(tmp_path)
    yield made
    made.transfers.close()


def ends(call):
    """Whether the call ends before the keeper would have given up waiting for the disk."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(disk_keeper._CLOSING_SECONDS / 2)
    return not thread.is_alive()


def test_a_donor_comes_back_bit_for_bit(kept):
    kv = kept.hold("donor")
    kept.transfers.write("donor")
    assert kept.told() == [(OffloadEventKind.FILE_WRITTEN, "donor")]
    kept.host.drop("donor")
    kept.transfers.fetch("donor")
    assert kept.told() == [(OffloadEventKind.FETCHED, "donor")]
    assert torch.equal(held_kv(kept.host, "donor").tensor, kv)


def test_as_much_text_is_kept_as_there_is_kv(kept):
    kept.hold("donor", TOKENS)
    kept.link.texts["donor"] = DonorText("key", torch.arange(50, dtype=torch.int32).numpy(), bytes(16))
    kept.transfers.write("donor")
    assert kept.told() == [(OffloadEventKind.FILE_WRITTEN, "donor")]
    assert kept.disk.tokens_of("donor") == TOKENS


def test_a_donor_that_was_withdrawn_gets_no_file(kept):
    kept.hold("donor")
    del kept.link.texts["donor"]
    kept.transfers.write("donor")
    assert kept.told() == [(OffloadEventKind.WRITE_SKIPPED, "donor")]
    assert kept.files() == []


def test_a_donor_that_left_memory_gets_no_file(kept):
    kept.hold("donor")
    kept.host.drop("donor")
    kept.transfers.write("donor")
    assert kept.told() == [(OffloadEventKind.WRITE_FAILED, "donor")]
    assert kept.files() == []


def test_a_full_disk_leaves_no_file_and_the_next_write_works(kept, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    kept.hold("donor")
    with monkeypatch.context() as patch:
        patch.setattr("semblend_trt.donors.donor_file.os.posix_fallocate", full)
        kept.transfers.write("donor")
        assert kept.told() == [(OffloadEventKind.WRITE_FAILED, "donor")]
    assert kept.files() == []
    kept.hold("another")
    kept.transfers.write("another")
    assert kept.told() == [(OffloadEventKind.FILE_WRITTEN, "another")]


def test_a_file_that_changed_is_not_read_back(kept):
    kept.hold("donor")
    kept.transfers.write("donor")
    kept.told()
    kept.host.drop("donor")
    (path,) = kept.folder.glob("*.donor.safetensors")
    data = bytearray(path.read_bytes())
    data[FORM.header_bytes] ^= 1
    path.write_bytes(data)
    kept.transfers.fetch("donor")
    assert kept.told() == [(OffloadEventKind.FETCH_FAILED, "donor")]
    assert ("donor" in kept.host, kept.host.used_bytes) == (False, 0)


@pytest.mark.parametrize("reason", ["never written", "no room", "in memory already"])
def test_a_fetch_that_cannot_be_is_told(kept, reason):
    if reason != "never written":
        kept.hold("donor")
        kept.transfers.write("donor")
        kept.told()
    if reason == "no room":
        kept.host.drop("donor")
        kept.hold("large", 190)
    kept.transfers.fetch("donor")
    assert kept.told() == [(OffloadEventKind.FETCH_FAILED, "donor")]


def test_a_dropped_donor_has_no_file_whatever_was_being_written(kept):
    kept.hold("donor")
    kept.transfers.write("donor")
    kept.transfers.drop("donor")
    assert kept.told() == [(OffloadEventKind.FILE_WRITTEN, "donor")]
    assert kept.files() == []
    kept.transfers.drop("never there")
    assert kept.told() == []


def test_a_slow_disk_leaves_donors_without_a_file_and_holds_nobody_up(kept, monkeypatch):
    gate, real = threading.Event(), kept.disk.write
    monkeypatch.setattr(kept.disk, "write", lambda *arguments: gate.wait() and real(*arguments))
    names = [f"donor-{number}" for number in range(MAX_WAITING + 2)]
    for name in names:
        kept.hold(name, 10)
        kept.transfers.write(name)
    assert [each.donor_id for each in kept.news] == names[MAX_WAITING:]
    gate.set()
    told = kept.told()
    assert told[:2] == [(OffloadEventKind.WRITE_SKIPPED, name) for name in names[MAX_WAITING:]]
    assert told[2:] == [(OffloadEventKind.FILE_WRITTEN, name) for name in names[:MAX_WAITING]]
    kept.hold("later", 10)
    kept.transfers.write("later")
    assert kept.told() == [(OffloadEventKind.FILE_WRITTEN, "later")]


def test_what_lies_in_the_folder_is_told_at_the_start(tmp_path):
    first = Kept(tmp_path)
    for name in ("whole", "damaged"):
        first.hold(name)
        first.transfers.write(name)
    first.transfers.close()
    (first.folder / "damaged.donor.safetensors").write_bytes(b"nothing")
    (first.folder / "begun.donor.unfinished").write_bytes(b"half")
    second = Kept(tmp_path)
    begun, *others, read = [(each.kind, each.donor_id, (each.error or "").split(":")[0]) for each in second.link.found]
    assert (begun, read) == ((OffloadEventKind.FILE_REFUSED, "", "unfinished"), (OffloadEventKind.FILES_READ, "", ""))
    assert set(others) == {(OffloadEventKind.FILE_FOUND, "whole", ""), (OffloadEventKind.FILE_REFUSED, "", "corrupt")}
    assert second.files() == ["whole.donor.safetensors"]
    second.transfers.close()


def test_what_is_no_file_holds_nobody_up(tmp_path):
    """A FIFO waits for another side for ever: it cost the tier, and the engine's end a minute."""
    first = Kept(tmp_path)
    first.hold("donor")
    first.transfers.write("donor")
    first.transfers.close()
    os.mkfifo(first.folder / "fifo.donor.safetensors")
    second = Kept(tmp_path, scanned=False)
    assert ends(second.transfers.close)
    told = sorted((each.kind.value, each.donor_id) for each in second.link.found)
    assert told == [("file_found", "donor"), ("file_refused", ""), ("files_read", "")]


def test_a_donor_whose_file_became_a_fifo_is_lost_and_nothing_else(kept):
    kept.hold("donor")
    kept.transfers.write("donor")
    kept.told()
    kept.host.drop("donor")
    (path,) = kept.folder.glob("*.donor.safetensors")
    path.unlink()
    os.mkfifo(path)
    kept.transfers.fetch("donor")
    assert ends(kept.transfers.drain)
    assert kept.told() == [(OffloadEventKind.FETCH_FAILED, "donor")]
    kept.transfers.drop("donor")
    kept.told()
    assert kept.files() == []


def test_a_folder_that_was_replaced_is_told_of_every_donor_and_holds_nobody_up(kept):
    for name in ("donor", "another"):
        kept.hold(name)
    kept.transfers.write("donor")
    assert kept.told() == [(OffloadEventKind.FILE_WRITTEN, "donor")]
    kept.host.drop("donor")
    kept.folder.rename(kept.folder.with_name("elsewhere"))
    kept.folder.mkdir()
    kept.transfers.fetch("donor")
    kept.transfers.write("another")
    assert sorted(kept.told()) == [(OffloadEventKind.FETCH_FAILED, "donor"), (OffloadEventKind.WRITE_FAILED, "another")]
    assert kept.files() == []


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    def broken(self):
        raise OSError("stale handle")
        yield

    monkeypatch.setattr(DiskTier, "scan", broken)
    kept = Kept(tmp_path)
    assert kept.told() == [(OffloadEventKind.DISK_UNAVAILABLE, "")]
    assert list(kept.link.found) == []
    kept.transfers.close()


def test_close_waits_for_what_was_begun_and_lets_go_of_the_folder(tmp_path):
    first = Kept(tmp_path)
    first.hold("donor")
    first.transfers.write("donor")
    first.transfers.close()
    assert [each.kind for each in first.news] == [OffloadEventKind.FILE_WRITTEN]
    second = Kept(tmp_path)  # would raise while another holds the folder
    assert [each.kind for each in second.link.found] == [OffloadEventKind.FILE_FOUND, OffloadEventKind.FILES_READ]
    second.transfers.close()


def test_a_disk_that_never_answers_holds_the_end_up_for_a_minute_in_all(kept, monkeypatch):
    now, given = [0.0], []

    def hangs(thread, seconds):
        given.append(seconds)
        now[0] += 45.0
        return False

    with monkeypatch.context() as patch:
        patch.setattr(disk_keeper.time, "monotonic", lambda: now[0])
        patch.setattr(Background, "close", hangs)
        kept.transfers.close()
    assert given == [60.0, 15.0]
